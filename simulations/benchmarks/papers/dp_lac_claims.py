"""What the DP-LAC paper claims, beside what the sweep measured, and the sweep's own question: is it decay?"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulations.benchmarks.harness.markdown import markdown
from simulations.benchmarks.harness.timing import paired_difference
from simulations.benchmarks.papers.dp_lac_tables import accuracies, difference_text, shown_name, tables_of

Row = Mapping[str, Any]
Found = dict[str, dict[int, float]]

ONE_ERROR = 0.018
"""Standard error of an accuracy of 80 % on 500 validation records."""

OPEN = "not measured yet"


def claims(results: Mapping[str, Any]) -> str:
    """One line per claim: what was claimed, what is measured here, whether it holds."""
    cells = results["cells"]
    lines = [
        ("DP-LAC beats the best other method by 6.6 points on average in the tuned regime", *_best_other(cells)),
        ("The histogram's C is within one order of magnitude of the best fixed C", *_histogram(cells)),
        ("DP-CLAC is below DP-LAC", *_difference(cells, "default-sst2", "dp-clac", "dp-lac", below=True)),
        (
            "the same with `centred` DP-CLAC",
            *_difference(cells, "default-sst2", "dp-clac-centred", "dp-lac", below=True),
        ),
        (
            "DP-LAC gains more than a decaying server step alone gives",
            *_difference(cells, "tuned-sst2", "dp-lac-histogram", "fixed-decay-tuned", below=False),
        ),
        ("C falls as the validation loss does (default regime, no histogram)", *_ratchet(cells, "dp-lac")),
        ("the same with `smooth`", *_ratchet(cells, "dp-lac-smooth")),
        (
            "RL (sound form) is above the best fixed threshold",
            *_difference(cells, "tuned-sst2", "rl-tuned", "fixed-tuned", below=False),
        ),
        (
            "RL (sound form) is above DP-LAC",
            *_difference(cells, "tuned-sst2", "rl-tuned", "dp-lac-histogram", below=False),
        ),
        (
            "`smooth` is at least as good as the paper's rule",
            *_difference(cells, "default-sst2", "dp-lac-smooth", "dp-lac", below=False),
        ),
    ]
    return markdown(("claim", "measured here", "holds"), lines)


def _best_other(cells: Sequence[Row]) -> tuple[str, str]:
    measured, gains, seeds = [], [], []
    for (grid, epsilon), rows in sorted(tables_of(cells).items()):
        found = accuracies(rows)
        own = [name for name in found if name == "dp-lac-histogram"]
        others = [name for name in found if name.endswith("-tuned") and not name.startswith("dp-lac")]
        if not grid.startswith("tuned") or not own or not others:
            continue
        best = max(others, key=lambda name: statistics.mean(found[name].values()))
        gain = paired_difference(found[own[0]], found[best])
        if gain is not None:
            gains.append(100 * gain.mean)
            seeds.append(len(gain.seeds))
            measured.append(f"{grid}, ε {epsilon:g}: {difference_text(gain)} to {shown_name(best)}")
    if not gains:
        return OPEN, OPEN
    verdict = "yes" if statistics.mean(gains) >= 6.6 else "no"
    return "; ".join(measured), verdict if min(seeds) > 1 else f"too few seeds (so far: {verdict})"


def _histogram(cells: Sequence[Row]) -> tuple[str, str]:
    grid = [row for row in cells if row["grid"] == "fixed-grid-sst2"]
    own = [row for row in cells if row["variant"] == "dp-lac-histogram" and row["grid"].endswith("sst2")]
    chosen = sorted({row["first_clip_bound"] for row in own})
    if not grid or not chosen:
        return OPEN, OPEN
    best, *others = sorted(grid, key=lambda row: -row["validation_accuracy"])
    close = [best] + [row for row in others if best["validation_accuracy"] - row["validation_accuracy"] < ONE_ERROR]
    within = {
        all(abs(math.log10(bound / row["last_clip_bound"])) <= 1 for bound in chosen) for row in close
    }  # of all that the validation records cannot tell from the best
    told = ", ".join(f"{bound:.2g}" for bound in chosen)
    fixed = ", ".join(f"{row['last_clip_bound']:g} ({100 * row['validation_accuracy']:.1f} %)" for row in close)
    text = f"histogram: {told}; best of the fixed grid (validation): {fixed}"
    return text, {True: "yes", False: "no"}[within.pop()] if len(within) == 1 else "not told apart"


def _ratchet(cells: Sequence[Row], variant: str) -> tuple[str, str]:
    """How far C and the loss fell, both relative to round 1; they agree if neither is twice the other."""
    rows = [row for row in cells if row["grid"] == "default-sst2" and row["variant"] == variant]
    if not rows:
        return OPEN, OPEN
    bound = statistics.mean(row["last_clip_bound"] / row["first_clip_bound"] for row in rows)
    loss = statistics.mean(row["last_round_loss"] / row["first_round_loss"] for row in rows)
    peak = statistics.mean(row["last_round_loss"] / row["highest_round_loss"] for row in rows)
    text = (
        f"C ends at {100 * bound:.1f} % of its start, the loss at {100 * loss:.0f} % of round 1 "
        f"and {100 * peak:.0f} % of its highest"
    )
    if loss >= 1.0:
        return text, "not tested (the loss did not fall)"
    return text, "yes" if 0.5 <= bound / loss <= 2 else "no"


def _difference(cells: Sequence[Row], grid: str, first: str, second: str, *, below: bool) -> tuple[str, str]:
    found = accuracies(row for row in cells if row["grid"] == grid)
    difference = paired_difference(found.get(first, {}), found.get(second, {}))
    if difference is None:
        return OPEN, OPEN
    text = f"{grid}: {shown_name(first)} less {shown_name(second)}: {difference_text(difference)}, " + (
        f"{len(difference.seeds)} seeds" if len(difference.seeds) > 1 else "one seed"
    )
    return text, _verdict(difference.mean, difference.half_width, below=below)


def _verdict(mean: float, half_width: float | None, *, below: bool) -> str:
    """The sign in words; "not told apart" where the interval contains zero or there is none."""
    holds: Callable[[float], bool] = (lambda value: value < 0) if below else (lambda value: value > 0)
    if half_width is None or abs(mean) <= half_width:
        return f"not told apart (the mean says {'yes' if holds(mean) else 'no'})"
    return "yes" if holds(mean) else "no"
