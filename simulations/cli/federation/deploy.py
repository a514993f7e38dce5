"""``lacquer deploy``, ``lacquer admit``, ``lacquer clients``: a federation of real nodes, seen from its SuperLink.

They are meant to run where the SuperLink runs (in its container): the run's folder is written by the ServerApp there,
and the Control API must not be reachable from anywhere else, see :mod:`server.network.gateway`. What is handed to
Flower is a wrapper of a few lines around the installed packages; no code of this checkout travels to a node.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from privacy import durable
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.run_folder.errors import CannotResume
from server.run_folder.names import CONFIG_FILE, new_run_folder, write_config
from server.run_folder.telemetry import read_status
from simulations.cli.exits import FAILED, INTERRUPTED, MISUSED, fail, interruptible, refusals, say
from simulations.cli.progress import follow
from simulations.engines.control import SUCCESS, Control
from simulations.engines.flower import RunFailed
from simulations.engines.launcher import STATES_OF_SUCCESS, wait_quietly
from simulations.engines.staging import App, stage
from simulations.presets.load import configure

ADDRESS = os.environ.get("LACQUER_SUPERLINK", "127.0.0.1:8000")
TRUST = os.environ.get("LACQUER_CA", "/keys/ca.crt")
CLIENT_KEYS = os.environ.get("LACQUER_CLIENT_KEYS", "/keys/clients")
CLIENT_NAMES = os.environ.get("LACQUER_CLIENT_NAMES", "/state/clients.json")
"""Where `admit` notes which node a key is: Flower keeps keys and numbers, and names none of them."""

_WHAT_TO_DEPLOY = 'give a TOML file with data.held-by = "nodes", or --resume FOLDER'

Address = Annotated[str, typer.Option(help="HOST:PORT of the SuperLink.")]
Trust = Annotated[Path, typer.Option(help="Certificate that signed the SuperLink's.")]


@contextmanager
def control(address: str, ca: Path) -> Iterator[Control]:
    """The Control API for as long as a command runs; what it refuses ends the command in words."""
    with refusals():
        check_trust(ca)
    with tempfile.TemporaryDirectory(prefix="lacquer-") as home:
        try:
            yield Control(Path(home), address, ca).open()
        except RunFailed as failure:
            fail(str(failure), FAILED)


def admit_command(
    keys: Annotated[
        list[Path] | None, typer.Argument(help="Public keys of clients.", show_default=f"all in {CLIENT_KEYS}")
    ] = None,
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
) -> None:
    """Let clients in by their public keys; those that are in already stay in."""
    found = keys or sorted(Path(CLIENT_KEYS).glob("*.pub"))
    if not found:
        fail(f"no public key was given, and {CLIENT_KEYS} holds none; see `lacquer certificates`", FAILED)
    with control(address, ca) as superlink:
        for key in found:
            node = superlink.register(key)
            if node:
                _note(node, key.stem)
            typer.echo(f"{key.stem}: " + ("was let in before" if node is None else f"let in as node {node}"))


def expel_command(
    node: Annotated[str, typer.Argument(help="Number or name of the node, see `lacquer clients`.")],
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
) -> None:
    """Let a client in no longer; its key is worth nothing from then on."""
    named = {name: number for number, name in _names().items()}  # the latest node of a name
    if node not in named and not node.isdecimal():
        fail(f"no client is called {node}; see `lacquer clients`", MISUSED)
    with control(address, ca) as superlink:
        superlink.unregister(named.get(node, node))


def clients_command(
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the clients and whether they are connected."""
    with control(address, ca) as superlink:
        if as_json:
            known = _names()
            found = [{**_plain_node(node), "name": known.get(str(node["node-id"]), "")} for node in superlink.nodes()]
            typer.echo(json.dumps(found, indent=2))
            return
        table, names = Table.grid(padding=(0, 3, 0, 0)), _names()
        for node in superlink.nodes():
            number = str(node["node-id"])
            table.add_row(number, str(node["status"]), names.get(number, ""))
        Console().print(table)


def _plain_node(node: Mapping[str, object]) -> dict[str, str]:
    return {"node": str(node["node-id"]), "status": str(node["status"])}


