"""Measures of how well a score tells members from non-members: area under the ROC curve, and TPR at a small FPR, with
intervals.

Statistics of an attack, not of a guarantee: no bound on epsilon follows from an AUC. Report them with their intervals
and with the number of canaries, and check that the same score on the untrained model has an AUC interval around 1/2;
otherwise members and non-members were not exchangeable and the numbers mean nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, norm, rankdata

from privacy import checks
from privacy.audit.bounds import binomial_lower, binomial_upper, finite_scores, open_unit_interval


@dataclass(frozen=True)
class Interval:
    """A point estimate with a two-sided confidence interval, all in [0, 1]."""

    estimate: float
    lower: float
    upper: float


def auc(scores_in: ArrayLike, scores_out: ArrayLike, *, alpha: float = 0.05) -> Interval:
    """The chance that a member scores higher than a non-member, ties counted half, with a 1 - alpha interval.

    Interval: normal with the variance of DeLong, DeLong and Clarke-Pearson, Biometrics 44 (1988), asymptotic in the
    smaller sample. When that variance is 0 (perfect separation, or all scores equal) it is the Clopper-Pearson interval
    of min(n_in, n_out) disjoint pairs, each of which is an independent trial with success probability AUC; exact, and
    wide.
    """
    inside, outside = finite_scores("scores_in", scores_in), finite_scores("scores_out", scores_out)
    open_unit_interval(alpha=alpha)
    n, m = inside.size, outside.size
    together = rankdata(np.concatenate([inside, outside]))
    # Share of the other sample that each score beats (ties count half): rank among all, less the rank within its own.
    beats = (together[:n] - rankdata(inside)) / m
    beaten = 1 - (together[n:] - rankdata(outside)) / n
    estimate = float(beats.mean())
    variance = _mean_variance(beats) + _mean_variance(beaten)
    if variance > 0:
        half = float(norm.isf(alpha / 2) * np.sqrt(variance))
        return Interval(estimate, max(0.0, estimate - half), min(1.0, estimate + half))
    pairs = min(n, m)
    wins = round(estimate * pairs)
    return Interval(
        estimate, float(binomial_lower(wins, pairs, alpha / 2)), float(binomial_upper(wins, pairs, alpha / 2))
    )


def tpr_at_fpr(scores_in: ArrayLike, scores_out: ArrayLike, *, fpr: float, alpha: float = 0.05) -> Interval:
    """Share of members above the threshold that a share ``fpr`` of non-members exceeds, with a 1 - alpha interval.

    The interval is exact for continuous scores of any distribution: the true threshold lies between two order
    statistics of the non-members (each with error alpha/4, Beta tail), and at each of them the member count is binomial
    (Clopper-Pearson, alpha/4). Too few non-members to place the upper threshold (roughly fewer than ln(4/alpha) / fpr)
    give a lower limit of 0.
    """
    inside, outside = finite_scores("scores_in", scores_in), np.sort(finite_scores("scores_out", scores_out))
    open_unit_interval(fpr=fpr, alpha=alpha)
    n, m = inside.size, outside.size
    above = np.arange(m)  # threshold at outside[m - 1 - r] leaves r scores above; its true FPR is Beta(r + 1, m - r)
    strict = above[beta.ppf(1 - alpha / 4, above + 1, m - above) <= fpr]  # true FPR <= fpr, surely enough
    loose = above[beta.ppf(alpha / 4, above + 1, m - above) >= fpr]  # true FPR >= fpr, surely enough
    lower, upper = 0.0, 1.0
    if strict.size:
        lower = float(binomial_lower(_passing(inside, outside, int(strict[-1])), n, alpha / 4))
    if loose.size:
        upper = float(binomial_upper(_passing(inside, outside, int(loose[0])), n, alpha / 4))
    estimate = _passing(inside, outside, min(int(fpr * m), m - 1)) / n
    return Interval(estimate, min(lower, estimate), max(upper, estimate))


def _passing(inside: NDArray[np.float64], outside: NDArray[np.float64], above: int) -> int:
    checks.integer_at_least(0, above=above)
    return int((inside > outside[outside.size - 1 - above]).sum())


def _mean_variance(values: NDArray[np.float64]) -> float:
    return float(values.var(ddof=1) / values.size) if values.size > 1 else 0.0
