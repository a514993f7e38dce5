"""Runs the cells of a sweep, several at a time, each in a process of its own; nothing that was spent is forgotten.

A cell's folder holds one run folder per attempt. An attempt that was interrupted or failed keeps its ledger, and with
it the account of what it released; the next one starts in a fresh folder, since a ledger is never continued by guess.
A cell that fails is told of and leaves the others alone.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from simulations.launcher import run_child
from simulations.private_flower import RunFailed
from simulations.sweep_cell import CELL_FILE
from simulations.sweep_file import Cell
from simulations.sweep_results import Row, is_complete, row

_CELL_MODULE = "simulations.sweep_cell"
_LOOK = 0.25


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its row, or why there is none."""

    cell: Cell
    row: Row | None
    error: str = ""


class _Interrupted(Exception):
    """The sweep is being stopped; raised in the threads that wait for cells."""


def finished_folder(cell: Cell, output: Path) -> Path | None:
    """The run folder of a completed attempt of exactly this cell, the newest; None if there is none."""
    for attempt in reversed(attempts(cell, output)):
        # What a cell was is kept beside its configuration, which code of another day may no longer be able to read.
        file = attempt / CELL_FILE
        if file.is_file() and json.loads(file.read_text())["digest"] == cell.digest and is_complete(attempt):
            return attempt
    return None


def attempts(cell: Cell, output: Path) -> list[Path]:
    """Run folders of the attempts at a cell, oldest first."""
    found = (output / cell.key).glob("attempt-*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("attempt-")))


def run_cells(
    cells: Sequence[Cell],
    output: Path,
    jobs: int,
    plugins: Path,
    started: Callable[[Cell, Path], None],
    ended: Callable[[Outcome], None],
    look: Callable[[], None],
) -> None:
    """Run `cells` in order, `jobs` at a time; call `look` between whiles. Every callback is called in this thread.

    If it is interrupted (``KeyboardInterrupt``), everything that was started is stopped before it is raised on.
    """
    stop = threading.Event()
    waiting = list(reversed(cells))
    running: dict[Future[Outcome], Cell] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell = waiting.pop()
                    folder = _fresh_folder(cell, output)
                    started(cell, folder)
                    running[pool.submit(_run, cell, folder, plugins, stop)] = cell
                done, _ = wait(running, timeout=_LOOK, return_when=FIRST_COMPLETED)
                _hand_over(done, running, ended)
                look()
        finally:
            stop.set()  # the pool waits for its threads, and they for their processes to be gone


def _hand_over(
    done: Iterable[Future[Outcome]], running: dict[Future[Outcome], Cell], ended: Callable[[Outcome], None]
) -> None:
    for future in done:
        del running[future]
        ended(future.result())


def _run(cell: Cell, folder: Path, plugins: Path, stop: threading.Event) -> Outcome:
    def follow(is_alive: Callable[[], bool]) -> None:
        while is_alive():
            if stop.is_set():
                raise _Interrupted
            time.sleep(_LOOK)

    try:
        run_child(cell.config, folder, follow=follow, plugins=plugins, module=_CELL_MODULE, threads=1)
        return Outcome(cell, row(cell, folder))
    except RunFailed as failure:
        return Outcome(cell, None, str(failure))
    except _Interrupted:
        return Outcome(cell, None, "interrupted")
    except Exception as error:  # one cell's trouble (a full disk, say) must not end the others, and must be told
        return Outcome(cell, None, f"{type(error).__name__}: {error}")


def _fresh_folder(cell: Cell, output: Path) -> Path:
    before = attempts(cell, output)
    number = int(before[-1].name.removeprefix("attempt-")) + 1 if before else 1
    folder = output / cell.key / f"attempt-{number}"
    folder.mkdir(parents=True)
    (folder / CELL_FILE).write_text(json.dumps({"cell": cell.key, "kind": cell.kind, "digest": cell.digest}) + "\n")
    return folder
