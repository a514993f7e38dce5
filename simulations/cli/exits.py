"""How a command ends: what a person can put right is said in lines, and every kind of end has its exit code."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console

from privacy import durable
from privacy.errors import CorruptRun
from server.config.load import ConfigError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


@contextmanager
def refusals(*further: type[Exception]) -> Iterator[None]:
    """What a person can put right is said in lines, without a traceback: wrong settings, a full disk, `further`."""
    known: tuple[type[Exception], ...] = (ConfigError, CorruptRun, *further)
    try:
        yield
    except known as error:
        fail(str(error), MISUSED)
    except OSError as error:
        if full := durable.full_disk(error, Path.cwd()):
            fail(full, MISUSED)
        raise
    except KeyboardInterrupt:
        fail("Interrupted; nothing was started.", INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a lost terminal end a run as Ctrl-C does: nothing started may stay behind."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def fail(message: str, code: int) -> NoReturn:
    """Say `message` and end the command with exit code `code`."""
    say(message)
    raise typer.Exit(code)


def say_damaged(files: Sequence[str]) -> None:
    """End a command that has shown several runs with a line for each that it could not: its damaged file."""
    if files:
        fail("\n".join(files), MISUSED)


def say(message: str, style: str = "red") -> None:
    """A message to a person, on standard error."""
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True, style=style)
