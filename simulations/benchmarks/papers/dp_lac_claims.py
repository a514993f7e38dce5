"""What the DP-LAC paper claims, beside what the sweep ``controllers`` measured, and the sweep's question: is it decay?

The paper has two regimes: *tuned*, where baselines have the best threshold that tuning found, and *default*, where
nobody has tuned and all start at C0 = 8. Differences are paired by seed; those of the table are corrected together.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulations.benchmarks.harness.markdown import Row, markdown
from simulations.benchmarks.papers.dp_lac import accuracies, difference_text, is_choosing, shown_name
from simulations.history.paired import Estimate, number_tested, paired_difference, told_apart

ONE_ERROR = 0.018
"""Standard error of an accuracy of 80 % on 500 validation records."""

OPEN = "not measured yet"


@dataclass(frozen=True)
class Claim:
    """A claim, the regime it is about, what was measured, and what that says.

    Attributes:
        difference: on which it rests; None where `verdict` rests on something else.
        least: what the difference must exceed for the claim to hold.
        sign: -1 where the claim is that the difference is negative.
    """

    text: str
    regime: str
    measured: str
    verdict: str = ""
    difference: Estimate | None = None
    least: float = 0.0
    sign: int = 1


def claims(results: Mapping[str, Any]) -> str:
    """One line per claim: what was claimed, in which regime, what is measured here, whether it holds."""
    cells = results["cells"]
    tuned, default, clinc = "tuned-sst2", "default-sst2", "clinc150"
    lines = [
        _against_best(cells, tuned, "beats the best other method by 6.6 points on average", 0.066),
        _difference(cells, default, "beats a fixed threshold that nobody tuned", "dp-lac-histogram", above="fixed"),
        _against_best(cells, default, "beats the best other method that nobody tuned"),
        _against_best(cells, clinc, "beats the best other method, its C tuned on other data"),
        _histogram(cells),
        _difference(cells, default, "DP-CLAC is below DP-LAC", "dp-clac", below="dp-lac"),
        _difference(cells, default, "the same with `centred` DP-CLAC", "dp-clac-centred", below="dp-lac"),
        _difference(
            cells, tuned, "gains more than a decaying server step alone", "dp-lac-histogram", above="fixed-decay-tuned"
        ),
        _ratchet(cells, "dp-lac", "C falls as the validation loss does (no histogram)"),
        _ratchet(cells, "dp-lac-smooth", "the same with `smooth`"),
        _difference(
            cells, default, "`smooth` is at least as good as the paper's rule", "dp-lac-smooth", above="dp-lac"
        ),
        _difference(cells, tuned, "RL (sound form) is above the best fixed threshold", "rl-tuned", above="fixed-tuned"),
        _difference(cells, tuned, "RL (sound form) is above DP-LAC", "rl-tuned", above="dp-lac-histogram"),
    ]
    differences = [line.difference for line in lines]
    count = number_tested(differences)
    shown = [
        (line.text, line.regime, line.measured, line.verdict or _verdict(line, told, count))
        for line, told in zip(lines, told_apart(differences), strict=True)
    ]
    return markdown(("claim (of DP-LAC, where no other is named)", "regime", "measured here", "holds"), shown)


def _verdict(line: Claim, told: bool, count: int) -> str:
    """Whether the interval, the number of comparisons minded, leaves anything but the claim or its contrary."""
    difference = line.difference
    if difference is None:
        return OPEN
    goal = line.sign * line.least
    holds = "yes" if line.sign * (difference.mean - goal) > 0 else "no"
    if difference.half is None:
        return f"one seed (the mean says {holds})"
    if line.least and abs(difference.mean - goal) > difference.half:
        return holds
    if told and not line.least:
        return holds
    smallest = difference.smallest(count)
    assert smallest is not None
    return f"not significant: {100 * smallest:.1f} would show (the mean says {holds})"


def _difference(cells: Sequence[Row], grid: str, text: str, first: str, *, below: str = "", above: str = "") -> Claim:
    """Whether a method is below, or above, another one."""
    found, second = accuracies(row for row in cells if row["grid"] == grid), below or above
    difference = paired_difference(found.get(first, {}), found.get(second, {}))
    regime = grid.partition("-")[0]
    if difference is None:
        return Claim(text, regime, OPEN, OPEN)
    seeds = f"{len(difference.values)} seeds" if len(difference.values) > 1 else "one seed"
    measured = f"{shown_name(first)} less {shown_name(second)}: {difference_text(difference)}, {seeds}"
    return Claim(text, regime, measured, difference=difference, sign=-1 if below else 1)


def _against_best(cells: Sequence[Row], grid: str, text: str, least: float = 0.0) -> Claim:
    """DP-LAC with its histogram less the best of the methods that are not DP-LAC."""
    rows = [row for row in cells if row["grid"] == grid and not is_choosing(row)]
    private = [row for row in rows if row["kind"] == "run" and row["epsilon_stated"] is not None]
    found = accuracies(row for row in private if not row["variant"].startswith(("dp-lac", "dp-clac", "head-only")))
    if not found:
        return Claim(text, grid.partition("-")[0], OPEN, OPEN)
    best = max(found, key=lambda name: statistics.mean(found[name].values()))
    claim = _difference(cells, grid, text, "dp-lac-histogram", above=best)
    return Claim(text, claim.regime, claim.measured, claim.verdict, claim.difference, least)


def _histogram(cells: Sequence[Row]) -> Claim:
    text = "The histogram's C is within one order of magnitude of the best fixed C"
    grid = [row for row in cells if row["grid"] == "fixed-grid-sst2"]
    own = [row for row in cells if row["variant"] == "dp-lac-histogram" and row["grid"].endswith("sst2")]
    chosen = sorted({row["first_clip_bound"] for row in own})
    if not grid or not chosen:
        return Claim(text, "both", OPEN, OPEN)
    best, *others = sorted(grid, key=lambda row: -row["validation_accuracy"])
    close = [best] + [row for row in others if best["validation_accuracy"] - row["validation_accuracy"] < ONE_ERROR]
    within = {
        all(abs(math.log10(bound / row["last_clip_bound"])) <= 1 for bound in chosen) for row in close
    }  # of all that the validation records cannot tell from the best
    bounds = ", ".join(f"{bound:.2g}" for bound in chosen)
    fixed = ", ".join(f"{row['last_clip_bound']:g} ({100 * row['validation_accuracy']:.1f} %)" for row in close)
    measured = f"histogram: {bounds}; best of the fixed grid (validation): {fixed}"
    return Claim(text, "both", measured, {True: "yes", False: "no"}[within.pop()] if len(within) == 1 else "undecided")


def _ratchet(cells: Sequence[Row], variant: str, text: str) -> Claim:
    """How far C and the loss fell, both relative to round 1; they agree if neither is twice the other."""
    rows = [row for row in cells if row["grid"] == "default-sst2" and row["variant"] == variant]
    if not rows:
        return Claim(text, "default", OPEN, OPEN)
    bound = statistics.mean(row["last_clip_bound"] / row["first_clip_bound"] for row in rows)
    loss = statistics.mean(row["last_round_loss"] / row["first_round_loss"] for row in rows)
    peak = statistics.mean(row["last_round_loss"] / row["highest_round_loss"] for row in rows)
    measured = (
        f"C ends at {100 * bound:.1f} % of its start, the loss at {100 * loss:.0f} % of round 1 "
        f"and {100 * peak:.0f} % of its highest"
    )
    if loss >= 1.0:
        return Claim(text, "default", measured, "not tested (the loss did not fall)")
    return Claim(text, "default", measured, "yes" if 0.5 <= bound / loss <= 2 else "no")
