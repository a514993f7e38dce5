"""Runs the cells of a sweep, several at a time, each in a process of its own; nothing that was spent is forgotten.

A cell's folder holds one run folder per attempt. An attempt that was interrupted or failed keeps its ledger, and with
it the account of what it released; the next one starts in a fresh folder, since a ledger is never continued by guess.
A cell that fails is reported and leaves the others alone. The rows of a sweep as it runs (:class:`Store`) are those
of its results file, of completed run folders, and of the cells that end now.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from server.config.load import ConfigError
from server.run_folder.names import LEDGER_FILE
from simulations.engines.flower import RunFailed
from simulations.engines.hardware import gpu_names
from simulations.engines.launcher import Follow, run_child
from simulations.sweep.cells import CELL_FILE, CELL_MODULE, Cell
from simulations.sweep.rows import Row, is_complete, read_results, row, write_results

_LOOK = 0.25
INTERRUPTED = "interrupted"
Launch = Callable[[Cell, Path, Path, Mapping[str, str | bool] | None, Follow], None]
"""Runs a cell in a folder, with the folder of a user's modules, further keys, and what watches it."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: its row, or why there is none."""

    cell: Cell
    row: Row | None
    error: str = ""


class _Interrupted(Exception):
    """The sweep is being stopped; raised in the threads that wait for cells."""


def finished_folder(cell: Cell, output: Path) -> Path | None:
    """Find the newest run folder of a completed attempt of exactly this cell; None if there is none."""
    for attempt in reversed(attempts(cell, output)):
        # What a cell was is kept beside its configuration, which code of another day may no longer be able to read.
        file = attempt / CELL_FILE
        if file.is_file() and json.loads(file.read_text())["digest"] == cell.digest and is_complete(attempt):
            return attempt
    return None


def attempts(cell: Cell, output: Path) -> list[Path]:
    """The run folders of the attempts at a cell, oldest first."""
    found = (output / cell.key).glob("attempt-*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("attempt-")))


def run_cells(
    cells: Sequence[Cell],
    folder_of: Callable[[Cell], Path],
    jobs: int,
    plugins: Path,
    started: Callable[[Cell, Path], None],
    ended: Callable[[Outcome], None],
    look: Callable[[], None],
    launch: Launch | None = None,
) -> None:
    """Run `cells` in order, `jobs` at a time, and on several GPUs each on one; call `look` between whiles.

    Every callback is called in this thread.

    `folder_of` makes the folder of a cell that is about to begin; what has a ledger there is resumed. `launch` runs a
    cell elsewhere than on this host.
    If it is interrupted (``KeyboardInterrupt``), everything that was started is stopped before it is raised on.
    """
    stop = threading.Event()
    waiting = list(reversed(cells))
    running: dict[Future[Outcome], int] = {}  # the place of each among the jobs
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell, place = waiting.pop(), min(set(range(jobs)) - set(running.values()))
                    folder = folder_of(cell)
                    started(cell, folder)
                    running[pool.submit(_run, cell, folder, plugins, place, stop, launch)] = place
                done, _ = wait(running, timeout=_LOOK, return_when=FIRST_COMPLETED)
                for future in done:
                    del running[future]
                    ended(future.result())
                look()
        finally:
            stop.set()  # the pool waits for its threads, and they for their processes to be gone


def _run(cell: Cell, folder: Path, plugins: Path, place: int, stop: threading.Event, launch: Launch | None) -> Outcome:
    def follow(is_alive: Callable[[], bool]) -> None:
        while is_alive():
            if stop.is_set():
                raise _Interrupted
            time.sleep(_LOOK)

    try:
        keys = {"resume": str(folder)} if (folder / LEDGER_FILE).is_file() else None
        if launch is not None:
            launch(cell, folder, plugins, keys, follow)
            return Outcome(cell, row(cell, folder))
        gpus = gpu_names(cell.config.engine.device)
        run_child(
            cell.config, folder, follow=follow, plugins=plugins, keys=keys, module=CELL_MODULE, threads=1,
            gpu=gpus[place % len(gpus)] if gpus else None,
        )  # fmt: skip
        return Outcome(cell, row(cell, folder))
    except RunFailed as failure:
        return Outcome(cell, None, str(failure))
    except _Interrupted:
        return Outcome(cell, None, INTERRUPTED)
    except Exception as error:  # one cell's trouble (a full disk, say) must not end the others, and must be told
        return Outcome(cell, None, f"{type(error).__name__}: {error}")


def fresh_folder(cell: Cell, output: Path) -> Path:
    """Make the folder of the next attempt at a cell."""
    before = attempts(cell, output)
    number = int(before[-1].name.removeprefix("attempt-")) + 1 if before else 1
    folder = output / cell.key / f"attempt-{number}"
    folder.mkdir(mode=0o700, parents=True)
    write_cell(cell, folder)
    return folder


def write_cell(cell: Cell, folder: Path) -> None:
    """Note in a run folder which cell it is of."""
    (folder / CELL_FILE).write_text(json.dumps({"cell": cell.key, "kind": cell.kind, "digest": cell.digest}) + "\n")


class Store:
    """The results file of a sweep and what is known beyond it.

    A row counts for a cell if its digest is the cell's. Cells that are the same run, such as the public-only baseline
    of two tables, share their row. Rows of cells that the sweep no longer has, or has changed, stay until something
    replaces them.

    Args:
        folder: where its run folders are; completed ones without a row are taken in.
        file: of the results; need not exist.

    Raises:
        ConfigError: the file holds something else.
    """

    def __init__(self, name: str, folder: Path, file: Path, cells: list[Cell]) -> None:
        self.folder, self.file = folder, file
        self._name, self._cells = name, cells
        self._rows: dict[str, Row] = {}
        self._take_file()
        known = {entry["digest"] for entry in self._rows.values()}
        for cell in cells:
            if cell.digest not in known and (found := finished_folder(cell, folder)) is not None:
                self._rows[cell.key] = row(cell, found)
                known.add(cell.digest)
        for entry in list(self._rows.values()):
            self._share(entry)

    @property
    def done(self) -> set[str]:
        """The keys of the cells that have a row of theirs."""
        return {cell.key for cell in self._cells if self._has(cell)}

    def add(self, new: Row) -> list[Row]:
        """Keep the row of a cell that has ended; returns the rows that were missing, its own and shared ones."""
        before = self.done
        self._rows[new["cell"]] = new
        self._share(new)
        self.save()
        return [self._rows[key] for key in sorted(self.done - before)]

    def save(self) -> None:
        """Write the file, with what another sweep may have added to it meanwhile."""
        self._take_file()
        if self._rows:
            write_results(self.file, self._name, list(self._rows.values()))

    def _has(self, cell: Cell) -> bool:
        return cell.key in self._rows and self._rows[cell.key]["digest"] == cell.digest

    def _take_file(self) -> None:
        digests = {cell.key: cell.digest for cell in self._cells}
        try:
            rows = read_results(self.file)
        except ValueError as error:
            raise ConfigError(f"--results: {error}") from None
        for entry in rows:
            known = self._rows.get(entry["cell"])
            if known is None or known["digest"] != digests.get(entry["cell"]):
                self._rows[entry["cell"]] = entry

    def _share(self, entry: Row) -> None:
        for cell in self._cells:
            if cell.digest == entry["digest"] and not self._has(cell):
                place = {"cell": cell.key, "grid": cell.grid, "variant": cell.variant, "axes": dict(cell.axes)}
                self._rows[cell.key] = {**entry, **place}
