"""``lacquer recipe``: train in phases, and say what the whole of it guarantees."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from server.config import ConfigError
from simulations.endings import interruptible, refusals
from simulations.notation import duration_text, epsilon_text, number_text
from simulations.settings import absolute_paths, parse_setting

if TYPE_CHECKING:
    from server.recipe_config import RecipeConfig

RECIPES = Path(__file__).parent / "presets" / "recipes"


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
    here, console = Path.cwd(), Console()
    sys.path.append(str(here))
    with refusals(ValueError):
        config = configured(recipe, settings or [], here)
        from server.recipe_run import RecipeRun
        from simulations.cli import new_run_folder

        run = RecipeRun(config)
        folder = new_run_folder(config.run)
        (folder / "recipe.toml").write_text(find(recipe).read_text(encoding="utf-8"), encoding="utf-8")
    if not quiet:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        console.print(run.promise.sentence, style=None if run.promise.kind == "record" else "bold red", markup=False)
    with interruptible():
        result = run.train(folder)
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
    console.print(f"Run folder: {folder}")


def configured(recipe: str, settings: list[str], folder: Path) -> "RecipeConfig":
    """The recipe of that name or file with ``settings`` on top and absolute paths.

    Raises:
        ConfigError: naming what is wrong.
    """
    from server.recipe_config import RecipeConfig, load_recipe  # with torch, which `lacquer --help` does not need

    overrides = dict(parse_setting(setting) for setting in settings)
    config = load_recipe(find(recipe), overrides)
    return RecipeConfig(absolute_paths(config.run, folder), config.recipe)


def find(recipe: str) -> Path:
    """The file of a recipe's name or path; ConfigError if there is none."""
    known = recipe_files()
    if recipe in known:
        return known[recipe]
    path = Path(recipe).expanduser()
    if not path.is_file():
        raise ConfigError(f"no recipe is called {recipe!r}; there are {', '.join(known)}, or give a TOML file")
    return path
