"""What the points of ``frontier.py`` say: tables of docs/results/atdp.md, and the figure docs/atdp-{light,dark}.svg.

Run: `python -m simulations.benchmarks papers.atdp.curves` draws the figure.

An arm's curve runs from the fine-tuned start through its strengths, straight between them; shrinking ends in the base
model, the factor 0. Read off is, seed by seed, the least exposure at which perplexity is no more than so many per cent
above the start's. For a curve that falls steadily this is interpolation at equal perplexity; for one whose perplexity
falls too it is what a user would take. A curve that ends before the limit gives its least.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulations.benchmarks.harness.markdown import (
    NOT_MEASURED,
    Row,
    distinct,
    grouped,
    markdown,
    mean_text,
    provenance_of_rows,
)
from simulations.benchmarks.harness.results import RESULTS, ROOT
from simulations.benchmarks.papers.atdp.chains import NULL
from simulations.benchmarks.papers.atdp.frontier import BASE, START, STRENGTHS
from simulations.history.paired import number_tested, paired_difference, told_apart
from simulations.report.notation import duration_text, number_text
from simulations.report.plots import Palette, draw_figure
from simulations.report.svg import write_themes

STEM = ROOT / "docs" / "atdp"
LIMITS = (0.05, 0.1, 0.2, 0.3)
"""Rises of perplexity over the start's, at which curves are compared."""

OVER_ALL = "mean of these"

Curve = Sequence[tuple[float, float]]
"""(perplexity over the start's, exposure), in the order of strengths."""


def curves(rows: Sequence[Row]) -> dict[str, dict[int, Curve]]:
    """Arm -> seed -> curve; arms that are not complete for a seed are left out for it."""
    found: dict[str, dict[int, Curve]] = {}
    for seed, of_seed in grouped(rows, lambda row: row["seed"]).items():
        points = {(row["arm"], row["strength"]): row for row in of_seed}
        if (START, 0) not in points:
            continue
        begin = points[START, 0]["perplexity"]
        for arm, strengths in STRENGTHS.items():
            ends = [(BASE, 0)] if arm == "shrinking" else []
            chosen = [(START, 0), *((arm, strength) for strength in strengths), *ends]
            if all(point in points for point in chosen):
                found.setdefault(arm, {})[seed] = [
                    (points[at]["perplexity"] / begin, points[at]["exposure"]) for at in chosen
                ]
    return found


def least_exposure(curve: Curve, limit: float) -> float:
    """The least exposure on the curve where perplexity is at most 1 + `limit` of the start's; the start's at most."""
    most, found = 1 + limit, curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= most:
            found = min(found, y0)
        if x1 <= most:
            found = min(found, y1)
        if (x0 <= most) != (x1 <= most):
            found = min(found, y0 + (y1 - y0) * (most - x0) / (x1 - x0))
    return found


def readings(by_seed: Mapping[int, Curve]) -> dict[str, dict[int, float]]:
    """Limit, or their mean -> seed -> least exposure."""
    each = {
        f"+{limit:.0%}": {seed: least_exposure(curve, limit) for seed, curve in by_seed.items()} for limit in LIMITS
    }
    return {**each, OVER_ALL: {seed: statistics.mean(found[seed] for found in each.values()) for seed in by_seed}}


def exposures(results: Mapping[str, Any]) -> str:
    """Least exposure of every arm within each rise of perplexity, mean over seeds."""
    rows, found = results["rows"], curves(results["rows"])
    if not found:
        return NOT_MEASURED
    header = (
        "least exposure, bits, if perplexity may rise by",
        *(f"{limit:.0%}" for limit in LIMITS),
        OVER_ALL,
        "seeds",
    )
    lines = [
        (arm, *(mean_text(list(of.values()), 2) for of in readings(found[arm]).values()), str(len(found[arm])))
        for arm in STRENGTHS
        if arm in found
    ]
    single = {name: [row for row in rows if row["arm"] == name] for name in (BASE, START)}
    where = "; ".join(
        f"{words} has perplexity {mean_text([row['perplexity'] for row in single[name]], 2)} and exposure "
        f"{mean_text([row['exposure'] for row in single[name]], 2)}"
        for name, words in ((START, "The fine-tuned start"), (BASE, "the base model, which read no secret,"))
    )
    missing = [arm for arm in STRENGTHS if len(found.get(arm, {})) < len(distinct(rows, "seed"))]
    gaps = f" Not complete for every seed: {', '.join(missing)}." if missing else ""
    total = sum(row["cpu_seconds"] for row in rows)
    return (
        f"{markdown(header, lines, 'lr')}\nMean ± standard deviation over seeds. {where}; a "
        f"secret never seen has {NULL:.2f} in the mean, and {math.log2(10**6):.1f} is the most.{gaps} Perplexity over "
        f"{number_text(rows[0]['test_tokens'])} tokens of WikiText-2 validation. No row has a guarantee (ε infinite).\n"
        f"{provenance_of_rows(rows, f'{duration_text(total)} of one core; ')}"
    )


