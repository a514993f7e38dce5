"""The runs below a folder, and whether each is alive: what a run said last is not true for ever."""

import fcntl
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from server.run_folder.names import CONFIG_FILE, LOCK_FILE, RESULTS_FILE, STATUS_FILE
from simulations.report.outcome import guaranteed, learnt
from simulations.report.read_run import NoRunFolder, Run, read_run

GRACE = 900.0
"""Seconds for which a run may prepare before its process holds the folder."""


def run_folders(places: Iterable[Path], *, finished: bool = False) -> list[Path]:
    """The run folders among or below `places`, oldest first by what they wrote last.

    Args:
        finished: only those with results.

    Raises:
        NoRunFolder: a place that does not exist, or holds none.
    """
    found: dict[Path, None] = {}
    for place in places:
        inside = [place] if (place / STATUS_FILE).is_file() or (place / CONFIG_FILE).is_file() else []
        inside = inside or [status.parent for status in place.rglob(STATUS_FILE) if "phases" not in status.parts]
        if not inside:
            raise NoRunFolder(f"{place}: there is no run in it; give run folders, or a folder of them such as runs")
        kept = [folder for folder in inside if not finished or (folder / RESULTS_FILE).is_file()]
        found |= dict.fromkeys(sorted(kept, key=_written))
    return list(found)


def _written(folder: Path) -> float:
    status = folder / STATUS_FILE
    return status.stat().st_mtime if status.is_file() else 0.0


def is_held(folder: Path) -> bool:
    """Whether a process trains in this folder: it would hold the lock."""
    lock = folder / LOCK_FILE
    if not lock.is_file():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def true_state(run: Run) -> str:
    """How a run stands: as it said, but "interrupted" where it said that it is at work and nobody is."""
    if run.state not in ("preparing", "running"):
        return "interrupted" if run.status and run.status.message == "interrupted" else run.state
    said = run.status.time if run.status is not None else 0.0
    starting = run.state == "preparing" and abs(time.time() - said) < GRACE  # the clock may have been put back
    return run.state if is_held(run.path) or (starting and not (run.path / LOCK_FILE).exists()) else "interrupted"


def overview(folders: Sequence[Path]) -> list[dict[str, object]]:
    """One row of plain values for each run, for a table or a program."""
    return [_row(read_run(folder)) for folder in folders]


def _row(run: Run) -> dict[str, object]:
    found, pair, config = learnt(run), guaranteed(run), run.config
    return {
        "folder": str(run.shown_path),
        "name": run.name,
        "state": true_state(run),
        "message": run.status.message if run.status else "",
        "rounds": run.rounds[-1].round if run.rounds else 0,
        "rounds_planned": run.rounds_planned,
        "test_accuracy": run.result("test_accuracy"),
        "test_perplexity": run.result("test_perplexity"),
        "added": None if found is None else found.after - found.before,
        "epsilon": None if pair is None else pair[0],
        "delta": None if pair is None else pair[1],
        "not_private": run.not_private,
        "controller": config.strategy.controller if config else None,
        "seed": config.seed if config else None,
    }
