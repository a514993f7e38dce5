"""``lacquer follow``, ``lacquer stop``, ``lacquer logs``: a run that the SuperLink has, from start to end.

The SuperLink knows a run by a number, people know it by its folder; the folder notes the number (``flower-run.json``).
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from privacy import durable
from server.config.load import ConfigError, load
from server.config.schema import RunConfig
from server.run_folder.names import CONFIG_FILE, FLOWER_RUN_FILE, shell_quoted
from server.run_folder.telemetry import State, Telemetry, read_status
from simulations.cli.exits import FAILED, MISUSED, fail, refusals, say
from simulations.cli.federation.connection import ADDRESS, TRUST, Address, Trust, control
from simulations.cli.federation.control import SUCCESS, Control
from simulations.cli.progress import follow
from simulations.engines.flower import RunFailed
from simulations.engines.launcher import STATES_OF_SUCCESS, wait_quietly
from simulations.engines.staging import App, stage

NOT_TAKEN = (
    "the SuperLink has not started this run for a minute: nobody takes it, or the host is too busy. See that "
    "flower-superexec, which starts runs, is up (its container, or the SuperLink's), restart it if not, and look at "
    "its log and the host's load; nothing is charged meanwhile; Ctrl-C stops waiting"
)
SILENT = "the SuperLink does not answer; it is asked again for {:g} s; see that it is up (its container, its log)"
UNDER_WAY = ("preparing", "running")
SPEAKS = "the SuperLink answers again"
GONE = (
    "the server process of this run has ended without a word: it was killed (out of memory?), or its executor or host "
    "went down; go on with: lacquer deploy --resume {}"
)
NOTHING_TO_STOP = "the SuperLink has no unfinished run of this folder; there is nothing to stop"
Folder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that `lacquer deploy` started.")]


def hand_over(superlink: Control, folder: Path, keys: Mapping[str, str | bool]) -> str:
    """Give the run of a folder to the SuperLink; returns its number there, which the folder notes."""
    app = stage(
        superlink.home / "app",
        App(client="client.fork_server"),
        config_file=folder / CONFIG_FILE,
        run_folder=folder,
        log=None,
        plugins=Path.cwd(),
        keys=keys,
    )
    run = superlink.start(app)
    durable.write(folder / FLOWER_RUN_FILE, json.dumps({"run": run}) + "\n")
    return run


def number_of(folder: Path) -> str:
    """Flower's number of the run in a folder; ConfigError if it has none."""
    try:
        return str(json.loads((folder / FLOWER_RUN_FILE).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is no folder of a run that `lacquer deploy` started ({error})") from error


def _unfinished(state: str | None) -> bool:
    return state is not None and not state.startswith("finished")


def refuse_unfinished(superlink: Control, folder: Path) -> None:
    """End the command if the SuperLink still has an unfinished run of this folder: it would train beside a second."""
    if not (folder / FLOWER_RUN_FILE).is_file():
        return
    with refusals():
        run = number_of(folder)
    state = superlink.known(run)
    if _unfinished(state):
        fail(
            f"{folder}: the SuperLink has a run of this folder that is {state}; watch it (lacquer follow "
            f"{shell_quoted(folder)}), or stop it first (lacquer stop {shell_quoted(folder)})",
            MISUSED,
        )


def watch(superlink: Control, run: str, config: RunConfig, folder: Path, *, quiet: bool) -> None:
    """Show a run until the SuperLink says that it has ended; say within seconds what stands still, and why.

    A run whose server process is gone is stopped: it can be resumed at once.

    Raises:
        RunFailed: the SuperLink has not answered for some minutes.
    """
    begun = False

    def tell(state: State, text: str) -> None:
        if quiet:
            say(text, style="yellow")
        own = read_status(folder)
        if begun and own is not None and own.state not in UNDER_WAY:
            return  # the run has said how it ended
        with Telemetry(folder, tensorboard=False) as telemetry:
            telemetry.status(state, text)

    def gone() -> bool:
        nonlocal begun
        from server.run_folder.progress import is_owned  # it brings numpy and torch, which `lacquer --help` must not

        owned, own = is_owned(folder), read_status(folder)  # in this order: its last words come before it lets go
        begun = begun or owned
        if not begun or owned or own is None or own.state not in UNDER_WAY:
            return False
        tell("failed", GONE.format(shell_quoted(folder)))
        try:
            superlink.stop(run)
        except RunFailed as failure:
            say(str(failure), style="yellow")
        return True

    alive = _asking(superlink, run, tell, gone)
    if quiet:
        wait_quietly(alive)
    else:
        follow(folder, config, alive)


def judge(superlink: Control, run: str, folder: Path) -> None:
    """Check that SuperLink and ServerApp both say that the run completed.

    Raises:
        RunFailed: one of them does not.
    """
    own = read_status(folder)
    if own is not None and own.state == "failed":
        raise RunFailed(own.message)
    state, details = superlink.status(run)
    if state != SUCCESS or own is None or own.state not in STATES_OF_SUCCESS:
        raise RunFailed(details or f"Flower says {state}")


@contextmanager
def stopped_if_interrupted(superlink: Control, run: str) -> Iterator[None]:
    """Stop a run whose block does not get to its end."""
    try:
        yield
    except BaseException:
        try:
            superlink.stop(run)
        except RunFailed as failure:
            say(str(failure), style="yellow")
        raise


def show_end(folder: Path, *, quiet: bool, as_json: bool = False) -> None:
    """Print report and summary of a run that has completed; for programs its results, or its folder alone."""
    if quiet and not as_json:
        typer.echo(folder)
        return
    from simulations.report import page, summary

    if why := page.attempt_report(folder):
        say(f"The run is done, but {why}; write its report with: lacquer report {folder}", style="yellow")
    if as_json:
        typer.echo(json.dumps(summary.plain_results(folder), indent=2))
    else:
        summary.print_summary(folder, Console())


def _asking(
    superlink: Control,
    run: str,
    tell: Callable[[State, str], None],
    gone: Callable[[], bool],
    *,
    every: float = 5.0,
    taken_within: float = 60.0,
    patience: float = 300.0,
) -> Callable[[], bool]:
    """Whether the run still runs; the SuperLink is asked now and then, for each question starts a process.

    Args:
        tell: is told what stands still: a run that has not been started ``taken_within`` seconds after it was handed
            over, and a SuperLink that gives no answer.
        gone: whether the run's server process is, which Flower sees after a minute.
        patience: seconds for which the SuperLink may give no answer.
    """
    begun = answered = time.monotonic()
    next_time, answer, told, silent, taken = begun + every, True, False, False, False

    def alive() -> bool:
        nonlocal next_time, answer, answered, told, silent, taken
        if not answer or time.monotonic() < next_time:
            return answer
        try:
            if gone():
                answer = False
                return False
            state = superlink.status(run)[0]
        except RunFailed:
            if time.monotonic() - answered > patience:
                raise
            if not silent:
                silent = True
                tell("running" if taken else "preparing", SILENT.format(patience))
        else:
            answered, answer = time.monotonic(), not state.startswith("finished")
            taken = taken or state not in ("pending", "starting")
            if silent and answer:
                tell("running" if taken else "preparing", SPEAKS)
            silent = False
            if state == "pending" and not told and answered - begun > taken_within:
                told = True
                tell("preparing", NOT_TAKEN)
        next_time = time.monotonic() + every
        return answer

    return alive


def follow_command(folder: Folder, address: Address = ADDRESS, ca: Trust = Path(TRUST)) -> None:
    """Watch a deployed run that goes on; Ctrl-C leaves it alone."""
    folder, run = _named(folder)
    with refusals():
        config = load(folder / CONFIG_FILE)
    sys.path.append(str(Path.cwd()))
    with control(address, ca) as superlink:
        try:
            watch(superlink, run, config, folder, quiet=False)
            judge(superlink, run, folder)
        except KeyboardInterrupt:
            say(f"The run goes on; lacquer stop {shell_quoted(folder)} ends it.", style="yellow")
            return
        except RunFailed as failure:
            fail(f"The run failed: {failure}\n\nRun folder: {folder}", FAILED)
    show_end(folder, quiet=False)


def stop_command(folder: Folder, address: Address = ADDRESS, ca: Trust = Path(TRUST)) -> None:
    """End a deployed run; it can be resumed."""
    folder, run = _named(folder)
    with control(address, ca) as superlink:
        if not _unfinished(superlink.known(run)):
            fail(f"{folder}: {NOTHING_TO_STOP}", MISUSED)
        try:
            superlink.stop(run)
        except RunFailed:
            if _unfinished(superlink.known(run)):
                raise
            fail(f"{folder}: {NOTHING_TO_STOP}", MISUSED)  # it ended between question and order
    typer.echo(f"The run is stopped. Go on with: lacquer deploy --resume {shell_quoted(folder)}")


def logs_command(
    folder: Folder,
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
    as_it_comes: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Print the server's log of a deployed run: which nodes failed or were refused, and why."""
    folder, run = _named(folder)
    with control(address, ca) as superlink:
        superlink.show_log(run, as_it_comes=as_it_comes)


def _named(folder: Path) -> tuple[Path, str]:
    with refusals():
        folder = folder.resolve()
        return folder, number_of(folder)
