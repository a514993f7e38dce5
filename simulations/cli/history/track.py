"""``lacquer track`` and ``lacquer run --track``: a run in an experiment tracker."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

import typer

from server.run_folder.names import shell_quoted
from simulations.cli.exits import refusals, say
from simulations.cli.progress import say_working

PATIENCE = 60.0
"""Seconds for which the end of a run waits for its tracker."""


def track_command(
    run_folder: Annotated[Path, typer.Argument(help="Folder of a run, at work or not.", exists=True, file_okay=False)],
    to: Annotated[str, typer.Option(metavar="TRACKER[:PROJECT]", help="wandb, mlflow or trackio.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Send a run to an experiment tracker: settings, released values, results. Follows one that is at work."""
    with refusals(ValueError), say_working("sending what the run releases"):
        from simulations.history.trackers import track

        told = track(run_folder.resolve(), to)
    if as_json:
        typer.echo(json.dumps({"folder": str(run_folder), "tracker": to, "records_sent": told}, indent=2))
        return
    typer.echo(f"{run_folder}: {told} new records sent to {to}")


def check_tracker(tracker: str | None) -> None:
    """Check a tracker before anything is started; ValueError for one that is unknown or not installed."""
    if tracker is not None:
        from simulations.history.trackers import open_tracker

        open_tracker(tracker)


@contextmanager
def track_beside(folder: Path, tracker: str | None, is_alive: Callable[[], bool]) -> Iterator[None]:
    """Tell a tracker of a run beside it. A tracker that fails is named, and the run goes on."""
    if tracker is None:
        yield
        return
    from simulations.history.trackers import track

    ended = Event()

    def tell() -> None:
        try:
            track(folder, tracker, lambda: is_alive() and not ended.is_set())
        except Exception as error:  # whatever a tracker's client raises: the run is worth more
            again = f"lacquer track {shell_quoted(folder)} --to {tracker}"
            say(f"{tracker}: {type(error).__name__}: {error}\nThe run goes on; `{again}`")

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE)
