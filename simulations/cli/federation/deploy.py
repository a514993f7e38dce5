"""``lacquer deploy``: a run over real nodes, started from where their SuperLink is reached.

The run's folder is written by the ServerApp there, and the operator's key of there is shown to the Control API
(:mod:`server.network.operator_key`). What is handed to Flower is a wrapper of a few lines around the installed
packages; no code of this checkout travels to a node.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from privacy import durable
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.run_folder.errors import CannotResume
from server.run_folder.names import CLIENTS_FILE, new_run_folder, write_config
from server.run_folder.telemetry import Telemetry
from simulations.cli.exits import FAILED, INTERRUPTED, end_on_signals, fail, refusals, say
from simulations.cli.federation.clients import names
from simulations.cli.federation.connection import ADDRESS, TRUST, Address, Trust, check_trust, control
from simulations.cli.federation.following import (
    hand_over,
    judge,
    refuse_unfinished,
    show_end,
    stopped_if_interrupted,
    watch,
)
from simulations.cli.progress import say_working
from simulations.engines.flower import RunFailed
from simulations.presets.load import configure

_WHAT_TO_DEPLOY = 'give a TOML file with data.held-by = "nodes", or --resume FOLDER'


def deploy_command(
    preset: Annotated[str, typer.Argument(help="A TOML file (or preset) with data.held-by = 'nodes'.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key. Repeatable.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN|FOLDER", help="Go on from the adapter of a run, or of PEFT.", exists=True),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder instead.")] = None,
    other_code: Annotated[bool, typer.Option("--other-code", help="Resume although the code has changed.")] = False,
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: no progress; one object with folder and results at the end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the path of the run folder.")] = False,
) -> None:
    """Train on the nodes of a federation, under differential privacy."""
    keys: dict[str, str | bool] = {}
    sys.path.append(str(Path.cwd()))  # a user's own methods are found beside their work, and shadow nothing
    with refusals(CannotResume):
        if resume is None:
            if not preset:
                raise ConfigError(f"no configuration was given; {_WHAT_TO_DEPLOY}")
            given = [f"model.adapter={start.resolve()}"] if start else []
            config = configure(preset, [*(settings or []), *given], {}, Path.cwd())
            check_deployed(config)
            check_trust(ca)  # before the data are prepared
            with say_working("checking settings, model and data"):
                from simulations.preflight import check_accounts, check_and_rehearse

                checked = check_and_rehearse(config)
                check_accounts([checked])
            folder = new_run_folder(config)
            write_config(folder, config)
            checked.hand_on(folder)
        else:
            from server.run_folder.resume import check_resumable

            folder = resume.resolve()
            config = check_resumable(folder, other_code=other_code)
            check_deployed(config)
            keys = {"resume": str(folder), "other-code": other_code}
    with end_on_signals(), control(address, ca) as superlink:
        if resume is not None:
            refuse_unfinished(superlink, folder)
            with Telemetry(folder, tensorboard=False) as telemetry:  # how the run ended last is not how it goes on
                telemetry.status("preparing", "resuming")
        try:
            durable.write(folder / CLIENTS_FILE, json.dumps(names(), indent=1) + "\n")
            run = hand_over(superlink, folder, keys)
            with stopped_if_interrupted(superlink, run):
                watch(superlink, run, config, folder, quiet=quiet or as_json)
            judge(superlink, run, folder)
        except RunFailed as failure:
            fail(f"The run failed: {failure}\n\nRun folder: {folder}", FAILED)
        except KeyboardInterrupt:
            say(f"Interrupted; the run is stopped.\nRun folder: {folder}", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
    show_end(folder, quiet=quiet, as_json=as_json)


def check_deployed(config: RunConfig) -> None:
    """Check that the nodes of a configuration hold the records.

    Raises:
        ConfigError: the server would.
    """
    if not config.is_deployed:
        raise ConfigError(
            "data.held-by = 'server': the records of all clients would lie on the server; "
            f"{_WHAT_TO_DEPLOY}; for a simulation use `lacquer run`"
        )
