"""The least noise for a target epsilon, and the commitments that keep it.

Noise multipliers are rounded UP to four decimals, and the value returned has been accounted as it stands: its epsilon
is at most the target.

The search works on log z against epsilon, where the curve is nearly straight: an integer-order Rényi bound gives a
first guess that is a few percent too large, and a handful of loss distributions find the rest.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from scipy.optimize import brentq

from privacy import checks
from privacy.accountants import composition, pld, renyi
from privacy.commitment import WEAKEST_NOISE_MULTIPLIER, Commitment, FloorStep
from privacy.events import (
    BufferedToeplitz,
    Correlation,
    CyclicPoisson,
    ExampleLevelPoisson,
    NoiseShares,
    Poisson,
    ReleaseEvent,
    Step,
    effective_noise_multiplier,
    seen_by_one_unit,
)

LARGEST = 1e6
_GRID = 1e-4
_GUESS_ORDERS = (2, 3, 4, 5, 6, 8, 10, 13, 17, 24, 32, 64, 128)
_FILTER_ORDERS = range(2, 257)

Extra: TypeAlias = Sequence[Step | FloorStep | ReleaseEvent]
Queries: TypeAlias = Sequence[float] | Callable[[float], float]


def calibrate(
    epsilon: float,
    delta: float,
    sampling: Poisson | Sequence[Poisson],
    rounds: int,
    *,
    extra: Extra = (),
    queries: Queries = (),
    profile: Sequence[float] | None = None,
    adjacency: str = "add_remove",
    accountant: str | None = None,
    force: bool = False,
    correlation: Correlation | None = None,
) -> float:
    """Least noise multiplier of the update, rounded up to 1e-4, for which the whole run costs at most ``epsilon``.

    Args:
        epsilon: the target, > 0.
        delta: in (0, 1).
        sampling: how each round draws its cohort; one for all rounds, or one per round. Cyclic sampling is one for all.
        rounds: number of rounds, >= 1.
        extra: other releases of the run (an initial histogram), as events, floor steps or (sampling, z, count).
        queries: what is released beside the update on the same cohort: noise multipliers ``s_j/S_j`` of the further
            components of the joint Gaussian, or a function from the update's multiplier to the effective one.
        profile: relative noise of each round, > 0: round t has multiplier ``z * profile[t]``, its queries unchanged.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        accountant: ``"pld"`` or ``"rdp"``; None takes PLD, or RDP where PLD has no bound
            (a delta too small for it).
        force: return a multiplier below 0.3 too, although one release at that noise protects no one.
        correlation: how the noise of the rounds hangs together, which needs cyclic sampling; None if it does not.

    Raises:
        ValueError: a bad argument; the extra releases and queries alone exceed the target; or the target is so large
            that less noise than 0.3 would do.
        UnsupportedEvent: the accountant cannot bound this sampling under this adjacency.
    """
    checks.positive(epsilon=epsilon, delta=delta)
    checks.integer_at_least(1, rounds=rounds)
    if isinstance(sampling, CyclicPoisson):
        if profile is not None and len(set(profile)) > 1:
            raise ValueError("profile must be flat with cyclic sampling; the noise of all rounds hangs together")
        if queries and isinstance(correlation, BufferedToeplitz):
            raise ValueError("queries must be empty with buffered Toeplitz noise, got some; release the update alone")
        # By its share of the noise a unit's looks at the run become steps of independent noise.
        level = 1.0 if profile is None else profile[0]
        sampling, share, rounds = seen_by_one_unit(sampling, level, rounds, correlation)
        profile = [share] * rounds
    elif correlation is not None:
        raise ValueError("sampling must be one CyclicPoisson for all rounds with correlated noise, got another")
    run = NoiseSearch(
        epsilon, delta, _per_round(sampling, rounds), tuple(extra), queries, _shape(profile, rounds), adjacency
    )
    if accountant is None:
        accountant = "rdp" if run.beyond_pld() else "pld"
    checks.one_of(composition.ACCOUNTANTS, accountant=accountant)
    run.refuse_impossible(accountant)
    if not force:
        run.refuse_weak(accountant)
    z = _GRID * math.ceil(run.root(accountant) / _GRID * (1.0 - 1e-9))
    while run.epsilon(z, accountant) > epsilon:
        z += _GRID
    return round(z, 4)


def floor_commitment(
    epsilon: float,
    delta: float,
    sampling: Poisson | Sequence[Poisson],
    rounds: int,
    *,
    label: str = "round",
    extra: Sequence[FloorStep] = (),
    queries: Queries = (),
    profile: Sequence[float] | None = None,
    adjacency: str = "add_remove",
    correlation: Correlation | None = None,
) -> tuple[Commitment, float]:
    """Calibrate, and commit to the result: the commitment in floor mode and the multiplier of the update.

    The committed steps are those of ``extra`` and then one per run of equal rounds, at the effective noise multiplier.
    ``correlation`` of the noise needs cyclic sampling. Other arguments and errors as for :func:`calibrate`.
    """
    z = calibrate(
        epsilon,
        delta,
        sampling,
        rounds,
        extra=extra,
        queries=queries,
        profile=profile,
        adjacency=adjacency,
        correlation=correlation,
    )
    samplings = _per_round(sampling, rounds)
    steps = [
        (one, _effective(z * share, queries)) for one, share in zip(samplings, _shape(profile, rounds), strict=True)
    ]
    floor = [
        FloorStep(label, one, multiplier, len(list(same)), correlation) for (one, multiplier), same in groupby(steps)
    ]
    unit, population = samplings[0].unit, samplings[0].population
    return Commitment(unit, adjacency, population, epsilon, delta, "floor", (*extra, *floor)), z


def filter_commitment(
    epsilon: float,
    delta: float,
    sampling: Poisson,
    rounds: int,
    *,
    extra: Extra = (),
    profile: Sequence[float] | None = None,
    adjacency: str = "add_remove",
    noise_shares: NoiseShares | None = None,
) -> tuple[Commitment, float]:
    """Commit to a Rényi filter: the integer order at which the planned spending needs the least noise.

    Returns:
        The commitment in filter mode, and the effective noise multiplier z (rounded up to 1e-4) at which ``rounds``
        rounds of z times their share in ``profile`` (1 without one) just fit after ``extra``. A controller may spend
        otherwise; the filter holds whatever it does.

    Raises:
        ValueError: no order can pay for ``extra``.
        UnsupportedEvent: no Rényi bound is known for this sampling under this adjacency.
    """
    checks.positive(epsilon=epsilon, delta=delta)
    checks.integer_at_least(1, rounds=rounds)
    fixed = composition.merge_steps(extra)
    shares = Counter(_shape(profile, rounds))
    best: tuple[float, int, float] | None = None
    for order in _FILTER_ORDERS:
        rho = renyi.rho_budget(epsilon, order, delta)
        left = rho - sum(count * renyi.rho_of(one, z, order, adjacency) for one, z, count in fixed)
        if left <= 0.0:
            continue

        def excess(log_z: float, order: int = order, left: float = left) -> float:
            z = math.exp(log_z)
            needed = sum(n * renyi.rho_of(sampling, z * share, order, adjacency) for share, n in shares.items())
            return math.log(needed / left)

        # Once an order needs more than the best, so do all larger ones: the needed noise is unimodal in the order.
        if best is not None and excess(math.log(best[0])) > 0.0:
            break
        z = math.exp(float(brentq(excess, math.log(1e-2), math.log(LARGEST), xtol=1e-9)))
        best = (z, order, rho)
    if best is None:
        raise ValueError(f"epsilon must be large enough to pay for {len(fixed)} extra releases, got {epsilon:g}")
    commitment = Commitment(
        sampling.unit,
        adjacency,
        sampling.population,
        epsilon,
        delta,
        "filter",
        order=best[1],
        rho=best[2],
        noise_shares=noise_shares,
    )
    return commitment, round(_GRID * math.ceil(best[0] / _GRID), 4)


@dataclass(frozen=True)
class NoiseSearch:
    """All releases of a run as a function of the update's noise multiplier."""

    target: float
    delta: float
    samplings: Sequence[Poisson]
    extra: tuple[Step | FloorStep | ReleaseEvent, ...]
    queries: Queries
    profile: Sequence[float]
    adjacency: str

    def steps(self, z: float) -> list[Step | FloorStep | ReleaseEvent]:
        """Everything the run releases if its update has multiplier ``z``."""
        rounds = zip(self.samplings, self.profile, strict=True)
        return [*self.extra, *((one, _effective(z * share, self.queries), 1) for one, share in rounds)]

    def epsilon(self, z: float, accountant: str, interval: float | None = None) -> float:
        """Compute the epsilon of everything the run releases if its update has multiplier ``z``."""
        return composition.epsilon(self.steps(z), self.delta, accountant, adjacency=self.adjacency, interval=interval)

    def beyond_pld(self) -> bool:
        """Whether delta is too small for floating-point loss distributions of this run."""
        allowance = pld.rounding_error(composition.merge_steps(self.steps(1.0)))
        return self.delta < pld.SMALLEST_DELTA or allowance > 0.5 * self.delta

    def refuse_impossible(self, accountant: str) -> None:
        """Raise ValueError if what is released beside the update exceeds the target alone."""
        limit = self.epsilon(LARGEST, accountant) if self.extra or self.queries else 0.0
        if limit >= self.target:
            raise ValueError(
                f"epsilon must be > {limit:.4g}, which the extra releases and queries cost without any update, got "
                f"{self.target:g}; give them more noise"
            )

    def refuse_weak(self, accountant: str) -> None:
        """Raise ValueError if the target needs less noise than protects anyone."""
        if self.guess() * min(self.profile) > 1.5 * WEAKEST_NOISE_MULTIPLIER:
            return
        reached = self.epsilon(WEAKEST_NOISE_MULTIPLIER / min(self.profile), accountant)
        if reached < self.target:
            raise ValueError(
                f"epsilon must be <= {reached:.4g}, got {self.target:g}, for which less noise than a multiplier of "
                f"{WEAKEST_NOISE_MULTIPLIER} would do: that protects no one; lower epsilon, or plan more "
                "rounds or a higher sampling rate"
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
        steps = composition.merge_steps(self.steps(z))
        if len(steps) > 20:
            return 2.0 * pld.first_interval(steps)
        return pld.refine(steps, self.delta, self.adjacency)[1]

    def guess(self) -> float:
        """Guess slightly too much noise, by integer-order Rényi divergences of the rounds under Poisson sampling."""
        squeezed = math.sqrt(len(self.profile) / sum(share**-2 for share in self.profile))
        rate, rows = max((_as_one_row(one) for one in self.samplings), key=math.prod)
        squeezed /= rows

        def excess(log_z: float) -> float:
            rho = [len(self.samplings) * renyi.subsampled_gaussian_rdp(rate, math.exp(log_z), a) for a in _GUESS_ORDERS]
            found = [renyi.epsilon_of(r, a, self.delta) for r, a in zip(rho, _GUESS_ORDERS, strict=True)]
            return min(found) - self.target

        lowest, highest = math.log(0.05), math.log(LARGEST)
        if excess(lowest) <= 0.0:
            return math.exp(lowest) / squeezed
        if excess(highest) >= 0.0:
            return 1.0 / squeezed
        return math.exp(float(brentq(excess, lowest, highest, xtol=1e-3))) / squeezed


def _as_one_row(sampling: Poisson) -> tuple[float, float]:
    """How often a unit joins, and with how many rows on average when it does: where the search begins."""
    if not isinstance(sampling, ExampleLevelPoisson):
        return sampling.expected_units / sampling.population, 1.0
    rate = -math.expm1(sampling.records_per_unit * math.log1p(-sampling.rate)) if sampling.rate < 1.0 else 1.0
    return rate, sampling.records_per_unit * sampling.rate / rate


def _effective(z: float, queries: Queries) -> float:
    """Effective noise multiplier of an update at ``z`` beside its queries."""
    if isinstance(queries, Sequence):
        return effective_noise_multiplier((1.0, z), *((1.0, float(other)) for other in queries))
    return float(queries(z))


def _per_round(sampling: Poisson | Sequence[Poisson], rounds: int) -> Sequence[Poisson]:
    if not isinstance(sampling, Sequence):
        return [sampling] * rounds
    if len(sampling) != rounds:
        raise ValueError(f"sampling must be one, or one per round ({rounds}), got {len(sampling)}")
    return sampling


def _shape(profile: Sequence[float] | None, rounds: int) -> Sequence[float]:
    if profile is None:
        return [1.0] * rounds
    if len(profile) != rounds:
        raise ValueError(f"profile must hold one relative multiplier per round ({rounds}), got {len(profile)}")
    for share in profile:
        checks.positive(profile=share)
    return profile
