"""The figure of docs/results/dp-adam-ac.md, docs/dp-adam-ac-{light,dark}.svg, from the committed results.

Run: `python -m simulations.benchmarks papers.dp_adam_ac_figure`.

The curves that DP-Adam-AC's paper shows, at its noise levels, with the baseline that it does not have: loss on public
validation records by step, a panel for each sigma, a line for each seed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.benchmarks.harness.markdown import grouped
from simulations.benchmarks.harness.results import RESULTS, ROOT
from simulations.report.plots import Drawing, Palette, draw_figure
from simulations.report.svg import write_themes

STEM = ROOT / "docs" / "dp-adam-ac"
LINES = {"dp-lora": ("fixed C", "first", "-"), "adam-ac-20": ("DP-Adam-AC", "second", "--")}
"""Variant -> its name, its colour's role, its dash."""


def curves_figure(cells: Sequence[Mapping[str, Any]], palette: Palette) -> Figure:
    """One panel for each noise multiplier of the grids ``sigma`` and ``sigma-0``, from none to most.

    Raises:
        ValueError: there is nothing to draw.
    """
    panels = grouped([row for row in cells if row["grid"].startswith("sigma")], _sigma)
    if not panels:
        raise ValueError("no cell of the grid sigma is in the results; run the sweep records-diabetes-why first")
    losses = [loss for rows in panels.values() for row in rows for _, loss in row["curve"]]
    limits = (0.9 * min(losses), 1.05 * max(losses))
    drawings = [_panel(sigma, panels[sigma], limits, named=not at) for at, sigma in enumerate(sorted(panels))]
    return draw_figure(drawings, palette, (2.9 * len(panels) + 0.4, 2.9))


def _sigma(row: Mapping[str, Any]) -> float:
    """The noise that was added, in thresholds; 0 where none was."""
    return 0.0 if row["not_private"] else round(row["noise_multiplier"], 2)


def _panel(sigma: float, rows: Sequence[Mapping[str, Any]], limits: tuple[float, float], *, named: bool) -> Drawing:
    def draw(axes: Axes, palette: Palette) -> None:
        for row in rows:
            name, role, dash = LINES[row["variant"]]
            steps, found = zip(*row["curve"], strict=True)
            axes.plot(steps, found, dash, color=getattr(palette, role), linewidth=1.4)
        for level, (name, role, _) in enumerate(LINES.values()):
            if named:
                axes.annotate(
                    name, (0.97, 0.96 - 0.1 * level), xycoords="axes fraction", ha="right", va="top",
                    color=getattr(palette, role), fontsize=9,
                )  # fmt: skip
        axes.set_ylim(*limits)
        axes.set_yscale("log")
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.minorticks_off()
        axes.set_xlabel(f"step, σ = {sigma:g}")
        if named:
            axes.set_ylabel("validation loss per token")

    return draw


def main() -> None:
    """Draw both themes."""
    cells = json.loads((RESULTS / "records-diabetes-why.json").read_text(encoding="utf-8"))["cells"]
    write_themes(lambda palette: curves_figure(cells, palette), STEM)


if __name__ == "__main__":
    typer.run(main)
