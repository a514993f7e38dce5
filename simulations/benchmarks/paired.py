"""Statistics of methods compared on the same seeds: data, partition and initial adapter of a seed are shared by all.

The difference of two methods on one seed is free of what the seed itself does, so its mean is told far more sharply
than the difference of two means. The interval is Student's: mean +- t(0.975, n - 1) s / sqrt(n); with two or three
seeds t is 12.7 or 4.3, and the interval as wide as so few seeds deserve.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Paired:
    """A mean difference over seeds; `half_width` of its 95 % confidence interval, None with a single seed."""

    mean: float
    half_width: float | None
    seeds: tuple[int, ...]


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Paired | None:
    """`values` less `reference`, seed by seed, over the seeds both have; None where there is none."""
    seeds = tuple(sorted(values.keys() & reference.keys()))
    if not seeds:
        return None
    differences = [values[seed] - reference[seed] for seed in seeds]
    return Paired(statistics.mean(differences), half_width(differences), seeds)


def half_width(values: list[float], level: float = 0.95) -> float | None:
    """Half the width of Student's confidence interval for the mean; None for a single value."""
    if len(values) < 2:
        return None
    t = float(stats.t.ppf((1 + level) / 2, len(values) - 1))
    return t * statistics.stdev(values) / math.sqrt(len(values))
