"""The ends of a command: what a person can put right is said in lines, and every kind of end has its exit code.

No traceback is shown for anything that a person gave; the option ``--debug`` of every command shows it.
"""

import errno
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import click
import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from client.settings import cache_folder
from privacy import durable
from privacy.errors import CorruptRun
from server.config.load import ConfigError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def _debug_option() -> click.Option:
    def note(context: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked:
            context.meta[_DEBUG] = True

    words = "Show where an error came from: its traceback."
    return click.Option(["--debug"], is_flag=True, is_eager=True, expose_value=False, callback=note, help=words)


class Command(TyperCommand):
    """A command with the option ``--debug``."""

    def __init__(self, *given: Any, params: list[click.Parameter] | None = None, **options: Any) -> None:
        super().__init__(*given, params=[*(params or []), _debug_option()], **options)


class Commands(TyperGroup):
    """All commands, with ``--debug`` before their names too: what none of them has caught is said in a line."""

    def __init__(self, *given: Any, params: list[click.Parameter] | None = None, **options: Any) -> None:
        super().__init__(*given, params=[*(params or []), _debug_option()], **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        except Exception as error:  # the last place that sees it: here it becomes words and an exit code
            if getattr(error, "errno", None) == errno.EPIPE:  # whoever read along has gone; click ends in silence
                raise
            if said := unwritable_text(error):
                fail(said, MISUSED)
            kind = f"{type(error).__name__}: {error}"
            fail(f"An error that was not foreseen, {kind}\nWhere it came from: the same command with --debug", FAILED)


def is_debugging() -> bool:
    """Whether ``--debug`` was given to the command that runs."""
    context = click.get_current_context(silent=True)
    return context is not None and _DEBUG in context.meta


_DEBUG = "lacquer.debug"


def unwritable_text(error: BaseException, folder: Path | None = None) -> str:
    """Say what is wrong with a file or folder that cannot be read or written; empty for other errors.

    Args:
        folder: named for a full disk where the error does not name its file; default the current one.
    """
    if full := durable.full_disk(error, folder or Path.cwd()):
        return full
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    path, cache = Path(str(error.filename)), cache_folder()
    said = f"{path}: {(error.strerror or str(error)).lower()}"
    if path in (cache, *cache.parents) or cache in path.parents:
        return (
            f"{said}; {cache} keeps prepared data: make it writable, or set XDG_CACHE_HOME (or data.cache) to another"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{said}; give yourself the right to it, or name another place"
    return said


@contextmanager
def refusals(*further: type[Exception]) -> Iterator[None]:
    """End a command in lines for what a person can put right: wrong settings, an unwritable place, `further`."""
    known: tuple[type[Exception], ...] = (ConfigError, CorruptRun, *further)
    try:
        yield
    except known as error:
        fail(str(error), MISUSED)
    except OSError as error:
        if said := unwritable_text(error):
            fail(said, MISUSED)
        raise
    except KeyboardInterrupt:
        fail("Interrupted; nothing was started.", INTERRUPTED)


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Let SIGTERM and a lost terminal end a run as Ctrl-C does: nothing started may stay behind."""

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
    """Say `message`, behind the traceback of the error that is handled if one asked for it; end with `code`."""
    if is_debugging() and sys.exc_info()[0] is not None:
        traceback.print_exc()
    say(message)
    raise typer.Exit(code)


def say_damaged(files: Sequence[str]) -> None:
    """End a command that has shown several runs with a line for each that it could not: its damaged file."""
    if files:
        fail("\n".join(files), MISUSED)


class Warned:
    """A ``warnings.showwarning`` for people: a line for each warning, once, without the code that it came from."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Say a warning on standard error."""
        if (text := str(message)) not in self._said:
            self._said.add(text)
            say(f"Warning: {text}", "yellow")


def say(message: str, style: str = "red") -> None:
    """Print a message to a person, on standard error."""
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True, style=style)
