"""A sweep in the terminal: a table of its cells as they run, or a line for each where there is no terminal."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.run_folder.telemetry import read_metrics
from simulations.report.notation import duration_text, epsilon_text, is_drawable, number_text, percent_text
from simulations.sweep.cells import Cell
from simulations.sweep.rows import Row
from simulations.sweep.runner import Launch, Outcome, Store, fresh_folder, run_cells

_SHOWN = 12
QUIET = 60.0
"""Seconds of silence after which a sweep without a terminal says how far its cells are."""
_COLUMNS = {"round": 7, "test": 6, "public": 6, "ε": 4, "clip": 6, "time": 5}


@dataclass
class Progress:
    """The progress of a sweep.

    Attributes:
        total: cells wanted; `before` of them were done when it began.
        running: cell to its run folder and when it began.
        rows: of the cells done since, in order; `failed` those that failed, with the reason.
    """

    total: int
    before: int
    running: dict[str, tuple[Path, float, int]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def start(self, cell: Cell, folder: Path) -> None:
        """Note that a cell begins."""
        self.running[cell.key] = (folder, time.monotonic(), cell.config.rounds)

    @property
    def seconds_left(self) -> float | None:
        """The seconds left by the mean time of the cells done; None before the first."""
        if not self.rows:
            return None
        each = (time.monotonic() - self.began) / (len(self.rows) + len(self.failed))
        return each * (self.total - self.before - len(self.rows) - len(self.failed))


def run_shown(
    cells: Sequence[Cell],
    counted: set[str],
    store: Store,
    jobs: int,
    plugins: Path,
    progress: Progress,
    console: Console,
    launch: Launch | None = None,
) -> None:
    """Run cells, keep their rows, and show how far they are.

    Args:
        counted: keys of the cells that ``progress`` counts; a row may stand for several of them.
        plugins: folder of a user's own modules.
        progress: of the sweep, continued here.
        console: where to draw: a table where that is possible, else a line for each cell that ends, or runs on.
        launch: runs a cell elsewhere than on this host.
    """
    live = Live(console=console, refresh_per_second=2) if is_drawable(console) else None
    spoke = time.monotonic()

    def say(line: str) -> None:
        nonlocal spoke
        spoke = time.monotonic()
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def ended(outcome: Outcome) -> None:
        key = outcome.cell.key
        del progress.running[key]
        if outcome.row is None:
            progress.failed.append((key, outcome.error))
            line = f"{key} FAILED: {outcome.error.partition(chr(10))[0]}"
        else:
            wanted = [entry for entry in store.add(outcome.row) if entry["cell"] in counted]
            progress.rows += wanted
            line = "\n".join("  ".join(row_cells(entry)) for entry in wanted)
        if live is None:
            say(f"{line}  ({summary_line(progress)})")

    def look() -> None:
        if live is not None:
            live.update(progress_table(progress))
        elif time.monotonic() - spoke >= QUIET:
            say("\n".join(running_lines(progress)))

    if live is None and cells:
        console.print("  ".join(["cell", *_COLUMNS]), highlight=False)
    with live or nullcontext():
        fresh = partial(fresh_folder, output=store.folder)
        run_cells(cells, fresh, jobs, plugins, progress.start, ended, look, launch)


def running_lines(progress: Progress) -> list[str]:
    """Say of every cell that runs how far it is."""
    found = []
    for key, (folder, began, rounds) in progress.running.items():
        metrics = read_metrics(folder)
        done = metrics[-1].round if metrics else 0
        found.append(f"{key}  round {done} of {rounds}, {duration_text(time.monotonic() - began)}")
    return found


def progress_table(progress: Progress) -> RenderableType:
    """Draw the cells that run, the last that ended, and how far the sweep is."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
    table.add_column("cell", no_wrap=True, overflow="ellipsis")
    for name, width in _COLUMNS.items():
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for key, error in progress.failed[-_SHOWN:]:
        table.add_row(Text(f"{key}: {error.partition(chr(10))[0]}", "red"))
    for entry in progress.rows[-_SHOWN:]:
        table.add_row(*map(str, row_cells(entry)))
    for key, (folder, began, rounds) in progress.running.items():
        metrics = read_metrics(folder)
        last = metrics[-1] if metrics else None
        accuracy = last.validation_accuracy if last else None
        table.add_row(
            Text(key, "cyan"),
            f"{last.round if last else 0}/{rounds}",
            "",
            "" if accuracy is None else percent_text(accuracy),
            "",
            number_text(last.clip_bound) if last and last.clip_bound else "",
            duration_text(time.monotonic() - began),
        )
    return Group(table, Text(summary_line(progress), "bold"))


def row_cells(entry: Row) -> tuple[str, ...]:
    """The columns of the table for a finished cell."""
    stated, bound = entry["epsilon_stated"], entry["last_clip_bound"]
    return (
        entry["cell"],
        str(entry["rounds_done"]),
        percent_text(entry["test_accuracy"]),
        percent_text(entry["validation_accuracy"]),
        "none" if stated is None else epsilon_text(stated),
        "" if bound is None else number_text(bound),
        duration_text(entry["seconds"]),
    )


def summary_line(progress: Progress) -> str:
    """Say how many cells are done, failed and to come."""
    done = progress.before + len(progress.rows)
    parts = [f"{done} of {progress.total} cells done"]
    if progress.before:
        parts.append(f"{progress.before} of them before")
    if progress.failed:
        parts.append(f"{len(progress.failed)} failed")
    left = progress.seconds_left
    if left:
        parts.append(f"about {duration_text(left)} left")
    return ", ".join(parts)


def print_cells(
    console: Console, cells: Sequence[Cell], multipliers: Mapping[str, tuple[float, ...]], done: set[str]
) -> None:
    """Print the cells of a dry run, with the noise that was calibrated for them."""
    if not console.is_terminal:  # whole keys, one line each
        for cell in cells:
            state = "done" if cell.key in done else "to do"
            console.print(
                f"{cell.key}  z {_noise_text(cell, multipliers[cell.key])}  {state}", markup=False, soft_wrap=True
            )
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("cell", "ε", "z", ""):
        table.add_column(name, no_wrap=True)
    for cell in cells:
        epsilon = number_text(cell.config.privacy.epsilon)
        table.add_row(
            cell.key, epsilon, _noise_text(cell, multipliers[cell.key]), "done" if cell.key in done else "to do"
        )
    console.print(table)


def _noise_text(cell: Cell, multipliers: Sequence[float]) -> str:
    if not multipliers:
        return "none" if cell.kind == "public-only" else "of each site"
    first, last = number_text(multipliers[0]), number_text(multipliers[-1])
    return first if first == last else f"{first} to {last}"
