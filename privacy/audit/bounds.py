"""Lower bounds on what a mechanism leaks, from the scores of two worlds.

An auditor runs the mechanism many times with one extra unit (world 1, "in") and many times without it (world 0, "out"),
and reduces each output to one score that tends to be larger in world 1. If the mechanism is private, no rule "score
above t means in" can be right too often. Every function here turns scores into a number that the true privacy parameter
exceeds with probability at least 1 - alpha.

Clopper-Pearson form. (eps, delta)-DP implies TPR <= e^eps FPR + delta, hence eps >= ln((TPR - delta) / FPR).
  Clopper and Pearson, Biometrika 26 (1934); for audits Jagielski, Ullman and Oprea, arXiv:2006.07709. Valid for every
  mechanism, but blunt: with R runs per world it can never exceed about ln(R / ln(1/alpha)).
Gaussian form. mu-GDP implies FNR >= Phi(Phi^-1(1 - FPR) - mu), hence mu >= isf(FPR) - ppf(FNR).
  Dong, Roth and Su, arXiv:1905.02383 (definition 2.6, equation 6); for audits Nasr et al., arXiv:2302.07956. It refutes
  the claim "this mechanism is mu-GDP" whatever the mechanism does, and reaches the true value for a Gaussian one.

Both take the best threshold of a list that is fixed before the scores are seen. A threshold is placed at an order
statistic of the world-0 scores: if r of the R scores lie above it, the chance that a fresh world-0 score exceeds it is
Beta(r + 1, R - r) distributed for a continuous score, and stochastically smaller with ties. The miss count among the
world-1 scores is then binomial. With K thresholds each of the 2K statements gets the level alpha / (2K) (union bound),
so the maximum over thresholds keeps the level alpha.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import beta, norm

from privacy import checks

# Shares of the world-0 scores above the thresholds: nine points, equally spaced in the normal quantile from -0.5 to
# 2.5. The best threshold for a Gaussian mechanism lies at mu / 2, so these serve 0 < mu < 5; more of them would cost
# level.
DEFAULT_LEVELS: tuple[float, ...] = tuple(float(norm.sf(t)) for t in np.linspace(-0.5, 2.5, 9))


def binomial_lower(successes: ArrayLike, trials: int, alpha: float) -> NDArray[np.float64]:
    """One-sided Clopper-Pearson limit: P[limit <= p] >= 1 - alpha for successes ~ Binomial(trials, p); 0 where none."""
    k = _counts(successes, trials, alpha)
    return np.where(k > 0, beta.ppf(alpha, np.maximum(k, 1), trials - k + 1), 0.0)


def binomial_upper(successes: ArrayLike, trials: int, alpha: float) -> NDArray[np.float64]:
    """One-sided Clopper-Pearson limit: P[p <= limit] >= 1 - alpha for successes ~ Binomial(trials, p); 1 where all."""
    k = _counts(successes, trials, alpha)
    return np.where(k < trials, beta.ppf(1 - alpha, k + 1, np.maximum(trials - k, 1)), 1.0)


def _counts(successes: ArrayLike, trials: int, alpha: float) -> NDArray[np.int64]:
    checks.integer_at_least(1, trials=trials)
    open_unit_interval(alpha=alpha)
    k = np.asarray(successes)
    if not np.issubdtype(k.dtype, np.integer) or (k.size and (k.min() < 0 or k.max() > trials)):
        raise ValueError(f"successes must be integers in [0, {trials}], got {successes!r}; pass counts, not rates")
    return k.astype(np.int64)


def gdp_delta(epsilon: float, mu: float) -> float:
    """Smallest delta with which a tight mu-GDP mechanism is (epsilon, delta)-DP (arXiv:1905.02383, corollary 2.13).

    delta = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2); evaluated in logs, for mu in the hundreds too.
    """
    checks.non_negative(epsilon=epsilon, mu=mu)
    if mu == 0:
        return 0.0
    first = float(log_ndtr(-epsilon / mu + mu / 2))
    second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return float(-np.exp(first) * np.expm1(min(second - first, 0.0)))


def gdp_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon with which a tight mu-GDP mechanism is (epsilon, delta)-DP; exact to 1e-10, 0 <= delta < 1.

    mu = 1/z for one release of a Gaussian mechanism without sampling, z being its noise multiplier. delta = 0 gives
    infinity unless mu = 0.
    """
    checks.non_negative(mu=mu)
    checks.fraction(delta=delta)
    if mu == 0 or (delta > 0 and gdp_delta(0.0, mu) <= delta):
        return 0.0
    if delta == 0:
        return float("inf")
    # At this epsilon the first term of gdp_delta equals delta and the second is positive: an upper end of the bracket.
    upper = mu * mu / 2 + mu * max(float(norm.isf(delta)), 0.0)
    return float(brentq(lambda e: gdp_delta(e, mu) - delta, 0.0, upper, xtol=1e-10))


def gdp_mu(epsilon: float, delta: float) -> float:
    """Inverse of ``gdp_epsilon``: the largest mu whose mechanism is (epsilon, delta)-DP; needs 0 < delta < 1."""
    checks.non_negative(epsilon=epsilon)
    open_unit_interval(delta=delta)
    upper = 1.0
    while gdp_delta(epsilon, upper) < delta:
        upper *= 2
    return float(brentq(lambda m: gdp_delta(epsilon, m) - delta, 0.0, upper, xtol=1e-12))


