"""The figure of `lacquer calibrate`: noise against the number of clients, epsilon against the number of rounds."""

import math
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from privacy.accountants.composition import epsilon
from privacy.accountants.scenarios import Option, price
from simulations.report.notation import delta_text, number_text
from simulations.report.plots import LIGHT, Palette, draw_figure

SIZE = (9.5, 3.6)


def save_figure(now: Option, dimension: int | None, path: Path) -> None:
    """Draw the figure of a priced setting into a file, on white."""
    with mpl.rc_context({"svg.fonttype": "none"}):
        calibration_figure(now, dimension).savefig(path, dpi=160, facecolor="white")


def calibration_figure(now: Option, dimension: int | None, palette: Palette = LIGHT) -> Figure:
    """Two panels; calibrates twice more and accounts some tens of compositions (seconds)."""
    return draw_figure(
        [
            lambda axes, colors: _draw_clients(axes, colors, now, dimension),
            lambda axes, colors: _draw_rounds(axes, colors, now),
        ],
        palette,
        SIZE,
    )


def _draw_clients(axes: Axes, palette: Palette, now: Option, dimension: int | None) -> None:
    """At a fixed rate z does not depend on N, so each epsilon is one calibration and the noise falls like 1/N."""
    target = now.setting.epsilon
    length = 1.0 if dimension is None else math.sqrt(dimension)
    clients = now.setting.clients * np.geomspace(0.25, 16.0, 13)
    for factor, color, dash in ((0.5, palette.second, (0, (5, 2))), (1, palette.first, "-"), (2, palette.third, ":")):
        try:
            line = now if factor == 1 else price("", replace(now.setting, epsilon=target * factor))
        except ValueError:
            continue  # half the budget may not pay for the queries, twice the budget may need no noise worth the name
        noise = line.noise_multiplier * length / (now.cohort / now.setting.clients * clients)
        axes.plot(clients, noise, color=color, linestyle=dash)
        axes.annotate(
            f"ε {number_text(line.setting.epsilon)}",
            (clients[-1], noise[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=color,
        )
    axes.plot([now.setting.clients], [now.noise_on_mean * length], "o", color=palette.first, markersize=6)
    if dimension is not None:
        axes.axhline(1.0, color=palette.muted, linewidth=1.0)
        axes.annotate("largest signal", (clients[0], 1.0), xytext=(0, 4), textcoords="offset points", fontsize=8.5)
    axes.set(xscale="log", yscale="log", xlabel=f"clients, at rate {now.setting.rate:g}")
    axes.set_title(
        "Noise on the mean / C" if dimension is None else f"Noise norm on the mean / C, d = {dimension:,}",
        loc="left",
        fontsize=10,
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.02)


def _draw_rounds(axes: Axes, palette: Palette, now: Option) -> None:
    setting = now.setting
    rounds = sorted({max(1, round(setting.rounds * share)) for share in np.linspace(0.05, 2.0, 14)})
    kinds = (
        ("rdp", "RDP", palette.second, (0, (5, 2))),
        ("pld", "PLD", palette.first, "-"),
        ("gdp-approx", "GDP approximation:\noptimistic, no bound", palette.muted, (0, (1, 2))),
    )
    for name, text, color, dash in kinds:
        if setting.adjacency != "add_remove" and name != "pld":
            continue
        values = [
            epsilon(
                replace(setting, rounds=count).steps(now.noise_multiplier),
                setting.delta,
                name,
                adjacency=setting.adjacency,
            )
            for count in rounds
        ]
        axes.plot(rounds, values, color=color, linestyle=dash)
        axes.annotate(
            text,
            (rounds[-1], values[-1]),
            xytext=(5, 4 if name == "gdp-approx" else 0),
            textcoords="offset points",
            va="top" if name == "gdp-approx" else "center",
            color=color,
        )
    axes.plot([setting.rounds], [setting.epsilon], "o", color=palette.first, markersize=6)
    axes.set(xlabel=f"rounds, at z = {now.noise_multiplier:.4f}", ylim=(0.0, None))
    axes.set_title(f"Epsilon at delta {delta_text(setting.delta)}", loc="left", fontsize=10)
    axes.margins(x=0.02)
