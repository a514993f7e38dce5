"""`python -m simulations.overview RUN docs/quickstart`: a run in one strip, as the README shows it.

Writes `docs/quickstart-light.svg` and `docs/quickstart-dark.svg` from a run folder, same run, same bytes. Text is drawn
as outlines, because the page that shows the picture may lack the font.
"""

from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import typer
from rich.console import Console

from simulations import plots
from simulations.plot_style import DARK, LIGHT
from simulations.run_folder import read_run

THEMES = {"light": LIGHT, "dark": DARK}


def write_overview(run_folder: Path, stem: Path) -> list[Path]:
    """Write one picture per theme and return their paths.

    Raises:
        ValueError: if the folder is no run folder (NoRunFolder), or the run has no training round to show.
    """
    run = read_run(run_folder)
    if not run.rounds:
        raise ValueError(f"{run_folder} has no training round to show; give the folder of a run that trained")
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for theme, palette in THEMES.items():
        figure = plots.overview(run.metrics, palette, test_accuracy=run.result("test_accuracy"))
        target = stem.with_name(f"{stem.name}-{theme}.svg")
        with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "overview"}):
            figure.savefig(target, metadata={"Date": None, "Creator": None})
        written.append(target)
    return written


def main(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    stem: Annotated[Path, typer.Argument(help="where to write, without -light.svg and -dark.svg")],
) -> None:
    """Draw the run as the README shows it."""
    for path in write_overview(run, stem):
        Console().print(str(path))


if __name__ == "__main__":
    typer.run(main)
