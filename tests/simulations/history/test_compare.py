"""Runs beside each other: seeds make a row, differences are paired, the page asks nobody for anything."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from server.config.load import parse
from simulations.cli.app import app
from simulations.history.compare import compare_folders
from simulations.history.compare_page import comparison_table, write_comparison
from tests.cases.recorded_runs import CONFIG, record_run_in


def recorded(place: Path, seed: int, accuracy: float, **changes: object) -> Path:
    (place / f"{len(list(place.iterdir()))}").mkdir()
    folder = record_run_in(place / f"{len(list(place.iterdir())) - 1}")
    table = {**CONFIG.to_table(), "seed": seed, "name": f"run-{seed}", **changes}
    (folder / "config.toml").write_text(parse(table).to_toml())
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, "test_accuracy": accuracy}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    ffa = {**CONFIG.to_table()["strategy"], "aggregation": "ffa"}
    return [
        *(recorded(tmp_path, seed, accuracy) for seed, accuracy in enumerate([0.70, 0.72, 0.74])),
        *(recorded(tmp_path, seed, accuracy, strategy=ffa) for seed, accuracy in enumerate([0.73, 0.75, 0.78])),
    ]


def test_seeds_make_one_row_and_differences_are_paired(runs: list[Path]) -> None:
    found = compare_folders(runs)
    assert [(group.label, group.seeds) for group in found.groups] == [
        ("aggregation=plain", [0, 1, 2]),
        ("aggregation=ffa", [0, 1, 2]),
    ]
    second = found.groups[1]
    difference = found.difference(second, "test_accuracy")
    assert difference is not None
    assert difference.values == pytest.approx((0.03, 0.03, 0.04))
    assert difference.half == pytest.approx(4.302653 * (1e-4 / 3) ** 0.5 / 3**0.5, rel=1e-6)
    assert found.difference(found.groups[0], "test_accuracy") is None
    assert list(second.curve("validation_accuracy")) == [0, 1, 2, 3, 4, 5]


def test_a_narrow_terminal_shows_names_whole(runs: list[Path]) -> None:
    with (console := Console(width=50)).capture() as shown:
        console.print(comparison_table(compare_folders(runs)))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 50
    assert [line.split()[0] for line in lines if "=" in line] == ["aggregation=plain", "aggregation=ffa"]


def test_runs_that_differ_in_much_are_told_apart_by_name(runs: list[Path]) -> None:
    table = CONFIG.to_table()
    other = {section: dict(table[section]) for section in ("model", "local")}
    other["model"] |= {"rank": 7, "alpha": 3.0, "max-length": 17}
    other["local"] |= {"learning-rate": 0.123, "batch-size": 3, "epochs": 3, "max-steps": 7}
    far = [recorded(runs[0].parent, seed, 0.5, **{**other, "name": "far"}) for seed in (0, 1)]
    for folder in runs:
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(re.sub(r'^name = ".*"', 'name = "near"', text, flags=re.MULTILINE))
    assert [(group.label, group.seeds) for group in compare_folders([*runs, *far]).groups] == [
        ("near: aggregation=plain", [0, 1, 2]),
        ("near: aggregation=ffa", [0, 1, 2]),
        ("far", [0, 1]),
    ]


def test_the_last_attempt_at_a_sweeps_cell_counts(runs: list[Path]) -> None:
    for folder, key in zip(runs[:2], ["grid/a/seed=0", "grid/a/seed=0"], strict=True):
        (folder / "cell.json").write_text(json.dumps({"cell": key}))
    first, second = (runs[0].rename(runs[0].parent / "attempt-1"), runs[1].rename(runs[0].parent / "attempt-2"))
    (group,) = compare_folders([first, second]).groups
    assert (group.label, [run.path for run in group.runs]) == ("grid/a", [second])


def test_the_command_writes_a_table_and_a_page_that_needs_nothing(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert "72.0\u00a0% ±\u00a05.0" in done.stdout
    html = page.read_text()
    assert "http:" not in html
    assert "https:" not in html
    assert "<script" not in html
    assert re.search(r"<strong>\+3\.3 ± 1\.4</strong>", html)
    assert html.count("<svg ") == 4
    shown = json.loads(CliRunner().invoke(app, ["compare", *map(str, runs), "--json"]).stdout)
    difference = shown[1]["difference"]["test_accuracy"]
    assert difference["mean"] == pytest.approx(0.1 / 3)
    assert (difference["told_apart"], difference["p"]) == (True, pytest.approx(0.0099, rel=0.01))


def test_two_seeds_show_both_and_equal_ones_promise_nothing(runs: list[Path], tmp_path: Path) -> None:
    """An interval of two seeds is as wide as 13 of their deviations, and none of them has a deviation of 0."""
    found = compare_folders([runs[0], runs[1], runs[3], runs[4]])  # 70, 72 and 73, 75 %
    with (console := Console(width=200)).capture() as shown:
        console.print(comparison_table(found))
    assert "70.0\u00a0% and 72.0\u00a0%" in shown.get()
    assert "±" not in shown.get()
    html = write_comparison(found, tmp_path / "page.html").read_text()
    assert "±" not in html
    assert "0.0 would show" not in html
    assert 'data-label="test accuracy"' in html, "on a narrow screen every number has its name"


def test_runs_of_different_tests_are_said_to_be_so(runs: list[Path], tmp_path: Path) -> None:
    model = {**CONFIG.to_table()["model"], "task": "causal-lm"}
    other = recorded(tmp_path, 0, 0.9, model=model)
    done = CliRunner().invoke(app, ["compare", str(runs[0]), str(other), "-o", str(tmp_path / "page.html")])
    assert "Warning: The runs were not tested on the same: model.task = classification, causal-lm." in done.stdout
    assert "Not one test" in (tmp_path / "page.html").read_text()
    assert not compare_folders(runs).unlike


def test_runs_that_have_not_finished_are_refused(runs: list[Path], record_run: Callable[..., Path]) -> None:
    done = CliRunner().invoke(app, ["compare", str(record_run(done=2, state="failed"))])
    assert done.exit_code == 2
    assert "no run there has finished" in done.stderr
    (runs[0] / "results.json").unlink()  # of one that has: it must not drop out of the comparison
    done = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert done.exit_code == 2
    assert f"{runs[0] / 'results.json'} is missing" in done.stderr