def _names() -> dict[str, str]:
    """Names by node, in the order in which they were let in."""
    path = Path(CLIENT_NAMES)
    names: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return names


def _note(node: str, name: str) -> None:
    """Keep a name; without a folder for it the client is in all the same, and `clients` shows its number alone."""
    path = Path(CLIENT_NAMES)
    if path.parent.is_dir():
        durable.write(path, json.dumps(_names() | {node: name}, indent=1) + "\n")


def deploy_command(
    preset: Annotated[str, typer.Argument(help="A TOML file (or preset) with data.held-by = 'nodes'.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key. Repeatable.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder instead.")] = None,
    other_code: Annotated[bool, typer.Option("--other-code", help="Resume although the code has changed.")] = False,
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the path of the run folder.")] = False,
) -> None:
    """Train on the nodes of a federation, under differential privacy."""
    keys: dict[str, str | bool] = {}
    sys.path.append(str(Path.cwd()))  # a user's own methods are found beside their work, and shadow nothing
    with refusals(CannotResume):
        if resume is None:
            if not preset:
                raise ConfigError(f"no configuration was given; {_WHAT_TO_DEPLOY}")
            config = configure(preset, settings or [], {}, Path.cwd())
            check_deployed(config)
            check_trust(ca)  # before the data are prepared
            from simulations.preflight import check

            checked = check(config)
            folder = new_run_folder(config)
            write_config(folder, config)
            checked.hand_on(folder)
        else:
            from server.run_folder.resume import check_resumable

            folder = resume.resolve()
            config = check_resumable(folder, other_code=other_code)
            check_deployed(config)
            keys = {"resume": str(folder), "other-code": other_code}
    with interruptible(), control(address, ca) as superlink:
        try:
            follow_deployed(superlink, config, folder, keys, quiet=quiet)
        except RunFailed as failure:
            fail(f"The run failed: {failure}\n\nRun folder: {folder}", FAILED)
        except KeyboardInterrupt:
            say(f"Interrupted; the run is stopped.\nRun folder: {folder}", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
    if quiet:
        typer.echo(folder)
        return
    from simulations.report import page, summary

    page.write_report(folder)
    summary.print_summary(folder, Console())


def check_deployed(config: RunConfig) -> None:
    """ConfigError unless the nodes hold the records."""
    if not config.deployed:
        raise ConfigError(
            "data.held-by = 'server': the records of all clients would lie on the server; "
            f"{_WHAT_TO_DEPLOY}; for a simulation use `lacquer run`"
        )


def check_trust(ca: Path) -> None:
    """ConfigError unless there is a certificate to know the SuperLink by."""
    if not ca.is_file():
        raise ConfigError(
            f"--ca {ca}: there is no such file; run this where the SuperLink runs (in its container), or give the "
            "ca.crt that `lacquer certificates` made"
        )


def follow_deployed(
    superlink: Control, config: RunConfig, folder: Path, keys: Mapping[str, str | bool], *, quiet: bool
) -> None:
    """Hand the run to the SuperLink, show it, and judge its end.

    Raises:
        RunFailed: unless SuperLink and ServerApp both say that it completed.
    """
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
    alive = _asking(superlink, run)
    try:
        if quiet:
            wait_quietly(alive)
        else:
            follow(folder, config, alive)
    except BaseException:
        superlink.stop(run)
        raise
    state, details = superlink.status(run)
    own = read_status(folder)
    if state == SUCCESS and own is not None and own.state in STATES_OF_SUCCESS:
        return
    raise RunFailed(own.message if own is not None and own.state == "failed" else details or f"Flower says {state}")


def _asking(superlink: Control, run: str, every: float = 5.0) -> Callable[[], bool]:
    """Whether the run still runs; the SuperLink is asked now and then, for each question starts a process."""
    next_time, answer = time.monotonic() + every, True

    def alive() -> bool:
        nonlocal next_time, answer
        if answer and time.monotonic() >= next_time:
            answer = not superlink.status(run)[0].startswith("finished")
            next_time = time.monotonic() + every
        return answer

    return alive
