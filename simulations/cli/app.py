"""The ``lacquer`` command, with the commands that train."""

import enum
import json
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from privacy import durable
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.run_folder.errors import CannotResume
from server.run_folder.names import LAUNCH_LOCK, new_run_folder, shell_quoted
from server.run_folder.provenance import own_version
from server.run_folder.telemetry import Telemetry
from simulations.cli import completion
from simulations.cli.calibrate.ask import ask_command
from simulations.cli.doctor import doctor_command
from simulations.cli.exits import (
    FAILED,
    INTERRUPTED,
    MISUSED,
    Command,
    Commands,
    Warned,
    end_on_signals,
    fail,
    is_debugging,
    refusals,
    say,
    unwritable_text,
)
from simulations.cli.federation.certificates import certificates_command, federation_command, identity_command
from simulations.cli.federation.clients import admit_command, clients_command, expel_command
from simulations.cli.federation.deploy import deploy_command
from simulations.cli.federation.following import follow_command, logs_command, stop_command
from simulations.cli.history.account import account_app
from simulations.cli.history.budget import budget_command
from simulations.cli.history.compare import compare_command
from simulations.cli.history.runs import runs_command
from simulations.cli.history.statement import statement_command
from simulations.cli.history.track import check_tracker, track_beside, track_command
from simulations.cli.model.audit import audit_command
from simulations.cli.model.evaluate import evaluate_command
from simulations.cli.model.evolve import evolve_command
from simulations.cli.model.export import export_command
from simulations.cli.model.generate import generate_command
from simulations.cli.model.personalise import personalise_command
from simulations.cli.model.predict import predict_command
from simulations.cli.model.publish import publish_command
from simulations.cli.model.synthesise import synthesise_command
from simulations.cli.plan import say_known, say_plan
from simulations.cli.planner import plan_command
from simulations.cli.progress import follow, say_waiting, say_working
from simulations.cli.settings.config import config_command
from simulations.cli.settings.data import data_command
from simulations.cli.settings.init import init_command
from simulations.cli.settings.presets import preset_time, presets_command
from simulations.cli.sweep import sweep_command
from simulations.engines import launcher
from simulations.engines.flower import RunFailed
from simulations.presets.asked import Asked, ask, ask_again

LOOK, MODEL, PREPARE, FEDERATION = "Runs that were made", "The model of a run", "Before a run", "A federation of nodes"
"""Headings of the help, beside that of the commands that train."""

app = typer.Typer(
    name="lacquer",
    cls=Commands,
    help="Differentially private federated fine-tuning of language models.",
    epilog="Examples: lacquer run quickstart | lacquer init my.csv | lacquer run my.toml --set privacy.epsilon=2",
    no_args_is_help=True,
    suggest_commands=False,  # click suggests by itself
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lacquer {own_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Say the version and end.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that come before a command's name."""


def run_command() -> None:
    """Run ``lacquer`` as a process of its own."""
    warnings.showwarning = Warned()
    try:
        app(prog_name="lacquer")
    finally:  # all is said: a second Ctrl-C while Python unloads would only change the exit code
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class EngineKind(enum.StrEnum):
    """The engines of ``--engine``."""

    flower = "flower"
    inprocess = "inprocess"


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key, such as privacy.epsilon=2. Repeatable.",
        autocompletion=completion.settings,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the path of the run folder.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="For programs: no progress; one object with folder and results at the end.")
]
Track = Annotated[
    str | None,
    typer.Option(metavar="TRACKER[:PROJECT]", help="Tell a tracker too: wandb, mlflow or trackio."),
]


