"""The runs below a folder, and whether each is alive: what a run said last is not true for ever."""

import fcntl
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from privacy.errors import CorruptRun
from server.run_folder.names import (
    CONFIG_FILE,
    LEDGER_FILE,
    LOCK_FILE,
    ORIGIN_FILE,
    PHASES_FOLDER,
    RESULTS_FILE,
    SITES_FOLDER,
    STATUS_FILE,
)
from server.run_folder.telemetry import read_status
from server.run_folder.verify import ENDED
from simulations.report.outcome import gain_of, guaranteed_pair
from simulations.report.read_run import NoRunFolder, Run, read_run

DAMAGED = "damaged"
NOT_KNOWN = ("rounds_planned", "test_accuracy", "test_perplexity", "added", "epsilon", "epsilon_spent", "delta",
    "not_private", "controller", "seed")  # fmt: skip
"""Columns that a damaged run leaves empty."""
GRACE = 900.0
"""Seconds for which a run may prepare before its process holds the folder."""


def run_folders(places: Iterable[Path], *, finished: bool = False) -> list[Path]:
    """Find the run folders among or below `places`, oldest first by what they wrote last.

    Args:
        finished: only those that have ended.

    Raises:
        NoRunFolder: a place that does not exist, or holds none.
        CorruptRun: ``finished``, and a status cannot be read.
    """
    found: dict[Path, None] = {}
    for place in places:
        inside = [place] if (place / STATUS_FILE).is_file() or (place / CONFIG_FILE).is_file() else []
        inside = inside or _below(place)
        if not inside:
            raise NoRunFolder(f"{place}: there is no run in it; give run folders, or a folder of them such as runs")
        kept = [folder for folder in inside if not finished or _has_ended(folder)]
        found |= dict.fromkeys(sorted(kept, key=_written))
    return list(found)


def _below(place: Path) -> list[Path]:
    """Find run folders below a place. One with a file gone is found too: it must not drop out of what is added up."""
    parts = {PHASES_FOLDER, SITES_FOLDER}
    found = {file.parent for name in (STATUS_FILE, ORIGIN_FILE) for file in place.rglob(name)}
    found |= {file.parent for file in place.rglob(LEDGER_FILE) if (file.parent / CONFIG_FILE).is_file()}
    return sorted(folder for folder in found if not parts & set(folder.relative_to(place).parts))


def _has_ended(folder: Path) -> bool:
    """Whether a run says that it has, be its results there or gone."""
    status = read_status(folder)
    return (folder / RESULTS_FILE).is_file() or (status is not None and status.state in ENDED)


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
    """The state of a run: as it said, but "interrupted" where it said that it is at work and nobody is."""
    if run.state not in ("preparing", "running"):
        return "interrupted" if run.status and run.status.message == "interrupted" else run.state
    said = run.status.time if run.status is not None else 0.0
    starting = run.state == "preparing" and abs(time.time() - said) < GRACE  # the clock may have been put back
    return run.state if is_held(run.path) or (starting and not (run.path / LOCK_FILE).exists()) else "interrupted"


def overview(folders: Sequence[Path]) -> list[dict[str, object]]:
    """Make one row of plain values for each run, for a table or a program; of a damaged one its state and why."""
    return [_row(folder) for folder in folders]


def _row(folder: Path) -> dict[str, object]:
    try:
        run = read_run(folder)
    except CorruptRun as error:
        known = {"folder": str(folder), "name": folder.name, "state": DAMAGED, "message": str(error), "rounds": 0}
        return {**known, **dict.fromkeys(NOT_KNOWN)}
    found, pair, config = gain_of(run), guaranteed_pair(run), run.config
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
        "epsilon_spent": None if pair is None else (run.guarantee or {}).get("epsilon_spent"),
        "delta": None if pair is None else pair[1],
        "not_private": run.not_private,
        "controller": config.strategy.controller if config else None,
        "seed": config.seed if config else None,
    }
