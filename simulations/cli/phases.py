"""``lacquer recipe``: train in phases, and say what the whole of it guarantees."""

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from privacy.errors import CorruptRun
from server.config.load import ConfigError
from server.run_folder.errors import CannotResume
from server.run_folder.names import RECIPE_FILE
from simulations.cli.exits import INTERRUPTED, MISUSED, fail, interruptible, refusals, say
from simulations.presets.load import absolute_paths, parse_setting
from simulations.report.notation import duration_text, epsilon_text, number_text

if TYPE_CHECKING:
    from server.runs.phase_config import PhasesConfig
    from server.runs.phases import PhasesRun

RECIPES = Path(__file__).resolve().parents[1] / "presets" / "phases"


def recipe_files() -> dict[str, Path]:
    """Recipes that come with Lacquer, by name."""
    return {file.stem: file for file in sorted(RECIPES.glob("*.toml"))}


def recipe_command(
    recipe: Annotated[str, typer.Argument(help="A TOML file with [[phases]], or one that comes with Lacquer.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as privacy.epsilon=2. Repeatable."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the path of the run folder.")] = False,
) -> None:
    """Train in phases, with and without noise (redaction, JFT, ATDP), and say what the whole of it guarantees."""
    here = Path.cwd()
    sys.path.append(str(here))
    with refusals(ValueError):
        config = configured(recipe, settings or [], here)
        from server.run_folder.names import new_run_folder
        from server.run_folder.resume import write_origin
        from server.runs.phases import PhasesRun

        run = PhasesRun(config)
        folder = new_run_folder(config.run)
        (folder / RECIPE_FILE).write_text(config.to_toml(), encoding="utf-8")
        write_origin(folder, config.run, run.plain.folder.name, config.phase_tables())
    _train(run, folder, quiet)


def resume_recipe(folder: Path, other_code: bool, quiet: bool) -> None:
    """Go on with a recipe's run that was broken off.

    Raises:
        CannotResume, CorruptRun, ConfigError: why it cannot.
    """
    from privacy.ledger.ledger import Charge, Ledger
    from server.run_folder.names import LEDGER_FILE, RESULTS_FILE
    from server.run_folder.resume import Resumed, check_origin, note_resumed
    from server.runs.phase_config import load_phases
    from server.runs.phases import PhasesRun

    if (folder / RESULTS_FILE).is_file():
        raise CannotResume(f"{folder} has ended; there is nothing to go on with")
    config = load_phases(folder / RECIPE_FILE)
    phases = config.phase_tables()
    check_origin(folder, config.run, other_code=other_code, phases=phases)
    run = PhasesRun(config)
    data = run.plain.folder.name
    changes = check_origin(folder, config.run, data=data, other_code=other_code, phases=phases)
    charges: tuple[Charge, ...] = ()
    if (folder / LEDGER_FILE).is_file():
        with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
            charges = ledger.charges
    unreleased = sum(charge.released_at is None for charge in charges)
    note_resumed(folder, Resumed(len(charges), time.time(), unreleased, tuple(changes)))
    _train(run, folder, quiet)


def _train(run: "PhasesRun", folder: Path, quiet: bool) -> None:
    from simulations.report.page import write_report  # with matplotlib, which `lacquer --help` does not need

    console = Console()
    if not quiet:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        console.print(run.promise.sentence, style=None if run.promise.kind == "record" else "bold red", markup=False)
    try:
        with interruptible():
            result = run.train(folder)
    except (CannotResume, CorruptRun) as error:
        fail(str(error), MISUSED)
    except KeyboardInterrupt:
        write_report(folder)
        say(f"Interrupted.\nRun folder: {folder}\nGo on with: lacquer resume {folder}", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    report = write_report(folder)
    if quiet:
        typer.echo(folder)
        return
    table = Table.grid(padding=(0, 3, 0, 0))
    for phase in result.phases:
        table.add_row(phase.name, duration_text(phase.seconds), f"validation loss {phase.validation_loss:.4f}")
    console.print(table)
    quality = result.test.perplexity or result.test.accuracy
    console.print(f"test {'perplexity' if result.test.perplexity else 'accuracy'} {number_text(quality)}")
    if result.planned.floor:
        console.print(f"noise of the private phases alone: epsilon {epsilon_text(result.planned.epsilon, 4)}")
    console.print(f"Run folder: {folder}\nReport: {report}", markup=False, highlight=False, soft_wrap=True)


def configured(recipe: str, settings: list[str], folder: Path) -> "PhasesConfig":
    """The recipe of that name or file with ``settings`` on top and absolute paths.

    Raises:
        ConfigError: naming what is wrong.
    """
    from server.runs.phase_config import PhasesConfig, load_phases  # with torch, which `lacquer --help` does not need

    overrides = dict(parse_setting(setting) for setting in settings)
    config = load_phases(find(recipe), overrides)
    return PhasesConfig(absolute_paths(config.run, folder), config.recipe)


def find(recipe: str) -> Path:
    """The file of a recipe's name or path; ConfigError if there is none."""
    known = recipe_files()
    if recipe in known:
        return known[recipe]
    path = Path(recipe).expanduser()
    if not path.is_file():
        raise ConfigError(f"no recipe is called {recipe!r}; there are {', '.join(known)}, or give a TOML file")
    return path
