"""What `lacquer run` prints at its end: quality, guarantee, time, folder and what to do next."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from simulations.report.summary import print_summary


def printed(folder: Path, width: int = 400, *, terminal: bool = False) -> str:
    stream = io.StringIO()
    print_summary(folder, Console(file=stream, force_terminal=terminal, width=width))
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


@pytest.mark.parametrize("terminal", [False, True])
def test_the_summary_is_three_lines_quality_privacy_and_next_steps(
    record_run: Callable[..., Path], terminal: bool
) -> None:
    folder = record_run()
    warning, quality, privacy, further = printed(folder, terminal=terminal).splitlines()
    assert warning.startswith("Warning: The clip threshold C is still moving: 0.1667 in round 3, 0.1 at the end")
    assert quality == (
        "small: completed in 2:05. Test accuracy 81.2\u00a0%, macro-F1 80.0\u00a0% (most frequent class 25.0\u00a0%); "
        "validation accuracy 50.0\u00a0% before round 1, 55.0\u00a0% now: clients added +5.0 points"
    )
    assert re.fullmatch(
        r"privacy: epsilon at most 0\.\d+ at delta 1e-5, for one client added or removed; 5 of 5 rounds", privacy
    )
    assert further == f'run folder: {folder}; report.html; lacquer predict {folder} "a text"'


def test_the_summary_of_a_failed_run_says_why_and_what_is_spent(record_run: Callable[..., Path]) -> None:
    text = printed(record_run(done=2, state="failed"), terminal=True)
    assert "small: failed" in text
    assert "worker 2 did not answer" in text
    assert re.search(r"epsilon at most [0-9.]+ at delta 1e-5, [0-9.]+ spent", text)
    assert "lacquer predict" not in text


def test_the_summary_of_a_run_without_a_guarantee_hides_every_epsilon(record_run: Callable[..., Path]) -> None:
    text = printed(record_run(not_private="noise is off"))
    assert "privacy: none. NOT PRIVATE: noise is off" in text
    assert "epsilon" not in text


def test_the_summary_warns_of_a_model_worse_than_a_constant(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, "test_accuracy": 0.2, "validation_accuracy": 0.5}))
    first, second, _, *lines = printed(folder).splitlines()
    assert first.startswith("Warning: Test accuracy, 20.0\u00a0%, is below 25.0\u00a0%, which always answering")
    assert second.startswith("Warning: The run has learnt nothing beyond its start")
    assert len(lines) == 3


def test_the_summary_tells_what_public_records_alone_come_to(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    results = json.loads((folder / "results.json").read_text())
    public = {"public_test_loss": 0.8, "public_test_accuracy": 0.75, "test_records": 1000}
    (folder / "results.json").write_text(json.dumps({**results, **public}))
    assert "; test accuracy 75.0\u00a0% with public records alone" in printed(folder)


def test_the_summary_shows_one_example_shortened(record_run: Callable[..., Path]) -> None:
    complete_run = record_run()
    results = json.loads((complete_run / "results.json").read_text())
    said = {
        "prompt": "x " * 200 + "the question?",
        "reference": "r",
        "before": "[bold]old[/bold] " * 40,
        "after": "new",
    }
    (complete_run / "results.json").write_text(json.dumps({**results, "examples": [said, said]}))
    lines = printed(complete_run).splitlines()
    (asked,), (before,), (after,) = (
        [line for line in lines if line.startswith(f"{label}:")] for label in ("asked", "before", "after")
    )
    assert asked.startswith("asked: ...x")
    assert asked.endswith("the question?")
    assert before.endswith("...")
    assert len(before) <= 170
    assert after == "after: new"
    assert "[bold]old[/bold]" in printed(complete_run, terminal=True)
