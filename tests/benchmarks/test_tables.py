"""Tables in the documentation come from results, and stale ones are noticed."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from simulations import benchmarks
from simulations.benchmarks.__main__ import ALL, BENCHMARKS, main
from simulations.benchmarks.engine import tables as engine_tables
from simulations.benchmarks.harness import results
from simulations.benchmarks.harness.results import ROOT
from simulations.benchmarks.harness.tables import TABLES, block, documents, fill
from simulations.benchmarks.papers.sst2 import accuracies

RESULTS = [
    {
        "seed": seed,
        "epsilon": epsilon,
        "test_accuracy": accuracy,
        "validation_accuracy": 0.8,
        "seconds": 600.0,
        "rounds": 200,
        "dimension": 9218,
        "commit": "abc123",
        "machine": "2 cores",
    }
    for epsilon, seed, accuracy in ((4.0, 0, 0.80), (4.0, 1, 0.82), (2.0, 0, 0.75))
]


def test_sst2_has_one_line_per_privacy_level_with_mean_and_deviation() -> None:
    lines = accuracies(RESULTS).splitlines()
    assert lines[2] == "| 2 | 75.0 % | 80.0 % | 200 | 9,218 | 10:00 | 1 |"
    assert lines[3] == "| 4 | 81.0 % ± 1.4 | 80.0 % ± 0.0 | 200 | 9,218 | 10:00 | 2 |"
    assert lines[-1] == "Seeds 0, 1; machine: 2 cores; commit `abc123`."


def test_a_block_is_replaced_whole_and_filling_twice_changes_nothing(tmp_path: Path) -> None:
    text = "before\n<!-- table:sst2 -->\nold numbers\n<!-- end table:sst2 -->\nafter\n"
    assert "Not measured yet" in fill(text, tmp_path)
    (tmp_path / "sst2.json").write_text(json.dumps(RESULTS))
    filled = fill(text, tmp_path)
    assert "old numbers" not in filled
    assert "| 4 | 81.0 % ± 1.4" in filled
    assert filled.startswith("before\n<!-- table:sst2 -->\n|")
    assert filled.endswith("<!-- end table:sst2 -->\nafter\n")
    assert fill(filled, tmp_path) == filled


def test_wrong_markers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no table 'sst3'; known are"):
        block("sst3", tmp_path)
    with pytest.raises(ValueError, match="1 tables are opened but 0 are closed"):
        fill("<!-- table:sst2 -->\n| 81 % |\n", tmp_path)


def test_every_table_is_asked_for_by_a_document_and_has_a_function() -> None:
    """The text itself is checked by `make check`."""
    marked = {name for path in documents() for name in re.findall(r"<!-- table:([\w.-]+) -->", path.read_text())}
    assert marked == TABLES.keys()
    assert ROOT / "README.md" in documents()
    for place in TABLES.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(f"simulations.benchmarks.{module}"), function)), place


@pytest.mark.parametrize("name", BENCHMARKS)
def test_asking_for_help_measures_nothing(name: str) -> None:
    """Some take no arguments, and would overwrite their results whatever they are given."""
    module = importlib.import_module(f"simulations.benchmarks.{name}")
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    assert text.partition('if __name__ == "__main__":')[2].lstrip().startswith("typer.run(main)")
    command = typer.Typer(add_completion=False)
    command.command()(module.main)
    shown = CliRunner().invoke(command, ["--help"])
    assert (shown.exit_code, "Usage" in shown.output) == (0, True)


def test_every_script_has_its_line_in_the_list() -> None:
    folder = Path(benchmarks.__file__).parent
    scripts = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if 'if __name__ == "__main__":\n    typer.run(main)' in path.read_text(encoding="utf-8")
    }
    assert scripts == BENCHMARKS.keys()
    assert set(ALL) <= BENCHMARKS.keys()


def test_the_list_is_shown_and_an_unknown_name_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == [*BENCHMARKS] * 2
    with pytest.raises(SystemExit, match=r"no benchmark is called engine_speed; there are: engine\.guard"):
        main(["engine_speed"])


def measured(ratio: float) -> dict[str, Any]:
    row = {"job": "tiny", "variant": "engine", "reference": "plain PEFT", "ratio": ratio, "lowest_ratio": ratio}
    return {**row, "highest_ratio": ratio, "clients_per_second": 1.0, "difference": 0.0}


def test_ratios_of_another_processor_stay_beside_those_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for name, ratio in (("A", 4.0), ("B", 2.0), ("B", 2.5)):
        monkeypatch.setattr(results, "processor", lambda name=name: name)
        results.write_ratios("engine-speed", {"ratios": [measured(ratio)]}, "ratios")
    found = json.loads((tmp_path / "engine-speed.json").read_text())
    assert list(found["elsewhere"]) == ["A"]
    header, _, row, *_ = engine_tables.speed(found).splitlines()
    assert header.endswith("| relative difference of updates | on A |")
    assert row.startswith("| tiny | engine | plain PEFT | 2.50 (2.50-2.50) |")
    assert row.endswith("| 0 | 4.00 |")
