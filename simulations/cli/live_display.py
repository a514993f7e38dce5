"""The live picture of a run in the terminal: what has been reached, what it has cost, how long it will take.

Pure: a :class:`Snapshot` in, something rich can draw out. Watching the files and drawing again and again is
:mod:`simulations.cli.progress`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    for part in (_grid(snapshot, bar_width), _now(snapshot, spinner)):
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


def _grid(snapshot: Snapshot, bar_width: int) -> Table:
    """Lay out label and content in columns that stay where they are from one moment to the next."""
    (done, rounds), left, latest = snapshot.done, snapshot.seconds_left, snapshot.latest
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=len("perplexity"))
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row("round", _bar(done, rounds, bar_width, "cyan", f"{done} of {rounds}"))
    grid.add_row("epsilon", _epsilon(snapshot, bar_width))
    grid.add_row()
    for name, label in (
        ("validation_perplexity", "perplexity"),
        ("validation_accuracy", "accuracy"),
        ("validation_loss", "loss"),
        ("clip_bound", "clip"),
    ):
        if said := _course(snapshot, name, percent_text if label == "accuracy" else number_text):
            grid.add_row(label, said)
    grid.add_row("time", duration_text(snapshot.elapsed) + (f", {duration_text(left)} left" if left else ""))
    if latest:
        expected = f"({number_text(latest.expected_cohort)} expected a round)"
        grid.add_row("speed", f"{rate_text(latest)} {snapshot.config.units_text}/s {expected}")
    if latest and latest.presence is not None:
        grid.add_row("clients", Text(latest.presence.text, "" if latest.presence.is_complete else "yellow"))
    return grid


def _course(snapshot: Snapshot, name: str, form: Callable[[float], str]) -> str:
    """What a number is now, and was at the start; empty where neither is known."""
    known = [value for record in snapshot.metrics if (value := getattr(record, name)) is not None]
    if not known:
        return ""
    first = getattr(snapshot.start, name, None)
    return form(known[-1]) if first is None or len(known) < 2 else f"{form(known[-1])}, {form(first)} at the start"


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


def _epsilon(snapshot: Snapshot, bar_width: int) -> RenderableType:
    budget, delta = snapshot.config.privacy.epsilon, snapshot.config.privacy.delta
    if snapshot.not_private:
        return Text("no guarantee", "bold red")
    spent = snapshot.metrics[-1].epsilon_spent if snapshot.metrics else 0.0
    text = f"{epsilon_text(spent)} of {number_text(budget)}, delta {delta_text(delta)}"
    return _bar(spent, budget, bar_width, "magenta", text)


def _bar(completed: float, total: float, width: int, style: str, text: str) -> RenderableType:
    """Draw a share as a bar, with the numbers behind it."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=width)
    line.add_column(no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(total, min(completed, total), width, style="grey37", complete_style=style, finished_style=style)
    line.add_row(bar, text)
    return line


def rate_text(record: RoundRecord) -> str:
    """The expected clients per second with three digits."""
    rate = record.clients_per_second
    return f"{rate:#.3g}".rstrip(".") if rate < 1000 else f"{rate:,.0f}"
