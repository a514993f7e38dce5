"""The figure of docs/results/dp-lac.md, docs/dp-lac-{light,dark}.svg, from the committed results.

Run: `python -m simulations.benchmarks papers.dp_lac_figure`.

One panel per regime and data set: a row per method, a dot per seed, a bar at the mean; the public-only baseline and the
non-private upper bound are lines through all rows, so that a method that was not worth its privacy budget shows as one.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from simulations.benchmarks.harness.results import RESULTS, ROOT
from simulations.benchmarks.papers.dp_lac import Found, accuracies, shown_name, tables_of
from simulations.report.plots import Drawing, Palette, draw_figure
from simulations.report.svg import write_themes

STEM = ROOT / "docs" / "dp-lac"
PANELS = (("default-sst2", 4.0), ("tuned-sst2", 4.0))

_PLAIN = str.maketrans("", "", "`*")


def comparison_figure(cells: Sequence[Mapping[str, Any]], palette: Palette) -> Figure:
    """The figure of a sweep's cells; panels without a cell are left out.

    Raises:
        ValueError: there is nothing to draw.
    """
    tables = tables_of(cells)
    panels = [panel for panel in PANELS if panel in tables]
    if not panels:
        raise ValueError(f"no cell of {', '.join(grid for grid, _ in PANELS)} is in the results; run the sweep first")
    drawings = [_panel(f"{grid}, ε ≤ {epsilon:g}", accuracies(tables[grid, epsilon])) for grid, epsilon in panels]
    rows = max(len(accuracies(tables[panel])) for panel in panels)
    return draw_figure(drawings, palette, (5.6 * len(panels) + 0.6, 0.28 * rows + 1.0))


def _panel(title: str, found: Found) -> Drawing:
    lines = {name: statistics.mean(found[name].values()) for name in ("floor", "ceiling") if name in found}
    methods = sorted(found.keys() - lines.keys(), key=lambda name: (statistics.mean(found[name].values()), name))

    def draw(axes: Axes, palette: Palette) -> None:
        for row, name in enumerate(methods):
            values = list(found[name].values())
            color = palette.second if name.startswith(("dp-lac", "dp-clac")) else palette.first
            marker = "D" if name.startswith(("dp-lac", "dp-clac")) else "o"
            axes.plot(values, [row] * len(values), marker, color=color, markersize=4.5, alpha=0.75, linestyle="none")
            mean = statistics.mean(values)
            axes.plot([mean, mean], [row - 0.32, row + 0.32], color=color, linewidth=2.2)
        for level, (name, value) in enumerate(lines.items()):
            dash = ":" if name == "floor" else "--"
            axes.axvline(value, color=palette.muted, linestyle=dash, linewidth=1.2)
            axes.annotate(
                shown_name(name).translate(_PLAIN), (value, len(methods) - 0.45), xytext=(0, 2 + 11 * level),
                textcoords="offset points", ha="center", va="bottom", color=palette.muted, fontsize=9,
                annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(range(len(methods)), [shown_name(name).translate(_PLAIN) for name in methods])
        axes.tick_params(axis="y", labelcolor=palette.ink, labelsize=9)
        axes.margins(x=0.08)
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.grid(False, axis="y")
        axes.grid(True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 1):g} %"))
        axes.set_xlabel(f"test accuracy: {title}")

    return draw


def main() -> None:
    """Draw both themes."""
    cells = json.loads((RESULTS / "controllers.json").read_text(encoding="utf-8"))["cells"]
    write_themes(lambda palette: comparison_figure(cells, palette), STEM)


if __name__ == "__main__":
    typer.run(main)
