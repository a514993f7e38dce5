"""Lacquer in Python: the names it has, and what a run's folder becomes."""

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import simulations
from simulations import compare, load_run
from simulations.report.read_run import NoRunFolder
from tests.cases.recorded_runs import record_run_in


def test_the_names_are_these_and_all_are_there() -> None:
    """A name more or less is a change of what users build on: put it into the changelog."""
    assert simulations.__all__ == ["Compared", "RunResult", "compare", "load_run", "resume", "run"]
    assert all(callable(getattr(simulations, name)) for name in simulations.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        _ = simulations.train  # type: ignore[attr-defined]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, simulations; print([m for m in ('torch', 'flwr', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_folder_is_read(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    result = load_run(str(folder))
    table = result.metrics
    assert list(table["phase"]) == ["start", "histogram", *["round"] * 5]
    assert list(table["validation_accuracy"].dropna()) == [0.5, 0.51, 0.52, 0.53, 0.54, 0.55]
    assert list(table["ratio"].dropna()) == [0.75] * 5
    assert (result.state, result.results["test_accuracy"], result.delta) == ("completed", 0.8125, 1e-5)
    assert result.epsilon is not None
    assert 0 < result.epsilon < 2
    assert (result.adapter, result.not_private) == (folder / "adapter", None)
    assert result.config is not None
    assert result.config.name == "small"
    assert set(result.figures) == {"accuracy", "loss", "epsilon", "clip", "norms", "curve"}
    assert result.warnings[0].startswith("The clip threshold C is still moving")
    shown = result._repr_html_()
    assert "small: completed" in shown
    assert shown.count("<svg ") == 2


def test_a_run_that_has_not_ended_has_no_adapter(record_run: Callable[..., Path], tmp_path: Path) -> None:
    result = load_run(record_run(done=2, state="failed"))
    assert (result.adapter, result.results, len(result.records)) == (None, {}, 4)
    with pytest.raises(NoRunFolder):
        load_run(tmp_path / "none")


def test_runs_are_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        record_run_in(tmp_path / name)
    found = compare(tmp_path)
    (row,) = found.table.to_dict("records")
    assert (row["runs"], row["seeds"], row["test_accuracy"], row["test_accuracy_half"]) == ("small", 2, 0.8125, 0.0)
    assert "<svg " in found.write(tmp_path / "page.html").read_text()
    with pytest.raises(ValueError, match="no run there has finished"):
        compare(record_run_in(tmp_path, done=1, state="failed"))


def test_without_pandas_a_table_says_what_is_missing(
    record_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, load = load_run(record_run()), builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match="needs pandas, which is not installed: pip install pandas"):
        _ = result.metrics
