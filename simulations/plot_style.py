"""The one look of all figures: few lines, horizontal grid only, a transparent background, colours told apart by all.

The colours are Okabe and Ito's (2008, "Color Universal Design"), darkened or lightened until text in them has enough
contrast. Built on `Figure` alone: no pyplot, no global state, no display needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SIZE = (5.0, 3.0)


@dataclass(frozen=True)
class Palette:
    """Colours by their role. Every role has a colour of its own, so that a page can replace them one by one."""

    ink: str
    muted: str
    grid: str
    first: str
    second: str
    third: str


Drawing = Callable[[Axes, Palette], None]

LIGHT = Palette(ink="#1b1f24", muted="#59636e", grid="#e3e6ea", first="#0072b2", second="#c4500a", third="#00806a")
DARK = Palette(ink="#e8eaed", muted="#a2abb5", grid="#343b43", first="#5ab4ee", second="#f0904f", third="#3fc4a4")


def draw_figure(draws: Sequence[Drawing], palette: Palette, size: tuple[float, float]) -> Figure:
    """Axes side by side in the house's style, one per drawing function; `size` is in inches."""
    with mpl.rc_context(_style(palette)):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, draw in zip(figure.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
            draw(axes, palette)
    return figure


def _style(palette: Palette) -> Any:  # matplotlib types its settings as 300 literals
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": palette.muted,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": palette.ink,
        "axes.linewidth": 0.8,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.h_pad": 0.06,
        "figure.constrained_layout.w_pad": 0.06,
        "figure.facecolor": "none",
        "font.family": "DejaVu Sans",
        "font.size": 10.0,
        "grid.color": palette.grid,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.labelcolor": palette.ink,
        "lines.linewidth": 1.9,
        "lines.solid_capstyle": "round",
        "savefig.facecolor": "none",
        "text.color": palette.ink,
        "xtick.color": palette.muted,
        "xtick.labelcolor": palette.muted,
        "ytick.color": palette.grid,
        "ytick.labelcolor": palette.muted,
        "ytick.left": False,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
    }
