"""A run in pictures. Every function takes released or public values and returns a matplotlib Figure; nothing is saved.

All figures look alike: few lines, horizontal grid only, a transparent background. Every line differs from its
neighbours by dash as well as by colour, and is named where it runs or right above. The colours are Okabe and Ito's
(2008, "Color Universal Design"), darkened or lightened until text in them has enough contrast.

Built on `Figure` alone: no pyplot, no global state, no display needed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from server.run_folder.round_record import RoundRecord
from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text

SIZE = (5.0, 3.0)


@dataclass(frozen=True)
class Palette:
    """The colours of a figure by their role.

    Every role has a colour of its own, so that a page can replace them one by one.
    """

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
    """Draw axes side by side in the house's style, one per drawing function; `size` is in inches."""
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


def over_rounds(
    draw: Callable[..., None], metrics: Sequence[RoundRecord], palette: Palette = LIGHT, **options: Any
) -> Figure:
    """Draw the rounds of a run by one of the drawings below."""
    return draw_figure([lambda axes, palette: draw(axes, metrics, palette, **options)], palette, SIZE)


def phase_losses(losses: Mapping[str, float], palette: Palette = LIGHT) -> Figure:
    """Draw the loss on public validation after every phase, by its name, in order."""

    def draw(axes: Axes, palette: Palette) -> None:
        axes.plot(list(losses), list(losses.values()), color=palette.first, marker="o", markersize=3.5)
        axes.set(ylabel="validation loss")
        axes.margins(x=0.15)

    return draw_figure([draw], palette, SIZE)


def privacy_curve(points: Sequence[tuple[float, float]], delta: float, palette: Palette = LIGHT) -> Figure:
    """Draw epsilon as a function of delta, the same run stated at other deltas; the chosen one is marked.

    Args:
        points: (delta, epsilon), any order.
        delta: the delta the run committed to.
    """

    def draw(axes: Axes, palette: Palette) -> None:
        ordered = sorted(point for point in points if all(map(math.isfinite, point)))
        axes.semilogx([d for d, _ in ordered], [e for _, e in ordered], color=palette.first)
        committed = [point for point in ordered if math.isclose(point[0], delta, rel_tol=1e-6)]
        for d, e in committed:
            _point(axes, d, e, f"δ = {delta_text(d)}, ε ≤ {epsilon_text(e)}", palette.first)
        axes.set(xlabel="δ", ylabel="ε", ylim=(0, None))
        axes.minorticks_off()

    return draw_figure([draw], palette, SIZE)


def overview(metrics: Sequence[RoundRecord], palette: Palette = LIGHT, *, test_accuracy: float | None = None) -> Figure:
    """Draw the run in one strip: accuracy, clip threshold and epsilon, side by side."""

    return draw_figure(
        [
            lambda axes, palette: accuracy(axes, metrics, palette, test_accuracy=test_accuracy),
            lambda axes, palette: clip_threshold(axes, metrics, palette),
            lambda axes, palette: epsilon_spent(axes, metrics, palette),
        ],
        palette,
        (11.0, 2.9),
    )


def accuracy(
    axes: Axes,
    metrics: Sequence[RoundRecord],
    palette: Palette,
    *,
    test_accuracy: float | None = None,
    majority_accuracy: float | None = None,
) -> None:
    """Draw accuracy on public validation over rounds; the test result as a point, the majority class as a line.

    A majority class far below the curve is said in words.
    """
    rounds, values = _series(metrics, "validation_accuracy")
    axes.plot(rounds, values, color=palette.first, **_few(rounds))
    if majority_accuracy is not None:
        text, low, high = "always the most frequent class", min(values, default=0.0), max(values, default=1.0)
        if majority_accuracy >= low - max(0.02, 2 * (high - low)):
            axes.axhline(majority_accuracy, color=palette.muted, linestyle=":", linewidth=1.2)
            _label_line(axes, majority_accuracy, text, palette.muted, right=True)
        else:  # a line so far below would leave the curve no height
            axes.annotate(
                f"{text}: {percent_text(majority_accuracy)}",
                (1.0, 0.0),
                xycoords="axes fraction",
                xytext=(-4, 4),
                textcoords="offset points",
                color=palette.muted,
                ha="right",
                va="bottom",
            )
    if test_accuracy is not None:
        text = f"test {percent_text(test_accuracy)}"
        (point,) = axes.plot(rounds[-1:], [test_accuracy], marker="o", linestyle="none", color=palette.second)
        point.set(markersize=6, zorder=4, clip_on=False, label=text)
        # In the margin at the height of the point: within the axes it would lie on the curve or on another line's name.
        axes.annotate(
            text.replace(" ", "\n", 1),
            (1.0, test_accuracy),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            color=palette.second,
            va="center",
            linespacing=1.15,
            annotation_clip=False,
        )
    axes.set(ylabel="accuracy, public validation")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 2):g} %"))
    axes.margins(y=0.12)
    _rounds_axis(axes, metrics)


