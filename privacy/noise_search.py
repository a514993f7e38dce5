"""The search behind calibration: the noise multiplier at which a whole run costs exactly its target.

It works on log z against epsilon, where the curve is nearly straight: an integer-order Rényi bound gives a first guess
that is a few percent too large, and a handful of loss distributions find the rest.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from scipy.optimize import brentq

from privacy import accountants, loss_distributions, renyi
from privacy.accountants import Step
from privacy.commitment import WEAKEST_NOISE_MULTIPLIER, FloorStep
from privacy.events import ReleaseEvent, Sampling

LARGEST = 1e6
_ORDERS = (2, 3, 4, 5, 6, 8, 10, 13, 17, 24, 32, 64, 128)

Extra: TypeAlias = Sequence[Step | FloorStep | ReleaseEvent]
Queries: TypeAlias = Sequence[float] | Callable[[float], float]


class NoiseSearch:
    """All releases of a run as a function of the update's noise multiplier."""

    def __init__(
        self,
        target: float,
        delta: float,
        samplings: Sequence[Sampling],
        extra: tuple[Step | FloorStep | ReleaseEvent, ...],
        queries: Queries,
        profile: Sequence[float],
        adjacency: str,
    ) -> None:
        self.target = target
        self.delta = delta
        self.samplings = samplings
        self._extra = extra
        self._queries = queries
        self._profile = profile
        self._adjacency = adjacency

    def steps(self, z: float) -> list[Step | FloorStep | ReleaseEvent]:
        """Everything the run releases if its update has multiplier ``z``."""
        rounds = zip(self.samplings, self._profile, strict=True)
        return [*self._extra, *((one, effective(z * share, self._queries), 1) for one, share in rounds)]

    def epsilon(self, z: float, accountant: str, interval: float | None = None) -> float:
        """What that costs."""
        return accountants.epsilon(self.steps(z), self.delta, accountant, adjacency=self._adjacency, interval=interval)

    def beyond_pld(self) -> bool:
        """Whether delta is too small for floating-point loss distributions of this run."""
        allowance = loss_distributions.rounding(accountants.merged(self.steps(1.0)))
        return self.delta < loss_distributions.SMALLEST_DELTA or allowance > 0.5 * self.delta

    def refuse_impossible(self, accountant: str) -> None:
        """ValueError if what is released beside the update exceeds the target alone."""
        limit = self.epsilon(LARGEST, accountant) if self._extra or self._queries else 0.0
        if limit >= self.target:
            raise ValueError(
                f"epsilon must be > {limit:.4g}, which the extra releases and queries cost without any update, got "
                f"{self.target:g}; give them more noise"
            )

    def refuse_weak(self, accountant: str) -> None:
        """ValueError if the target needs less noise than protects anyone."""
        if self.guess() > 1.5 * WEAKEST_NOISE_MULTIPLIER:
            return
        reached = self.epsilon(WEAKEST_NOISE_MULTIPLIER / min(self._profile), accountant)
        if reached < self.target:
            raise ValueError(
                f"epsilon must be <= {reached:.4g}, got {self.target:g}, for which less noise than a multiplier of "
                f"{WEAKEST_NOISE_MULTIPLIER} would do: that protects no one; lower epsilon, or sample or train less"
            )

    def root(self, accountant: str) -> float:
        """The multiplier that meets the target, to about 1e-4; ValueError if there is none below a million."""
        start = self.guess()
        if accountant != "pld":
            return self._solve(start, accountant, None)
        # The interval that suits the first guess may be too coarse at the answer, above all for a tiny epsilon.
        interval = self._search_interval(start)
        while True:
            z = self._solve(start, accountant, interval)
            needed = self._search_interval(z)
            if needed >= interval:
                return z
            start, interval = z, needed

    def _solve(self, start: float, accountant: str, interval: float | None) -> float:
        def excess(log_z: float) -> float:
            return min(self.epsilon(math.exp(log_z), accountant, interval) / self.target, 1e6) - 1.0

        high = math.log(start)
        step = 0.1
        while excess(high) > 0.0:
            if high > math.log(LARGEST):
                raise ValueError(
                    f"epsilon must be large enough to be reached with a noise multiplier of {LARGEST:g} by accountant "
                    f"{accountant!r}, got {self.target:g} at delta {self.delta:g}"
                )
            high += step
            step *= 2.0
        low, step = high - 0.1, 0.1
        while excess(low) < 0.0:
            high, low = low, low - step
            step *= 2.0
        return math.exp(float(brentq(excess, low, high, xtol=5e-5)))

    def _search_interval(self, z: float) -> float:
        """The discretisation that accounting would choose near the answer, chosen once.

        A schedule of many different steps takes seconds to account; the search then makes do with a coarser one,
        whose answer is at most a few tenths of a percent too large.
        """
        steps = accountants.merged(self.steps(z))
        if len(steps) > 20:
            return 2.0 * loss_distributions.first_interval(steps)
        return loss_distributions.refine(steps, self.delta, self._adjacency)[1]

    def guess(self) -> float:
        """Slightly too much noise, by integer-order Rényi divergences of the rounds under Poisson sampling."""
        squeezed = math.sqrt(len(self._profile) / sum(share**-2 for share in self._profile))
        rate = max(one.expected_units / one.population for one in self.samplings)

        def excess(log_z: float) -> float:
            rho = [len(self.samplings) * renyi.subsampled_gaussian_rdp(rate, math.exp(log_z), a) for a in _ORDERS]
            found = [renyi.epsilon_of(r, a, self.delta) for r, a in zip(rho, _ORDERS, strict=True)]
            return min(found) - self.target

        lowest, highest = math.log(0.05), math.log(LARGEST)
        if excess(lowest) <= 0.0:
            return math.exp(lowest) / squeezed
        if excess(highest) >= 0.0:
            return 1.0 / squeezed
        return math.exp(float(brentq(excess, lowest, highest, xtol=1e-3))) / squeezed


def effective(z: float, queries: Queries) -> float:
    """Noise multiplier of the joint Gaussian of an update at ``z`` and its queries."""
    if isinstance(queries, Sequence):
        return 1.0 / math.hypot(1.0 / z, *(1.0 / float(other) for other in queries))
    return float(queries(z))
