"""Following a run in the terminal: a calm live display, or plain lines where there is no terminal to draw on.

It reads what the run writes (status.json, metrics.jsonl) and nothing else, so it may start before the run, end after
it, or be attached to a run that someone else started.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from server.config.schema import RunConfig
from server.run_folder.names import METRICS_FILE, STATUS_FILE
from server.run_folder.round_record import RoundRecord, within
from server.run_folder.telemetry import Status, read_metrics, read_status
from simulations.cli.live_display import Snapshot, display, rate_text
from simulations.report.notation import duration_text, epsilon_text, is_drawable, number_text

PLAIN_LINES = 60
EVERY = 4.5
"""Seconds after which something is said again where there is no terminal to draw on; with a look, at most five."""
PATIENCE = 2.5
"""Seconds for which a command may be silent before it says what it does: a program takes a second or two to start."""
LATER = 800
"""Once a run lasts longer, what it does is said again after this part of the time so far: a day is not 17,000 lines."""


@contextmanager
def say_working(text: str, console: Console | None = None) -> Iterator[None]:
    """Say what a command does, if it takes long. What it prints elsewhere than there comes after the block.

    Args:
        console: default standard error.
    """
    with say_waiting(text, console or Console(stderr=True), after=PATIENCE):
        yield


@contextmanager
def say_waiting(text: str, console: Console, *, after: float = 0.0) -> Iterator[None]:
    """Say ``text`` while the block lasts: a moving line on a terminal, else a line every few seconds.

    Args:
        after: seconds before the first line, where there is no terminal.
    """
    if is_drawable(console):
        with console.status(text):
            yield
        return
    began, over = time.monotonic(), threading.Event()

    def say() -> None:
        if over.wait(after):
            return
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        while not over.wait(max(EVERY, (time.monotonic() - began) / LATER)):
            spent = f"{text} ({duration_text(time.monotonic() - began)})"
            console.print(spent, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=say, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def follow(
    run_folder: Path,
    config: RunConfig,
    is_alive: Callable[[], bool],
    *,
    console: Console | None = None,
    interval: float = 0.25,
) -> None:
    """Show a run until it ends.

    A terminal gets the live display; a pipe, a log file, a dumb or an ASCII terminal gets at most about sixty plain
    lines. `NO_COLOR` is respected. What the run wrote last is shown even if it ended between two looks.

    Args:
        run_folder: may not exist yet.
        config: of the run, for what is planned.
        is_alive: false once the run has ended, however it ended.
        console: where to draw; standard output by default.
        interval: seconds between two looks.
    """
    console = console or Console()
    start = time.monotonic()

    files = _Files(run_folder)

    def look() -> Snapshot:
        files.refresh()
        return Snapshot(config, files.status, files.metrics, time.monotonic() - start)

    if not is_drawable(console):
        lines = PlainLines(console)
        while is_alive():
            lines.show(look())
            time.sleep(interval)
        lines.show(look())
        return
    spinner = Spinner("dots", style="cyan")
    with Live(console=console, refresh_per_second=4) as live:
        while is_alive():
            live.update(display(look(), console.width, spinner))
            time.sleep(interval)
        live.update(display(look(), console.width))


class _Files:
    """The files of a run, read again only when one has changed: the run needs the cores more than we do."""

    def __init__(self, run_folder: Path) -> None:
        self.status: Status | None = None
        self.metrics: list[RoundRecord] = []
        self._folder = run_folder
        self._seen: dict[str, tuple[int, int]] = {}

    def refresh(self) -> None:
        if self._changed(STATUS_FILE):
            self.status = read_status(self._folder)
        if self._changed(METRICS_FILE):
            self.metrics = read_metrics(self._folder)

    def _changed(self, name: str) -> bool:
        try:
            stat = (self._folder / name).stat()
        except FileNotFoundError:
            return False
        mark = (stat.st_mtime_ns, stat.st_size)
        changed = self._seen.get(name) != mark
        self._seen[name] = mark
        return changed


class PlainLines:
    """A printer of what is new since the last look, in at most about sixty lines for the rounds.

    Where nothing is new, what the run does is said again within five seconds in its first hour, then more and
    more rarely.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._silent_since, self._printed = 0.0, False
        self._message = ""
        self._shown = 0
        self._stamped = False
        self._started = False

    def show(self, snapshot: Snapshot) -> None:
        """Print the news of a snapshot."""
        if snapshot.not_private and not self._stamped:
            self._stamped = True
            self._print(f"NOT PRIVATE: {snapshot.not_private}")
        if snapshot.start is not None and not self._started:
            self._started = True
            self._print(f"before round 1  {measured_text(snapshot.start)}")
        for record in snapshot.metrics:
            if record.phase == "round" and record.round > self._shown:
                self._shown = record.round
                every = max(1, -(-record.rounds // PLAIN_LINES))
                if record.round % every == 0 or record.round in (1, record.rounds):
                    self._print(round_line(record, snapshot.config.units_text))
        message = snapshot.status.message if snapshot.status else ""
        if message and message != self._message and not _tells_a_round(message, snapshot):
            self._message = message
            self._print(message)
        silent = snapshot.elapsed - self._silent_since
        if silent >= max(EVERY, self._silent_since / LATER) and not self._printed:
            doing = message or "waiting for the run to start"
            self._print(f"{doing} ({duration_text(snapshot.elapsed)})")
        if self._printed:
            self._silent_since, self._printed = snapshot.elapsed, False

    def _print(self, text: str) -> None:
        self._printed = True
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def round_line(record: RoundRecord, units: str = "clients") -> str:
    """A training round on one line, in columns."""
    told = [f"round {record.round:>{len(str(record.rounds))}}/{record.rounds}"]
    if measured := measured_text(record):
        told.append(measured)
    if record.clip_bound is not None:
        told.append(f"clip {record.clip_bound:#.4g}")
    if record.not_private is None:
        told.append(f"epsilon {epsilon_text(record.epsilon_spent)}/{number_text(record.epsilon_budget)}")
    told.append(f"{rate_text(record)} {units}/s")
    if record.presence is not None:
        told.append(record.presence.text)
    return "  ".join(told)


def measured_text(record: RoundRecord) -> str:
    """The model's quality on public validation: perplexity of a language model, else accuracy, and the loss."""
    told = []
    if record.validation_perplexity is not None:
        told.append(f"perplexity {record.validation_perplexity:#.4g}")
    elif record.validation_accuracy is not None:
        told.append(f"accuracy {100 * record.validation_accuracy:5.1f}%{within(record, 'accuracy')}")
    if record.validation_loss is not None:
        told.append(f"loss {record.validation_loss:#.4g}{within(record, 'loss')}")
    return "  ".join(told)


def _tells_a_round(message: str, snapshot: Snapshot) -> bool:
    """Whether a message only repeats what the round lines say."""
    return snapshot.latest is not None and message.startswith("round ")