def perplexity(axes: Axes, metrics: Sequence[RoundRecord], palette: Palette) -> None:
    """Draw perplexity on public validation over rounds."""
    rounds, values = _series(metrics, "validation_perplexity")
    axes.plot(rounds, values, color=palette.first, **_few(rounds))
    axes.set(ylabel="perplexity, public validation")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    _rounds_axis(axes, metrics)


def loss(axes: Axes, metrics: Sequence[RoundRecord], palette: Palette) -> None:
    """Draw the loss on public validation over rounds."""
    rounds, values = _series(metrics, "validation_loss")
    axes.plot(rounds, values, color=palette.first, **_few(rounds))
    axes.set(ylabel="loss, public validation")
    _rounds_axis(axes, metrics)


def clip_threshold(axes: Axes, metrics: Sequence[RoundRecord], palette: Palette) -> None:
    """Draw the clip threshold that each round used."""
    rounds, values = _series(metrics, "clip_bound")
    axes.step([*rounds, rounds[-1] + 1], [*values, values[-1]], where="post", color=palette.first)
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 8 * min(positive):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.12 * max(values) if max(values) > 0 else None)
    axes.set(ylabel="clip threshold C (L2 norm)")
    _rounds_axis(axes, metrics)


def noise_multiplier(axes: Axes, metrics: Sequence[RoundRecord], palette: Palette) -> None:
    """Draw the noise standard deviation over the sensitivity, of each round."""
    rounds, values = _series(metrics, "noise_multiplier")
    axes.step([*rounds, rounds[-1] + 1], [*values, values[-1]], where="post", color=palette.first)
    axes.set(ylabel="noise multiplier z", ylim=(0, 1.12 * max(values) if max(values) > 0 else None))
    _rounds_axis(axes, metrics)


def epsilon_spent(axes: Axes, metrics: Sequence[RoundRecord], palette: Palette) -> None:
    """Draw the epsilon spent after each round, and the budget."""
    spent = [record for record in metrics if math.isfinite(record.epsilon_spent)]
    budget = metrics[-1].epsilon_budget
    rounds, values = [record.round for record in spent], [record.epsilon_spent for record in spent]
    axes.plot(rounds, values, color=palette.first, **_few(rounds))
    axes.fill_between(rounds, values, color=palette.first, alpha=0.12, linewidth=0)
    if math.isfinite(budget):
        axes.axhline(budget, color=palette.second, linestyle="--", linewidth=1.3)
        _label_line(axes, budget, f"budget {number_text(budget)}", palette.second)
        axes.set_ylim(0, 1.15 * max([budget, *values]))
    axes.set(ylabel="ε spent")
    _rounds_axis(axes, metrics)


def update_norm(axes: Axes, metrics: Sequence[RoundRecord], palette: Palette) -> None:
    """Draw the norm of the released update, the noise expected in it, and the signal left without that."""
    lines = (
        ("update_norm", "released", palette.first, "-"),
        ("noise_norm", "noise (expected)", palette.second, "--"),
        ("signal_estimate", "signal (estimated)", palette.third, (0, (1, 1.2))),
    )
    for name, label, color, dash in lines:
        rounds, values = _series(metrics, name)
        if rounds:
            axes.plot(rounds, values, color=color, linestyle=dash, label=label, **_few(rounds))
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=3,
        columnspacing=1.1,
        handlelength=1.6,
        handletextpad=0.5,
        fontsize=9,
    )
    axes.set(ylabel="L2 norm of the update", ylim=(0, None))
    _rounds_axis(axes, metrics)


def _series(metrics: Sequence[RoundRecord], name: str) -> tuple[list[int], list[float]]:
    """Rounds and finite values of one field of the training rounds; of what is validated, the start's too."""
    phases = ("start", "round") if name.startswith("validation_") else ("round",)
    pairs = [(record.round, getattr(record, name)) for record in metrics if record.phase in phases]
    known = [(number, value) for number, value in pairs if value is not None and math.isfinite(value)]
    return [number for number, _ in known], [value for _, value in known]


def _few(rounds: Sequence[int]) -> dict[str, Any]:
    """Style a line with dots where it alone would hide how few values there are."""
    return {"marker": "o", "markersize": 3.5} if len(rounds) <= 12 else {}


def _rounds_axis(axes: Axes, metrics: Sequence[RoundRecord]) -> None:
    axes.set_xlabel("round")
    axes.set_xlim(0, max(1, metrics[-1].round) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _label_line(axes: Axes, height: float, text: str, color: str, *, right: bool = False) -> None:
    axes.annotate(
        text,
        (1.0 if right else 0.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(-4 if right else 4, 3),
        textcoords="offset points",
        color=color,
        ha="right" if right else "left",
        va="bottom",
    )


def _point(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    axes.plot([x], [y], marker="o", markersize=6, color=color, linestyle="none", zorder=4)
    axes.annotate(
        text, (x, y), xytext=(-7, -8), textcoords="offset points", ha="right", va="top", color=color, weight="bold"
    )
