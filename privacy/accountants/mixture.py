r"""Loss distributions of releases that sample records where units are protected: mixtures of Gaussians.

One unit's presence moves the sum by a vector of length at most K, K ~ Binomial(G, q): it has G records at most, each of
which joins by itself with probability q, and each joint row has length 1 in units of the noise z. All pairs of
neighbours are dominated, in both directions, by the pair on the line

    P = sum_{k=0}^{G} Binomial(k; G, q) N(k, z^2),        Q = N(0, z^2)

(Choquette-Choo, Ganesh, Steinke, Thakurta, arXiv 2310.15526, Corollary 4.7: replacing vectors by their lengths; Charles
et al., arXiv 2407.07737: example-level sampling). Fewer than G records, or shorter rows, are a mixture that
this one dominates too. G = 1 is the Poisson-sampled Gaussian; to charge a record's epsilon to a unit would be wrong by
up to a factor of G and more, and its group privacy would waste most of the budget.

dp_accounting has the same distribution (``from_mixture_gaussian_mechanism``), but inverts the loss one point after the
other, which takes ten to a hundred times as long as all else (measured: 16 s for G = 4, z = 1 at an interval of 1e-3),
and takes the divergence to be zero at points within 1e-5 of the largest loss. So the divergences are computed here, all
points at once, and dp_accounting makes of them its pessimistic "connect the dots" distribution, which it composes.

Guarantee: an upper bound up to floating point, for which ``pld.rounding`` allows. delta(e) is the supremum over
thresholds x of P(X > x) - exp(e) Q(X > x), so an error dx of a threshold makes delta too small by O(dx^2) only, and
Newton steps leave dx at the last digits.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from jaxtyping import Float64
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp, ndtr
from scipy.stats import binom

from privacy.events import ExampleLevelPoisson

_TAIL = 1e-22  # mass of P or Q that is moved to the ends of the grid, to the safe side
_REACH = 9.8  # standard deviations beyond which a Gaussian has less
_FURTHEST = 40.0  # where all thresholds lie: a Gaussian's mass beyond is zero in floating point
_TABLE = 20_000
_AT_ONCE = 2_000_000

Vector = Float64[np.ndarray, " n"]


@lru_cache(maxsize=16)
def one_release(sampling: ExampleLevelPoisson, multiplier: float, interval: float) -> PrivacyLossDistribution:
    """The loss distribution of one release, add or remove one unit.

    Args:
        sampling: gives G and q.
        multiplier: z, noise over the sensitivity of ONE row.
        interval: discretisation of the losses.
    """
    mixture = Mixture(sampling.records_per_unit, sampling.rate, multiplier)
    return PrivacyLossDistribution(mixture.pmf(interval, remove=True), mixture.pmf(interval, remove=False))


def usual_rows(sampling: ExampleLevelPoisson) -> float:
    """The most rows of one unit that join, but for a probability of 1e-10: it sets how finely to discretise."""
    return float(max(1.0, binom.isf(1e-10, sampling.records_per_unit, sampling.rate)))


class Mixture:
    """The pair of distributions P and Q of the module's formula, whose loss is log P/Q."""

    def __init__(self, most: int, rate: float, multiplier: float) -> None:
        rows = np.arange(most + 1, dtype=np.float64)
        log_weight = binom.logpmf(rows, most, rate)
        some = np.isfinite(log_weight)
        self.rows, self.z = rows[some], multiplier
        self.log_weight = log_weight[some] - logsumexp(log_weight[some])
        self.weight = np.exp(self.log_weight)
        self.offset = self.log_weight - 0.5 * (self.rows / multiplier) ** 2
        self.furthest = float(brentq(lambda x: self._above(np.array([x]))[0] - _TAIL, 0.0, self._end(_REACH)))

    def pmf(self, interval: float, *, remove: bool) -> pld_pmf.PLDPmf:
        """The probabilities of log P/Q under P (remove), or of log Q/P under Q (add)."""
        low, high = -_REACH * self.z, self.furthest if remove else _REACH * self.z
        ends = self.loss(np.array([low, high]))
        first, last = (ends[0], ends[1]) if remove else (-ends[1], -ends[0])
        lowest, highest = int(np.floor(first / interval)), int(np.ceil(last / interval))
        epsilons = np.arange(lowest, highest + 1) * interval
        deltas = self.deltas(epsilons, remove=remove)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lowest, highest, deltas)

    def deltas(self, epsilons: Vector, *, remove: bool) -> Vector:
        """The hockey-stick divergence at every epsilon, which must increase."""
        x = self.threshold(epsilons if remove else -epsilons)
        if remove:
            found = self._above(x) - _exp(epsilons + log_ndtr(-x / self.z))
        else:
            with np.errstate(divide="ignore"):  # a sum that underflows counts as none: delta is then too large
                found = ndtr(x / self.z) - _exp(epsilons + np.log(self._below(x)))
        least = np.maximum(0.0, -np.expm1(np.minimum(epsilons, 0.0)))
        falling: Vector = np.maximum.accumulate(np.clip(np.maximum(found, least), 0.0, 1.0)[::-1])[::-1]
        return falling

    def loss(self, x: Vector) -> Vector:
        """The privacy loss log P(x)/Q(x): convex, and increasing."""
        return self._summed(x, lambda part: logsumexp(self._exponents(part), axis=1))

    def threshold(self, losses: Vector) -> Vector:
        """Points at which the loss has these values; the end of the range where it has no such value."""
        table = np.linspace(-_FURTHEST * self.z, self._end(_FURTHEST), _TABLE)
        values = self.loss(table)
        cell = np.clip(np.searchsorted(values, losses), 1, _TABLE - 1)
        left, right = table[cell - 1], table[cell]
        x: Vector
        with np.errstate(divide="ignore", invalid="ignore"):
            x = left + (losses - values[cell - 1]) / (values[cell] - values[cell - 1]) * (right - left)
            x = np.where(np.isfinite(x), np.clip(x, left, right), right)
            for _ in range(3):
                step = (losses - self.loss(x)) / self._slope(x)
                x = np.clip(np.where(np.isfinite(step), x + step, x), left, right)
        return x

    def _end(self, deviations: float) -> float:
        return float(self.rows[-1]) + deviations * self.z

    def _exponents(self, x: Vector) -> Float64[np.ndarray, "n rows"]:
        exponents: Float64[np.ndarray, "n rows"] = self.offset + np.multiply.outer(x, self.rows / self.z**2)
        return exponents

    def _slope(self, x: Vector) -> Vector:
        def mean(part: Vector) -> Vector:
            exponents = self._exponents(part)
            shares = np.exp(exponents - exponents.max(axis=1, keepdims=True))
            return np.asarray(shares @ self.rows / shares.sum(axis=1))

        return np.asarray(self._summed(x, mean) / self.z**2)

    def _above(self, x: Vector) -> Vector:
        """P(X > x)."""
        return self._summed(x, lambda part: ndtr(np.subtract.outer(-part, -self.rows) / self.z) @ self.weight)

    def _below(self, x: Vector) -> Vector:
        """P(X <= x)."""
        return self._summed(x, lambda part: ndtr(np.subtract.outer(part, self.rows) / self.z) @ self.weight)

    def _summed(self, x: Vector, over_rows: Callable[[Vector], Vector]) -> Vector:
        """What a function of points gives, a bounded number of them at a time."""
        pieces = np.array_split(x, 1 + len(x) * len(self.rows) // _AT_ONCE)
        return np.concatenate([over_rows(piece) for piece in pieces])


def _exp(exponents: Vector) -> Vector:
    """exp(e) Q(X > x), which is at most P(X > x) at the threshold of e; where there is no threshold delta is 0."""
    return np.asarray(np.exp(np.minimum(exponents, 0.0)))