def run(
    preset: Annotated[
        str, typer.Argument(help="A preset (see `lacquer presets`) or a TOML file.", autocompletion=completion.presets)
    ] = "quickstart",
    settings: Settings = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN|FOLDER", help="Go on from the adapter of a run, or of PEFT.", exists=True),
    ] = None,
    engine: Annotated[EngineKind | None, typer.Option(help="Flower on Ray, or all in one process.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Worker processes; 0 takes what the host has.", show_default="0")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder in which relative data files are looked for.", show_default=".")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and rehearse everything, say what would be run, and run nothing.")
    ] = False,
    resume_or_start: Annotated[
        bool,
        typer.Option(
            "--resume-or-start",
            help="Resume the unfinished run of the same settings in `output`, end at once if it is done: for queues.",
        ),
    ] = False,
    as_json: AsJson = False,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Train, under differential privacy. Ends with a summary and the path of the run folder.

    The file says what is protected: clients, the records of one site, those of several sites, or records in phases.
    """
    here = Path.cwd()
    sys.path.append(str(here))  # a user's own methods are found beside their work, and shadow nothing
    with ExitStack() as stack:
        with refusals(CannotResume, ValueError):
            given = [f"model.adapter={start.resolve()}"] if start else []
            asked = ask(preset, [*(settings or []), *given], _engine_settings(engine, workers), here, data or here)
            if resume_or_start and not dry_run:
                from simulations.history.unfinished import earlier_run

                if (earlier := earlier_run(asked)) is not None:
                    say(f"{earlier.folder} {'is done already' if earlier.ended else 'is resumed'}.", style="yellow")
                    if earlier.ended:
                        _say_results(earlier.folder, quiet=quiet, as_json=as_json)
                    else:
                        _resume(earlier.folder, lambda: asked, quiet, as_json=as_json, track=track)
                    return
            with say_waiting("checking settings, model and data", Console(stderr=as_json, quiet=quiet)):
                from server.run_folder.progress import (
                    hold_folder,
                )  # a misspelt setting is refused before torch is loaded
                from simulations.preflight import check_run

                checked = check_run(asked)
            check_tracker(track)
            if dry_run:
                say_plan(checked, as_json=as_json, time="" if settings else preset_time(preset))
                return
            folder = new_run_folder(asked.run)
            stack.enter_context(hold_folder(folder, LAUNCH_LOCK))
            asked.write(folder)
            checked.hand_on(folder)
        if not quiet and not as_json:
            say_known(checked, Console())
        with end_on_signals():
            _run(asked, folder, here, quiet, as_json=as_json, track=track)


def resume(
    run_folder: Annotated[Path, typer.Argument(help="Folder of an interrupted run.", exists=True)],
    engine: Annotated[EngineKind | None, typer.Option(help="Another engine than the run had.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Another number of worker processes; 0 takes what the host has.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Another Ray cluster than the run had; '' for this host alone.")
    ] = None,
    other_code: Annotated[
        bool, typer.Option("--other-code", help="Resume although the code has changed since the run was started.")
    ] = False,
    as_json: AsJson = False,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Resume an interrupted run from its last checkpoint, within the budget it has left."""
    sys.path.append(str(Path.cwd()))
    folder, chosen = run_folder.resolve(), _engine_settings(engine, workers, ray_address)
    _resume(folder, lambda: ask_again(folder, chosen), quiet, other_code=other_code, as_json=as_json, track=track)


def _resume(
    folder: Path,
    asks: Callable[[], Asked],
    quiet: bool,
    *,
    other_code: bool = False,
    as_json: bool = False,
    track: str | None = None,
) -> None:
    """Go on with a run; ``asks`` for its settings once no other command can."""
    with ExitStack() as stack:
        with refusals(CannotResume, ValueError):
            from server.run_folder.progress import hold_folder
            from server.run_folder.resume import check_resumable

            check_tracker(track)
            # The run's own process holds the folder a minute later; until then a second resume would pass every check.
            stack.enter_context(hold_folder(folder, LAUNCH_LOCK))
            asked = asks()
            if _on_flower(asked.run) and asked.run.engine.ray_address:
                from simulations.engines.cluster.head import cluster_nodes
                from simulations.engines.cluster.nodes import allocate_workers

                allocate_workers(asked.run, cluster_nodes(asked.run.engine.ray_address))
            check_resumable(folder, other_code=other_code, phases=asked.phase_tables)
            durable.check_room(folder)
            with Telemetry(folder, tensorboard=False) as telemetry:
                telemetry.status("preparing", "resuming")
        with end_on_signals():
            keys: dict[str, str | bool] = {"resume": str(folder), "other-code": other_code}
            _run(asked, folder, Path.cwd(), quiet, keys, as_json=as_json, track=track)


def _engine_settings(
    engine: EngineKind | None, workers: int | None, ray_address: str | None = None
) -> dict[str, str | int]:
    settings: dict[str, str | int] = {}
    if engine is not None:
        settings["engine.kind"] = engine.value
    if workers is not None:
        settings["engine.workers"] = workers
    if engine == EngineKind.inprocess and ray_address is None:
        ray_address = ""  # the run goes on without the cluster that it had
    if ray_address is not None:
        settings["engine.ray-address"] = ray_address
    return settings