@dataclass(frozen=True)
class RateBounds:
    """Error rates of the tests "score > threshold", jointly valid with probability 1 - alpha.

    thresholds, false_positive (upper limits), false_negative (upper limits): one entry per level.
    """

    thresholds: NDArray[np.float64]
    false_positive: NDArray[np.float64]
    false_negative: NDArray[np.float64]


def rate_bounds(
    scores_in: ArrayLike, scores_out: ArrayLike, alpha: float, levels: Sequence[float] = DEFAULT_LEVELS
) -> RateBounds:
    """Simultaneous upper limits of both error rates at thresholds fixed in advance as shares of the world-0 scores.

    scores_in, scores_out: 1-D, independent scores of world 1 and world 0, larger meaning "in".
    levels: wanted false positive rates; choose them before looking at the scores, or the level alpha is lost.
    Raises ValueError for empty, non-finite or multi-dimensional scores.
    """
    inside, outside = finite_scores("scores_in", scores_in), np.sort(finite_scores("scores_out", scores_out))
    open_unit_interval(alpha=alpha)
    if not levels:
        raise ValueError("levels must not be empty; leave it out for the default list")
    for level in levels:
        checks.fraction(level=level)
    runs = outside.size
    above = np.unique(np.clip((np.asarray(levels) * runs).astype(np.int64), 0, runs - 1))
    each = alpha / (2 * above.size)
    thresholds = outside[runs - 1 - above]
    missed = (inside[None, :] <= thresholds[:, None]).sum(axis=1)
    return RateBounds(
        thresholds,
        np.asarray(beta.ppf(1 - each, above + 1, runs - above), dtype=np.float64),
        binomial_upper(missed, inside.size, each),
    )


def epsilon_lower_clopper_pearson(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    alpha: float,
    levels: Sequence[float] = DEFAULT_LEVELS,
) -> float:
    """Lower bound of epsilon at this delta, for any mechanism: max over thresholds of ln((TPR - delta) / FPR), >= 0.

    What it proves: if the mechanism is (epsilon, delta)-DP, then P[returned value <= epsilon] >= 1 - alpha.
    """
    checks.fraction(delta=delta)
    rates = rate_bounds(scores_in, scores_out, alpha, levels)
    gain = 1 - rates.false_negative - delta
    usable = gain > 0
    if not usable.any():
        return 0.0
    return float(max(0.0, np.max(np.log(gain[usable]) - np.log(rates.false_positive[usable]))))


def mu_lower(
    scores_in: ArrayLike, scores_out: ArrayLike, *, alpha: float, levels: Sequence[float] = DEFAULT_LEVELS
) -> float:
    """Lower bound of the Gaussian-DP parameter: max over thresholds of isf(FPR) - ppf(FNR), >= 0.

    What it proves: if the mechanism is mu-GDP, then P[returned value <= mu] >= 1 - alpha. Scores need not be Gaussian.
    Edge cases: equal samples give 0; perfectly separated samples give ``mu_ceiling``, however much they leak.
    """
    rates = rate_bounds(scores_in, scores_out, alpha, levels)
    return float(max(0.0, np.max(norm.isf(rates.false_positive) - norm.ppf(rates.false_negative))))


def mu_ceiling(runs_in: int, runs_out: int, *, alpha: float, levels: Sequence[float] = DEFAULT_LEVELS) -> float:
    """Largest value ``mu_lower`` can take with this many runs: 4.35 for 1000 per world at alpha = 1e-3."""
    checks.integer_at_least(1, runs_in=runs_in, runs_out=runs_out)
    outside = np.arange(runs_out)
    return mu_lower(np.full(runs_in, runs_out), outside, alpha=alpha, levels=levels)


def epsilon_lower_gdp(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    *,
    delta: float,
    alpha: float,
    levels: Sequence[float] = DEFAULT_LEVELS,
) -> float:
    """``mu_lower`` converted to epsilon at this delta.

    What it proves: a bound on epsilon only for a mechanism whose trade-off curve is Gaussian (one release without
    sampling). For any other mechanism it is the epsilon that the refuted mu would have had.
    """
    return gdp_epsilon(mu_lower(scores_in, scores_out, alpha=alpha, levels=levels), delta)


def mu_estimate(scores_in: ArrayLike, scores_out: ArrayLike) -> float:
    """Plain estimate of mu for Gaussian scores: difference of the means over the pooled standard deviation.

    An estimate, not a bound: its sampling error is about sqrt(2/R). Infinite when neither sample varies but they
    differ.
    """
    inside, outside = finite_scores("scores_in", scores_in), finite_scores("scores_out", scores_out)
    difference = float(inside.mean() - outside.mean())
    spread = float(np.sqrt((inside.var() + outside.var()) / 2))
    if spread == 0:
        return 0.0 if difference == 0 else float(np.copysign(np.inf, difference))
    return difference / spread


def finite_scores(name: str, scores: ArrayLike) -> NDArray[np.float64]:
    """The scores as a 1-D float64 array; ValueError if empty, non-finite or of another rank."""
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a non-empty 1-D array of finite numbers, got shape {array.shape}")
    return array


def open_unit_interval(**values: Any) -> None:
    """Raise ValueError unless every value lies strictly between 0 and 1."""
    for name, value in values.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} must be strictly between 0 and 1, got {value!r}")
