"""The ``lacquer`` command."""

import enum
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from server.config import ConfigError, RunConfig
from simulations.calibrate import calibrate_command
from simulations.endings import FAILED, INTERRUPTED, MISUSED, fail, interruptible, refusals, say
from simulations.settings import configure, describe, preset_files
from simulations.sweep import sweep_command

app = typer.Typer(
    name="lacquer",
    help="Differentially private federated fine-tuning of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("calibrate")(calibrate_command)
app.command("sweep")(sweep_command)


class EngineKind(enum.StrEnum):
    """The engines of ``--engine``."""

    flower = "flower"
    inprocess = "inprocess"


@app.command()
def run(
    preset: Annotated[str, typer.Argument(help="A preset (see `lacquer presets`) or a TOML file.")] = "quickstart",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as privacy.epsilon=2. Repeatable."),
    ] = None,
    engine: Annotated[EngineKind | None, typer.Option(help="Flower on Ray, or all in one process.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Worker processes; 0 takes what the host has.", show_default="0")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the path of the run folder.")] = False,
) -> None:
    """Train, under differential privacy. Ends with a summary and the path of the run folder."""
    overrides: dict[str, str | int] = {}
    if engine is not None:
        overrides["engine.kind"] = engine.value
    if workers is not None:
        overrides["engine.workers"] = workers
    here = Path.cwd()
    sys.path.append(str(here))  # a user's own methods are found beside their work, and shadow nothing
    with refusals():
        from simulations.preflight import check

        config = configure(preset, settings or [], overrides, here)
        check(config)
        folder = new_run_folder(config)
    with interruptible():
        _run(config, folder, here, quiet)


def _run(config: RunConfig, folder: Path, plugins: Path, quiet: bool) -> None:
    from simulations.launcher import run_child, run_flower, wait_quietly
    from simulations.private_flower import RunFailed
    from simulations.progress import follow
    from simulations.report import write_report
    from simulations.summary import print_summary

    console = Console()
    launch = run_flower if config.engine.kind == "flower" else run_child
    watch = wait_quietly if quiet else lambda is_alive: follow(folder, config, is_alive, console=console)
    try:
        launch(config, folder, follow=watch, plugins=plugins)
    except RunFailed as failure:
        say(f"The run failed: {failure}\n\nRun folder: {folder}")
        write_report(folder)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        _say_interrupted(folder)
        say(f"Interrupted; everything that was started is stopped.\nRun folder: {folder}", style="yellow")
        write_report(folder)
        raise typer.Exit(INTERRUPTED) from None
    write_report(folder)
    if quiet:
        typer.echo(folder)
    else:
        print_summary(folder, console)


@app.command()
def presets() -> None:
    """List the presets."""
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, file in preset_files().items():
        table.add_row(name, describe(file))
    Console().print(table)


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(help="Folder of a run.", exists=True, file_okay=False)],
) -> None:
    """Write (again) the report of a run: one page that needs nothing else."""
    from simulations.report import write_report
    from simulations.run_folder import NoRunFolder

    try:
        typer.echo(write_report(run_folder))
    except NoRunFolder as error:
        fail(str(error), MISUSED)


def new_run_folder(config: RunConfig) -> Path:
    """Make an empty folder ``output/name-time`` that no other run has."""
    stem = Path(config.output) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        folder = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt + 1}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"output = {config.output!r}: cannot make {folder}: {error.strerror}") from error
        return folder
    raise ConfigError(f"output = {config.output!r}: {stem.name} and 999 more are taken")


def _say_interrupted(folder: Path) -> None:
    """The processes that could have written it are gone."""
    from server.telemetry import Telemetry

    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.status("failed", "interrupted")
