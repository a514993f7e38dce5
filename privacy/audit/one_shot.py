"""Canary clients inside one real run: an estimate of epsilon for federated learning.

Andrew, Kairouz, Oh, Oprea, McMahan and Suriyakumar, "One-shot empirical privacy estimation for federated learning",
arXiv:2302.03098v5, ICLR 2024. k canary clients send C c_i whenever they are sampled, the c_i independent and uniform on
the unit sphere of R^d. A canary that never took part has a cosine with any release that is distributed exactly as one
coordinate of a uniform point of the sphere, nearly N(0, 1/d); a canary that did take part leans towards the release.
Statistics, one number per canary:
  final       cos(c_i, sum of all releases): what the last model shows
  iterates    max over rounds of cos(c_i, release of that round): what somebody sees who keeps every model
  differences max over rounds of cos(c_i, release_t - release_{t-1}): not in the paper; noise used twice cancels here

Estimate (``estimate_final``, ``estimate_against``): fit normals to the canaries that took part and to those that did
not, and return the smallest epsilon at which the normals are (epsilon, delta)-indistinguishable in both directions.
Right for the Gaussian mechanism as k and d grow; NOT a bound, and biased upwards at small k, because any difference of
the two fitted spreads counts as leakage: at a true epsilon of 4.38 the middle 95% of estimates are 3.8 .. 9.3 (median
5.6) with k = 100, 4.2 .. 6.6 (5.1) with 300 and 4.2 .. 5.7 (4.7) with 1000. ``epsilon_equal_spread`` takes the two
spreads as equal, which one release of a Gaussian mechanism without sampling has: less scatter, one more assumption.

Bound (``epsilon_lower_final``): Clopper-Pearson on the participating canaries against the exact sphere null. It covers
the sampling error of the canaries, but takes their statistics as independent although they share one run; for a bound
without that assumption flip a coin per canary and use ``privacy.audit.one_run``.

Canaries occupy places of the population: count them in N, keep a canary run out of reported utility, and never ship its
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betainc, gammaln
from scipy.stats import beta, norm

from privacy import checks
from privacy.audit.bounds import DEFAULT_LEVELS, finite_scores, gdp_epsilon, open_unit_interval
from privacy.randomness.rng import simulation_generator

Vectors = NDArray[np.float32]
Floats = NDArray[np.float64]


def canary_updates(canaries: int, dim: int, bound: float, seed: int, *, start: int = 0) -> Vectors:
    """Rows start .. start + canaries - 1 of the canaries' updates: float32 [canaries, dim], each of L2 norm ``bound``.

    Row i depends on (seed, i) and dim only, so a client can make its own row, and rows past the participating ones
    serve as canaries that were never in the run. Memory 4 * canaries * dim bytes: ask for slices when that is too much.
    """
    checks.integer_at_least(1, canaries=canaries)
    checks.integer_at_least(2, dim=dim)
    checks.integer_at_least(0, start=start)
    checks.positive(bound=bound)
    rows = np.empty((canaries, dim), dtype=np.float32)
    for row in range(canaries):
        gaussian = simulation_generator(seed, "one-shot canary", start + row).standard_normal(dim)
        rows[row] = gaussian * (bound / np.linalg.norm(gaussian))
    return rows


def cosines(updates: Vectors, release: ArrayLike) -> Floats:
    """Cosine of every canary with one released vector: [canaries]; a zero release has cosine 0 with all of them."""
    vector = np.asarray(release, dtype=np.float32)
    if vector.ndim != 1 or updates.ndim != 2 or vector.shape[0] != updates.shape[1] or not np.isfinite(vector).all():
        raise ValueError(f"release must be a finite vector of length {updates.shape[-1]}, got shape {vector.shape}")
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if length == 0:
        return np.zeros(updates.shape[0])
    norms = np.linalg.norm(updates, axis=1).astype(np.float64)
    angles: Floats = (updates @ vector).astype(np.float64) / (norms * length)
    return angles


@dataclass(frozen=True)
class CosineStatistics:
    """What a run has shown of its canaries so far; feed every release to ``observe``, in order."""

    total: Floats
    previous: Floats | None
    iterates: Floats
    differences: Floats

    @classmethod
    def empty(cls, canaries: int, dim: int) -> "CosineStatistics":
        """Statistics of no release for this many canaries in R^dim; maxima start at -1, the least cosine."""
        return cls(np.zeros(dim), None, np.full(canaries, -1.0), np.full(canaries, -1.0))

    def observe(self, updates: Vectors, release: ArrayLike) -> "CosineStatistics":
        """Statistics after one more release (already noisy, so nothing here is private)."""
        vector = np.asarray(release, dtype=np.float64)
        differences = self.differences
        if self.previous is not None:
            differences = np.maximum(differences, cosines(updates, vector - self.previous))
        iterates = np.maximum(self.iterates, cosines(updates, vector))
        return CosineStatistics(self.total + vector, vector, iterates, differences)

    def final(self, updates: Vectors) -> Floats:
        """Cosine of every canary with the sum of the releases: [canaries]."""
        return cosines(updates, self.total)


def statistics(updates: Vectors, releases: Sequence[ArrayLike]) -> CosineStatistics:
    """``CosineStatistics`` of a list of releases, [dim] each."""
    state = CosineStatistics.empty(*updates.shape)
    for release in releases:
        state = state.observe(updates, release)
    return state


@dataclass(frozen=True)
class OneShotEstimate:
    """Estimates of epsilon at delta (not bounds) with the two fitted normals they rest on.

    epsilon: of the two normals as fitted, the paper's estimate. epsilon_equal_spread: as if both had ``std_out``.
    """

    epsilon: float
    epsilon_equal_spread: float
    delta: float
    canaries: int
    mean_in: float
    std_in: float
    mean_out: float
    std_out: float


def estimate_final(seen: ArrayLike, dim: int, delta: float) -> OneShotEstimate:
    """Estimate from the ``final`` statistic of the participating canaries against the known null N(0, 1/dim)."""
    values = _several("seen", seen)
    checks.integer_at_least(2, dim=dim)
    return _estimate(values, 0.0, dim**-0.5, delta)


def estimate_against(seen: ArrayLike, unseen: ArrayLike, delta: float) -> OneShotEstimate:
    """Estimate from any statistic of canaries in the run against the same statistic of fresh canaries that were not."""
    values, null = _several("seen", seen), _several("unseen", unseen)
    return _estimate(values, float(null.mean()), float(null.std(ddof=1)), delta)


def _estimate(values: Floats, mean_out: float, std_out: float, delta: float) -> OneShotEstimate:
    mean, std = float(values.mean()), float(values.std(ddof=1))
    epsilon = normals_epsilon(mean, std, mean_out, std_out, delta)
    equal = gdp_epsilon(abs(mean - mean_out) / std_out, delta)
    return OneShotEstimate(epsilon, equal, delta, values.size, mean, std, mean_out, std_out)


def normals_epsilon(mean_p: float, std_p: float, mean_q: float, std_q: float, delta: float) -> float:
    """Smallest epsilon >= 0 with hockey-stick divergence at most delta between two normals, in both directions."""
    checks.positive(std_p=std_p, std_q=std_q)
    open_unit_interval(delta=delta)

    def excess(epsilon: float) -> float:
        one = _hockey_stick(mean_p, std_p, mean_q, std_q, epsilon)
        return max(one, _hockey_stick(mean_q, std_q, mean_p, std_p, epsilon)) - delta

    if excess(0.0) <= 0:
        return 0.0
    upper = 1.0
    while excess(upper) > 0:
        upper *= 2
    return float(brentq(excess, upper / 2 if upper > 1 else 0.0, upper, xtol=1e-9))


def _hockey_stick(mean_p: float, std_p: float, mean_q: float, std_q: float, epsilon: float) -> float:
    """sup over sets of P(S) - e^epsilon Q(S), reached on {log p/q > epsilon}, where log p/q is a quadratic."""
    m, s = (mean_p - mean_q) / std_q, std_p / std_q  # in units where Q = N(0, 1) and P = N(m, s^2)
    # log p/q - epsilon = a x^2 + b x + c
    a, b, c = (1 - s**-2) / 2, m / s**2, -np.log(s) - (m / s) ** 2 / 2 - epsilon

    def gain(low: float, high: float) -> float:
        p = np.exp(_log_mass((low - m) / s, (high - m) / s))
        return float(p - np.exp(epsilon + _log_mass(low, high)))

    if abs(a) < 1e-12:
        if b == 0:
            return 0.0
        return gain(-c / b, np.inf) if b > 0 else gain(-np.inf, -c / b)
    discriminant = b * b - 4 * a * c
    if discriminant <= 0:
        return 0.0  # a > 0 cannot occur here: log p/q > epsilon >= 0 everywhere would make P heavier than 1
    # The root without cancellation first, the other one from their product c / a.
    root = -(b + np.copysign(np.sqrt(discriminant), b)) / 2
    low, high = sorted((root / a, c / root))
    return gain(low, high) if a < 0 else gain(-np.inf, low) + gain(high, np.inf)


def _log_mass(low: float, high: float) -> float:
    """log P[low < N(0, 1) < high], computed on the side where it does not cancel."""
    if low > 0:
        low, high = -high, -low
    if high <= 0:
        top, bottom = float(norm.logcdf(high)), float(norm.logcdf(low))
        return top + float(np.log1p(-np.exp(bottom - top))) if bottom < top else -np.inf
    return float(np.log1p(-min(1.0, float(norm.cdf(low) + norm.sf(high)))))


def log_sphere_tail(cosine: ArrayLike, dim: int) -> Floats:
    """log P[<c, u> >= cosine] for c uniform on the sphere of R^dim and any unit u: [..] of values <= 0.

    Exact (incomplete beta) where that does not underflow; below, the bound
    (1 - t^2)^((d-1)/2) Gamma(d/2) / (t (d-1) sqrt(pi) Gamma((d-1)/2)), from integrating x/t >= 1 under the density.
    """
    checks.integer_at_least(2, dim=dim)
    t = np.clip(np.asarray(cosine, dtype=np.float64), -1.0, 1.0)
    cap = betainc((dim - 1) / 2, 0.5, 1 - t**2) / 2
    size = np.abs(np.where(t == 0, 1.0, t))
    with np.errstate(divide="ignore"):
        far = (dim - 1) / 2 * np.log1p(-(size**2)) - np.log(size * (dim - 1) * np.sqrt(np.pi))
        far = far + gammaln(dim / 2) - gammaln((dim - 1) / 2)
        tail: Floats = np.where(t <= 0, np.log1p(-cap), np.where(cap > 1e-290, np.log(cap), far))
    return tail


def epsilon_lower_final(
    seen: ArrayLike, dim: int, *, delta: float, alpha: float, levels: Sequence[float] = DEFAULT_LEVELS
) -> float:
    """Lower bound of epsilon from the ``final`` statistic, if the canaries' statistics are independent (module text).

    Thresholds at order statistics of the seen canaries at ranks fixed in advance (``levels``: shares above the
    threshold); there the hit rate is Beta distributed and ``log_sphere_tail`` gives the false positive rate exactly.
    """
    values = np.sort(_several("seen", seen))
    checks.fraction(delta=delta)
    open_unit_interval(alpha=alpha)
    above = np.unique(np.clip((np.asarray(levels) * values.size).astype(np.int64), 1, values.size))
    thresholds = values[values.size - above]
    found = beta.ppf(alpha / above.size, above, values.size + 1 - above) - delta
    usable = found > 0
    if not usable.any():
        return 0.0
    return float(max(0.0, np.max(np.log(found[usable]) - log_sphere_tail(thresholds[usable], dim))))


def _several(name: str, values: ArrayLike) -> Floats:
    array = finite_scores(name, values)
    if array.size < 2:
        raise ValueError(f"{name} must hold at least 2 canaries to fit a normal, got {array.size}")
    return array