def _run(
    asked: Asked,
    folder: Path,
    plugins: Path,
    quiet: bool,
    keys: Mapping[str, str | bool] | None = None,
    *,
    as_json: bool = False,
    track: str | None = None,
) -> None:
    console, config = Console(), asked.run

    def watch(is_alive: Callable[[], bool]) -> None:
        with track_beside(folder, track, is_alive):
            try:
                if quiet or as_json:
                    launcher.wait_quietly(is_alive)
                else:
                    follow(folder, asked.shown, is_alive, console=console)
            except KeyboardInterrupt:
                say("Stopping what was started ...", style="yellow")
                raise

    try:
        if _on_flower(config):
            launcher.run_flower(config, folder, follow=watch, plugins=plugins, keys=keys)
        else:
            launcher.run_child(config, folder, follow=watch, plugins=plugins, keys=keys)
    except RunFailed as failure:
        reason, full = str(failure), _write_report(folder)
        if durable.FULL in reason:  # the end of its log would be of the same error
            reason = reason.partition("\n")[0]
        elif full:  # it could not even say why it ended
            reason = full
        log = f"\n\n{failure.log}" if is_debugging() else ""
        fail(f"The run failed: {reason}{log}\n\nRun folder: {folder}{_how_to_go_on(folder)}", FAILED)
    except ConfigError as error:
        fail(f"{error}\n\nRun folder: {folder}{_how_to_go_on(folder)}", MISUSED)
    except OSError as error:
        if said := unwritable_text(error, folder):
            fail(said, MISUSED)
        raise
    except KeyboardInterrupt:
        with suppress(OSError):  # of a full disk; the state that is left, "running", reads as interrupted too
            _note_interrupted(folder)
        text = f"Interrupted; everything that was started is stopped.\nRun folder: {folder}{_how_to_go_on(folder)}"
        say(text, style="yellow")
        _write_report(folder)
        raise typer.Exit(INTERRUPTED) from None
    with say_waiting("writing the report", Console(quiet=quiet or as_json)):
        full = _write_report(folder)
    if full:
        say(
            f"The run is done, but {full}; write its report with: lacquer report {shell_quoted(folder)}", style="yellow"
        )
    _say_results(folder, quiet=quiet, as_json=as_json)


def _say_results(folder: Path, *, quiet: bool, as_json: bool) -> None:
    """What a run that is done came to."""
    from simulations.report import summary

    with refusals():
        if as_json:
            typer.echo(json.dumps(summary.plain_results(folder), indent=2))
        elif quiet:
            typer.echo(folder)
        else:
            summary.print_summary(folder, Console())


def _write_report(folder: Path) -> str:
    """Write a run's report; why there is none, or nothing."""
    from simulations.report import page  # slow to import, and no run has to wait for it

    return page.attempt_report(folder, unwritable_text)


def _on_flower(config: RunConfig) -> bool:
    return config.engine.kind == "flower" and not config.is_single_site


def report(
    run_folder: Annotated[Path, typer.Argument(help="Folder of a run.", exists=True, file_okay=False)],
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one object with the page, the state and the results.")
    ] = False,
) -> None:
    """Write (again) the report of a run: one page that needs nothing else."""
    from simulations.report import page, read_run, summary

    with refusals(read_run.NoRunFolder), say_working("writing the report"):
        written = page.write_report(run_folder)
        results = summary.plain_results(run_folder)
    if as_json:
        typer.echo(json.dumps({"page": str(written), **results}, indent=2))
    else:
        typer.echo(written)


def _note_interrupted(folder: Path) -> None:
    """Note that a run was interrupted, for its processes that could have written it are gone."""
    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.status("failed", "interrupted")


def _how_to_go_on(folder: Path) -> str:
    """The line that says how to resume; empty where nothing was spent, so that starting anew loses nothing."""
    from server.run_folder.verify import traces

    return f"\nResume with: lacquer resume {shell_quoted(folder)}" if traces(folder) else ""


for name, command, panel in (
    ("run", run, "Train"),
    ("resume", resume, "Train"),
    ("sweep", sweep_command, "Train"),
    ("init", init_command, PREPARE),
    ("presets", presets_command, PREPARE),
    ("data", data_command, PREPARE),
    ("config", config_command, PREPARE),
    ("ask", ask_command, PREPARE),
    ("plan", plan_command, PREPARE),
    ("doctor", doctor_command, PREPARE),
    ("runs", runs_command, LOOK),
    ("report", report, LOOK),
    ("statement", statement_command, LOOK),
    ("compare", compare_command, LOOK),
    ("budget", budget_command, LOOK),
    ("track", track_command, LOOK),
    ("audit", audit_command, LOOK),
    ("predict", predict_command, MODEL),
    ("generate", generate_command, MODEL),
    ("synthesise", synthesise_command, MODEL),
    ("personalise", personalise_command, MODEL),
    ("evolve", evolve_command, MODEL),
    ("evaluate", evaluate_command, MODEL),
    ("export", export_command, MODEL),
    ("publish", publish_command, MODEL),
    ("certificates", certificates_command, FEDERATION),
    ("identity", identity_command, FEDERATION),
    ("federation", federation_command, FEDERATION),
    ("deploy", deploy_command, FEDERATION),
    ("follow", follow_command, FEDERATION),
    ("stop", stop_command, FEDERATION),
    ("logs", logs_command, FEDERATION),
    ("admit", admit_command, FEDERATION),
    ("expel", expel_command, FEDERATION),
    ("clients", clients_command, FEDERATION),
):
    app.command(name, cls=Command, rich_help_panel=panel)(command)
app.add_typer(account_app, name="account", rich_help_panel=LOOK)
