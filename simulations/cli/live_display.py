"""The live picture of a run in the terminal: what has been reached, what it has cost, how long it will take.

Pure: a :class:`Snapshot` in, something rich can draw out. Watching the files and drawing again and again is
:mod:`simulations.cli.progress`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from server.config.schema import RunConfig
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Status
from simulations.report.notation import WIDEST, delta_text, duration_text, epsilon_text, number_text, percent_text

_BLOCKS = "▁▂▃▄▅▆▇"  # without the full block, so that rows stay apart
_TIMED_ROUNDS = 10


@dataclass(frozen=True)
class Snapshot:
    """A moment of a run as the display shows it: what the run has written, and how long it was watched (seconds)."""

    config: RunConfig
    status: Status | None
    metrics: Sequence[RoundRecord]
    elapsed: float

    @property
    def latest(self) -> RoundRecord | None:
        """The last training round; None before round 1 has ended."""
        return self.metrics[-1] if self.metrics and self.metrics[-1].phase == "round" else None

    @property
    def start(self) -> RoundRecord | None:
        """The model before any client; None before it was measured."""
        return self.metrics[0] if self.metrics and self.metrics[0].phase == "start" else None

    @property
    def done(self) -> tuple[int, int]:
        """The number of rounds done and of rounds planned."""
        return (self.latest.round, self.latest.rounds) if self.latest else (0, self.config.rounds)

    @property
    def seconds_left(self) -> float | None:
        """The remaining rounds times the mean of the last rounds; None before there is one."""
        timed = [record.seconds for record in self.metrics if record.phase == "round"][-_TIMED_ROUNDS:]
        if not timed or self.latest is None:
            return None
        return (self.latest.rounds - self.latest.round) * sum(timed) / len(timed)

    @property
    def not_private(self) -> str | None:
        """The reason why the run gives no guarantee, as soon as anything says so; else None."""
        stamped = [record.not_private for record in self.metrics if record.not_private]
        if stamped:
            return stamped[-1]
        return "privacy.non-private is set" if self.config.privacy.non_private else None


def display(snapshot: Snapshot, width: int, spinner: Spinner | None = None) -> RenderableType:
    """Draw the live display of one moment, as wide as the terminal but never wider than suits the eye."""
    width = min(width, WIDEST)
    bar_width = max(6, min(36, width - 40))
    page = Table.grid()
    page.add_column(width=width)
    page.add_row(_heading(snapshot, width))
    if snapshot.not_private:
        page.add_row(
            Text(f" NOT PRIVATE: {snapshot.not_private}", style="bold white on red", no_wrap=True, overflow="ellipsis")
        )
    measured = [*_progress_rows(snapshot, bar_width), *_trend_rows(snapshot, bar_width)]
    for part in (_grid(measured), _grid(_time_rows(snapshot)), _now(snapshot, spinner)):
        page.add_row(Padding(part, (1, 0, 0, 2)))
    page.add_row("")
    return page


def _heading(snapshot: Snapshot, width: int) -> RenderableType:
    config = snapshot.config
    title = Text.assemble(
        ("lacquer ", "bold cyan"),
        (config.name, "bold"),
        (f"  {config.model.name}, {config.strategy.controller}, {config.members_text}", "dim"),
    )
    title.truncate(width - 14, overflow="ellipsis")
    return Rule(title, align="left", style="dim", characters="─")


_Row = tuple[RenderableType, ...]
_EMPTY: _Row = ("", "", "")


def _grid(rows: Sequence[_Row]) -> Table:
    """Lay out label, picture and number in columns that stay where they are from one moment to the next."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=len("perplexity"))
    for _ in rows[0][1:]:
        grid.add_column(no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(*row)
    return grid


def _progress_rows(snapshot: Snapshot, bar_width: int) -> list[_Row]:
    done, rounds = snapshot.done
    return [
        ("round", _bar(done, rounds, bar_width, "cyan"), Text(f"{done} of {rounds}", "bold")),
        ("epsilon", *_epsilon_cells(snapshot, bar_width)),
    ]


def _trend_rows(snapshot: Snapshot, bar_width: int) -> list[_Row]:
    """One row per number that changes; a row of blocks ends under the place where the round bar ends."""
    done, rounds = snapshot.done
    rows: list[_Row] = []
    for name, label, form in (
        (*quality(snapshot.metrics),),
        ("validation_loss", "loss", number_text),
        ("clip_bound", "clip", number_text),
    ):
        values = _known(snapshot.metrics, name)
        first = getattr(snapshot.start, name, None)
        if values:
            trend = sparkline(values, max(1, round(bar_width * done / rounds)))
            text = Text(form(values[-1]), "bold")
            if first is not None:
                text.append(f"  {form(first)} at the start", "dim")
            rows.append((label, Text(trend, "cyan"), text))
        elif first is not None:
            rows.append((label, "", Text(f"{form(first)} at the start", "dim")))
    return [_EMPTY, *rows] if rows else rows


def quality(metrics: Sequence[RoundRecord]) -> tuple[str, str, Callable[[float], str]]:
    """The field, name and form of what people judge a model by: perplexity of language models, else accuracy."""
    if any(record.validation_perplexity is not None for record in metrics):
        return "validation_perplexity", "perplexity", number_text
    return "validation_accuracy", "accuracy", percent_text


def _time_rows(snapshot: Snapshot) -> list[_Row]:
    left, latest = snapshot.seconds_left, snapshot.latest
    remaining = f", {duration_text(left)} left" if left else ""
    rows: list[_Row] = [("time", Text(duration_text(snapshot.elapsed) + remaining))]
    units = snapshot.config.units_text
    if latest:
        rows.append(
            (
                "speed",
                Text(f"{rate_text(latest)} {units}/s ({number_text(latest.expected_cohort)} expected a round)"),
                "",
            )
        )
    if latest and latest.presence is not None:
        rows.append(("clients", Text(latest.presence.text, "" if latest.presence.is_complete else "yellow"), ""))
    return rows


def _now(snapshot: Snapshot, spinner: Spinner | None) -> RenderableType:
    message = snapshot.status.message if snapshot.status else "waiting for the run to start"
    text = Text(message.partition("\n")[0], no_wrap=True, overflow="ellipsis")
    if spinner is None:
        return text
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column()
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(spinner, text)
    return line


def _epsilon_cells(snapshot: Snapshot, bar_width: int) -> tuple[RenderableType, RenderableType]:
    budget, delta = snapshot.config.privacy.epsilon, snapshot.config.privacy.delta
    if snapshot.not_private:
        return Text("no guarantee", "bold red"), Text("")
    spent = snapshot.metrics[-1].epsilon_spent if snapshot.metrics else 0.0
    text = f"{epsilon_text(spent)} of {number_text(budget)}, delta {delta_text(delta)}"
    return _bar(spent, budget, bar_width, "magenta"), Text(text)


def _bar(completed: float, total: float, width: int, style: str) -> ProgressBar:
    return ProgressBar(
        total=total,
        completed=min(completed, total),
        width=width,
        style="grey37",
        complete_style=style,
        finished_style=style,
    )


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw values as a row of `cells` block characters, oldest left; a cell for several shows their mean.

    The lowest cell is the lowest block and the highest the highest; a constant row stays in the middle. Values that
    are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    starts = [index * len(finite) // cells for index in range(cells + 1)]
    parts = [finite[a : max(b, a + 1)] for a, b in pairwise(starts)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[len(_BLOCKS) // 2] * cells
    return "".join(_BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1))] for mean in means)


def rate_text(record: RoundRecord) -> str:
    """The expected clients per second with three digits."""
    rate = record.clients_per_second
    return f"{rate:#.3g}".rstrip(".") if rate < 1000 else f"{rate:,.0f}"


def _known(metrics: Sequence[RoundRecord], name: str) -> list[float]:
    values = [getattr(record, name) for record in metrics if record.phase == "round"]
    return [value for value in values if value is not None]
