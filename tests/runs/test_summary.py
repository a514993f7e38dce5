"""What `lacquer run` prints at its end: quality, guarantee, time, folder and what to do next."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from simulations.report.summary import print_summary


def of_width(width: int, *, terminal: bool = False) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=width), stream


def test_the_summary_states_quality_privacy_time_folder_and_next_steps(complete_run: Path) -> None:
    for terminal in (False, True):
        console, stream = of_width(100, terminal=terminal)
        print_summary(complete_run, console)
        text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
        for expected in ("81.2\u00a0%", "epsilon at most 0.", "at delta 1e-5", "5 of 5", "2:05", "report.html"):
            assert expected in text
        assert "adding or removing one client" in text
    assert 'load_base("minilm", "classification", num_labels=7)' in text  # of the terminal, the last one


def test_the_summary_of_a_failed_run_says_why_and_what_is_spent(record_run: Callable[..., Path]) -> None:
    console, stream = of_width(100, terminal=True)
    print_summary(record_run(done=2, state="failed"), console)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert "small failed" in text
    assert "worker 2 did not answer" in text
    assert re.search(r"epsilon at most [0-9.]+ at delta 1e-5, [0-9.]+ spent", text)
    assert "PeftModel" not in text


def test_the_summary_of_a_run_without_a_guarantee_hides_every_epsilon(record_run: Callable[..., Path]) -> None:
    console, stream = of_width(80)
    print_summary(record_run(not_private="noise is off"), console)
    assert "privacy: none" in stream.getvalue()
    assert "epsilon" not in stream.getvalue()


def test_the_summary_shows_one_example_shortened(complete_run: Path) -> None:
    results = json.loads((complete_run / "results.json").read_text())
    said = {
        "prompt": "x " * 200 + "the question?",
        "reference": "r",
        "before": "[bold]old[/bold] " * 40,
        "after": "new",
    }
    (complete_run / "results.json").write_text(json.dumps({**results, "examples": [said, said]}))
    console, stream = of_width(200)
    print_summary(complete_run, console)
    lines = stream.getvalue().splitlines()
    (asked,), (before,), (after,) = (
        [line for line in lines if line.startswith(f"{label}:")] for label in ("asked", "before", "after")
    )
    assert asked.startswith("asked: ...x")
    assert asked.endswith("the question?")
    assert before.endswith("...")
    assert len(before) <= 170
    assert after == "after: new"
    console, stream = of_width(100, terminal=True)
    print_summary(complete_run, console)
    assert "[bold]old[/bold]" in re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
