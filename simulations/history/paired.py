"""Means over seeds, and differences of methods on the same seeds: intervals, tests, and what a test could have seen.

Methods compared on the same seeds share data, partition and first adapter of a seed, so their difference on one seed
is free of what the seed itself does, and its mean is known more sharply than the difference of two means. All is
Student's: interval mean +- t(0.975, n - 1) s / sqrt(n), two-sided test on n - 1 degrees of freedom; with two or three
seeds wide, as so few deserve. Several comparisons are corrected by Holm (Scand. J. Statist. 6, 1979), which keeps the
chance of one false difference among all of them at 5 %, however the comparisons depend on one another. Deviations are
not pooled over a table's methods: where they differ, a pooled test of ten methods on three seeds told a difference
where there was none in 10 to 14 % of simulated tables, this one in 4 to 5 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy import optimize, stats

LEVEL = 0.05
"""Chance of a difference told where there is none, over all comparisons of a table."""

POWER = 0.8
"""Chance at which the smallest difference that a table is said to find would have been found."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `half` of its 95 % interval, None with one seed."""

    mean: float
    half: float | None
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> "Estimate":
        """Estimate the mean of at least one value."""
        if len(values) < 2:
            return Estimate(values[0], None, tuple(values))
        t = float(stats.t.ppf(0.975, len(values) - 1))
        return Estimate(mean(values), t * stdev(values) / math.sqrt(len(values)), tuple(values))

    @property
    def p_value(self) -> float | None:
        """The two-sided p-value of a mean of zero, None with one seed.

        Values that are all the same have 0, or 1 if they are 0.
        """
        if len(self.values) < 2:
            return None
        error = stdev(self.values) / math.sqrt(len(self.values))
        if error == 0.0:
            return float(self.mean == 0.0)
        return float(2 * stats.t.sf(abs(self.mean) / error, len(self.values) - 1))

    def smallest(self, comparisons: int = 1) -> float | None:
        """The smallest true mean that a test on these seeds finds with a chance of 80 %; None with one seed.

        The deviation between seeds is taken to be the measured one, and the level is 5 % over all `comparisons`
        (Bonferroni's bound: Holm's first step). From the noncentral t distribution.
        """
        count = len(self.values)
        if count < 2:
            return None
        limit = float(stats.t.ppf(1 - LEVEL / comparisons / 2, count - 1))

        def missing(shift: float) -> float:
            return float(stats.nct.sf(limit, count - 1, shift)) - POWER

        high = 2 * limit + 4.0
        while missing(high) < 0:
            high *= 2
        shift = float(optimize.brentq(missing, 0.0, high))
        return shift * stdev(self.values) / math.sqrt(count)


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """The difference `values` less `reference`, seed by seed, over shared seeds; None where there is none."""
    shared = sorted(values.keys() & reference.keys())
    return Estimate.of([values[seed] - reference[seed] for seed in shared]) if shared else None


def told_apart(differences: Sequence[Estimate | None]) -> list[bool]:
    """Test which of a table's comparisons differ from zero, at 5 % over all of them (Holm's correction).

    What has one seed, or nothing, is not tested and not counted.
    """
    tested = [
        (p, index) for index, each in enumerate(differences) if each is not None and (p := each.p_value) is not None
    ]
    found = [False] * len(differences)
    for place, (p, index) in enumerate(sorted(tested)):
        if p > LEVEL / (len(tested) - place):
            break
        found[index] = True
    return found


def number_tested(differences: Sequence[Estimate | None]) -> int:
    """The number of comparisons that :func:`told_apart` tests."""
    return sum(each is not None and each.p_value is not None for each in differences)
