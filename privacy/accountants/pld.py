"""Privacy loss distributions of a list of releases (dp_accounting), at a discretisation that fits the list.

All values are upper bounds at every interval ("connect the dots", pessimistic), so a coarse interval can only waste
budget. The waste falls with the square of the interval and grows with the number of releases (measured at rate 0.0005,
noise multiplier 8, a million rounds: epsilon 1.24 at 1e-3, 0.40 at 1e-4, 0.333 at 2e-5), hence :func:`refine`.

Discretisation is pessimistic, but floating point is not: raising a discrete Fourier transform to the T-th power
multiplies its relative rounding by T, and the tail of the composed distribution, hence delta, comes out wrong by up to
1.8e-16 T in either direction (measured against 80-bit transforms for 100 to a million releases; at T = 1000 and delta
1e-12 the library's epsilon is 0.003 BELOW the exact value of a composed Gaussian on one processor, and above it on
another, whose transforms round otherwise). So epsilon is taken at delta less
:func:`rounding_error`, more than twice that. Where the allowance exceeds half of delta, or delta is below 1e-12,
epsilon is infinite: it fails safe, and the RDP accountant still gives a bound.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import dp_accounting
from dp_accounting.pld import privacy_loss_distribution as dp_pld
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from privacy.accountants import mixture
from privacy.errors import UnsupportedEvent
from privacy.events import ExampleLevelPoisson, Poisson, Step

SMALLEST_DELTA = 1e-12
_ROUNDING = 4e-16  # of delta, per release
_ROUNDING_OF_A_MIXTURE = 2e-15  # further, more than twice what 50 digits say (measured for G up to 128)
_TOLERANCE = 1e-3
_MOST_POINTS = 4_000_000


def epsilon(steps: Sequence[Step], delta: float, adjacency: str, interval: float | None = None) -> float:
    """Epsilon of the composition of ``steps``; at the given interval, or refined until it stands still."""
    if delta < SMALLEST_DELTA or rounding_error(steps) > 0.5 * delta:
        return math.inf
    if interval is None:
        return refine(tuple(steps), delta, adjacency)[0]
    return _epsilon_at(tuple(steps), delta, adjacency, interval)


@lru_cache(maxsize=4096)
def _epsilon_at(steps: tuple[Step, ...], delta: float, adjacency: str, interval: float) -> float:
    return epsilon_of(compose(steps, adjacency, interval), delta, rounding_error(steps))


@lru_cache(maxsize=4096)
def refine(steps: tuple[Step, ...], delta: float, adjacency: str) -> tuple[float, float]:
    """Epsilon within about 0.1% of its limit, and the interval that gives it.

    The error at interval h is about a third of the change from 2h to h, and a 24th of the change from 5h to h. The
    refinement ends early where the composition would need more than four million points.
    """
    interval = first_interval(steps)
    allowance = rounding_error(steps)
    coarse = epsilon_of(compose(steps, adjacency, 2.0 * interval), delta, allowance)
    total = compose(steps, adjacency, interval)
    value = epsilon_of(total, delta, allowance)
    allowed = 3.0 * _TOLERANCE
    while coarse != value and abs(coarse - value) > allowed * value and 5 * _points(total) <= _MOST_POINTS:
        coarse = value
        interval /= 5.0
        total = compose(steps, adjacency, interval)
        value = min(value, epsilon_of(total, delta, allowance))
        allowed = 24.0 * _TOLERANCE
    return value, interval


def compose(steps: Sequence[Step], adjacency: str, interval: float) -> PrivacyLossDistribution:
    """The loss distribution of all steps together; each step is (sampling, noise multiplier > 0, count >= 1)."""
    return _composed(tuple(steps), adjacency, interval)


@lru_cache(maxsize=4)  # few: each may hold four million points
def _composed(steps: tuple[Step, ...], adjacency: str, interval: float) -> PrivacyLossDistribution:
    total: PrivacyLossDistribution | None = None
    for sampling, multiplier, count in steps:
        part = compose_equal(sampling, multiplier, count, adjacency, interval)
        total = part if total is None else total.compose(part)
    return dp_pld.identity(interval) if total is None else total


def compose_equal(
    sampling: Poisson, multiplier: float, count: int, adjacency: str, interval: float
) -> PrivacyLossDistribution:
    """The loss distribution of ``count`` equal releases."""
    if sampling.rate == 1.0 and type(sampling) is Poisson:
        # Unsampled Gaussians compose exactly into one of noise multiplier z / sqrt(count).
        return _single(sampling, multiplier / math.sqrt(count), adjacency, interval)
    one = _single(sampling, multiplier, adjacency, interval)
    return one if count == 1 else one.self_compose(count)


def epsilon_of(distribution: PrivacyLossDistribution, delta: float, allowance: float = 0.0) -> float:
    """Epsilon at ``delta`` less ``allowance``, at least 0; infinite if there is none, or the allowance is too large."""
    if delta < SMALLEST_DELTA or allowance > 0.5 * delta:
        return math.inf
    return max(0.0, float(distribution.get_epsilon_for_delta(delta - allowance)))


def rounding_error(steps: Sequence[Step]) -> float:
    """An upper bound on what floating point may take off delta in the composition of ``steps``."""
    own = (_ROUNDING_OF_A_MIXTURE if isinstance(one, ExampleLevelPoisson) else 0.0 for one, _, _ in steps)
    return sum((_ROUNDING + more) * (count + 10) for more, (_, _, count) in zip(own, steps, strict=True))


def _single(sampling: Poisson, multiplier: float, adjacency: str, interval: float) -> PrivacyLossDistribution:
    if isinstance(sampling, ExampleLevelPoisson):
        if adjacency != "add_remove":
            raise UnsupportedEvent(
                f"sampling of records is accounted under 'add_remove' only, got {adjacency!r}; sample units instead"
            )
        return mixture.one_release(sampling, multiplier, interval)
    return _gaussian(sampling, multiplier, adjacency, interval)


@lru_cache(maxsize=16)
def _gaussian(sampling: Poisson, multiplier: float, adjacency: str, interval: float) -> PrivacyLossDistribution:
    relation = dp_accounting.NeighboringRelation
    return dp_pld.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=interval,
        sampling_prob=sampling.rate,
        neighboring_relation=relation.REPLACE_ONE if adjacency == "replace_one" else relation.ADD_OR_REMOVE_ONE,
    )


def first_interval(steps: Sequence[Step]) -> float:
    """A discretisation that is fine enough for most runs and costs at most seconds.

    One release of noise multiplier z spreads its losses over about 10/z + 1/(2 z^2) on either side of zero. An interval
    of 1e-3 makes that 5e4 points at z = 0.22. Weaker noise is discretised more coarsely, and so is a
    schedule of more than 20 different steps, each of which is discretised by itself. Where records are sampled, noise
    is weaker by how many of a unit may come together.
    """
    least = min(multiplier / _usual_rows(sampling) for sampling, multiplier, _ in steps)
    spread = 10.0 / least + 0.5 / least**2
    return 1e-3 * max(1.0, spread / 50.0) * min(5.0, max(1.0, len(steps) / 20.0))


def _usual_rows(sampling: Poisson) -> float:
    return mixture.usual_rows(sampling) if isinstance(sampling, ExampleLevelPoisson) else 1.0


def _points(distribution: PrivacyLossDistribution) -> int:
    # dp_accounting offers no public size; it bounds memory here, nothing of the guarantee.
    return int(distribution._pmf_remove.size)