def differences(results: Mapping[str, Any]) -> str:
    """ATDP less each other arm at the same rise of perplexity, paired by seed, Holm-corrected over the arms."""
    found = curves(results["rows"])
    if "ATDP" not in found:
        return NOT_MEASURED
    own = readings(found["ATDP"])
    rest = {arm: readings(of) for arm, of in found.items() if arm != "ATDP"}
    differences = {
        arm: {name: paired_difference(own[name], other[name]) for name in own} for arm, other in rest.items()
    }
    over_all = [each[OVER_ALL] for each in differences.values()]
    number, lines = number_tested(over_all), []
    for (arm, each), told in zip(differences.items(), told_apart(over_all), strict=True):
        found_here, whole = [one for one in each.values() if one is not None], each[OVER_ALL]
        if whole is None:
            continue
        smallest = whole.smallest(number)
        lines.append(
            (
                f"ATDP less {arm}",
                *(f"{one.mean:+.2f}" + ("" if one.half is None else f" ± {one.half:.2f}") for one in found_here),
                "" if smallest is None else f"{smallest:.2f}",
                ("above" if whole.mean > 0 else "below") if told else "not significant",
                str(len(whole.values)),
            )
        )
    limits = (f"at +{limit:.0%}" for limit in LIMITS)
    header = ("bits", *limits, OVER_ALL, "smallest that would show", "ATDP lies", "seeds")
    return markdown(header, lines, "lr")


STYLES: dict[str, tuple[Callable[[Palette], str], Any, str]] = {
    "ATDP": (lambda palette: palette.second, "-", "D"),
    "unweighted": (lambda palette: palette.second, "--", "s"),
    "constant noise": (lambda palette: palette.second, ":", "^"),
    "noise alone": (lambda palette: palette.first, "-", "o"),
    "shrinking": (lambda palette: palette.third, "-", "v"),
    "other text": (lambda palette: palette.third, "--", "P"),
}


def figure(rows: Sequence[Row], palette: Palette) -> Figure:
    """Exposure against perplexity: a line per arm through the means over seeds, a faint mark per seed.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not curves(rows):
        raise ValueError("no arm is complete in the results; run papers.atdp.frontier first")

    def draw(axes: Axes, palette: Palette) -> None:
        for arm, by_seed in curves(rows).items():
            colour, dash, marker = STYLES[arm]
            chosen = colour(palette)
            points = np.array(list(by_seed.values()))  # [seeds, strengths, 2]
            share, bits = points.mean(axis=0).T
            axes.plot(
                100 * (share - 1), bits, color=colour(palette), linestyle=dash, marker=marker, markersize=5, label=arm
            )
            for curve in points:
                axes.plot(
                    100 * (curve[1:, 0] - 1), curve[1:, 1], marker, color=chosen, markersize=3, alpha=0.4,
                    linestyle="none",
                )  # fmt: skip
        axes.axhline(NULL, color=palette.muted, linestyle=":", linewidth=1.2)
        axes.annotate(
            "a secret never seen", (1.0, NULL), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", va="bottom", color=palette.muted, fontsize=9,
        )  # fmt: skip
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9)
        axes.set(xlabel="perplexity above the fine-tuned start's, %", ylabel="exposure, bits", ylim=(0, 20))
        low = min(
            0.0, *(100 * (share - 1) for by_seed in curves(rows).values() for c in by_seed.values() for share, _ in c)
        )
        axes.set_xlim(1.1 * low - 1, 45)

    return draw_figure([draw], palette, (7.6, 4.0))


def main() -> None:
    """Draw both themes."""
    rows = json.loads((RESULTS / "atdp-frontier.json").read_text(encoding="utf-8"))["rows"]
    write_themes(lambda palette: figure(rows, palette), STEM)


if __name__ == "__main__":
    typer.run(main)
