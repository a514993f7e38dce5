"""The least noise for a promised epsilon, and the commitments that promise it.

Noise multipliers are rounded UP to four decimals, and the value returned has been accounted as it stands: its epsilon
is at most the target.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from scipy.optimize import brentq

from privacy import accountants, checks, renyi
from privacy.commitment import Commitment, FloorStep
from privacy.distributed_noise import NoiseShares
from privacy.events import FixedSize, Sampling
from privacy.noise_search import LARGEST, Extra, NoiseSearch, Queries, effective

_GRID = 1e-4
_FILTER_ORDERS = range(2, 257)


def calibrate(
    epsilon: float,
    delta: float,
    sampling: Sampling | Sequence[Sampling],
    rounds: int,
    *,
    extra: Extra = (),
    queries: Queries = (),
    profile: Sequence[float] | None = None,
    adjacency: str = "add_remove",
    accountant: str | None = None,
    force: bool = False,
) -> float:
    """Least noise multiplier of the update, rounded up to 1e-4, for which the whole run costs at most ``epsilon``.

    Args:
        epsilon: the target, > 0.
        delta: in (0, 1).
        sampling: how each round draws its cohort; one for all rounds, or one per round.
        rounds: number of rounds, >= 1.
        extra: other releases of the run (an initial histogram), as events, floor steps or (sampling, z, count).
        queries: what is released beside the update on the same cohort: noise multipliers ``s_j/S_j`` of the further
            components of the joint Gaussian, or a function from the update's multiplier to the effective one.
        profile: relative noise of each round, > 0: round t has multiplier ``z * profile[t]``, its queries unchanged.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        accountant: a bound, ``"pld"``, ``"rdp"`` or ``"prv"``; None takes PLD, or RDP where PLD has no bound
            (fixed-size sampling, a delta too small for it).
        force: return a multiplier below 0.3 too, although one release at that noise protects no one.

    Raises:
        ValueError: a bad argument; the extra releases and queries alone exceed the target; or the target is so large
            that less noise than 0.3 would do.
        UnsupportedEvent: the accountant cannot bound this sampling under this adjacency.
    """
    checks.positive(epsilon=epsilon, delta=delta)
    checks.integer_at_least(1, rounds=rounds)
    run = NoiseSearch(
        epsilon, delta, _per_round(sampling, rounds), tuple(extra), queries, _shape(profile, rounds), adjacency
    )
    if accountant is None:
        beyond_pld = run.beyond_pld() or any(isinstance(one, FixedSize) for one in run.samplings)
        accountant = "rdp" if beyond_pld else "pld"
    checks.one_of(accountants.BOUNDS, accountant=accountant, remedy="only a bound can calibrate noise")
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
    sampling: Sampling | Sequence[Sampling],
    rounds: int,
    *,
    label: str = "round",
    extra: Sequence[FloorStep] = (),
    queries: Queries = (),
    profile: Sequence[float] | None = None,
    adjacency: str = "add_remove",
) -> tuple[Commitment, float]:
    """Calibrate, and commit to the result: the commitment in floor mode and the multiplier of the update.

    The committed steps are those of ``extra`` and then one per run of equal rounds, at the effective multiplier.
    Arguments and errors as for :func:`calibrate`.
    """
    z = calibrate(epsilon, delta, sampling, rounds, extra=extra, queries=queries, profile=profile, adjacency=adjacency)
    samplings = _per_round(sampling, rounds)
    steps = [
        (one, effective(z * share, queries)) for one, share in zip(samplings, _shape(profile, rounds), strict=True)
    ]
    floor = [FloorStep(label, one, multiplier, len(list(same))) for (one, multiplier), same in groupby(steps)]
    unit, population = samplings[0].unit, samplings[0].population
    return Commitment(unit, adjacency, population, epsilon, delta, "floor", (*extra, *floor)), z


def filter_commitment(
    epsilon: float,
    delta: float,
    sampling: Sampling,
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
    fixed = accountants.merged(extra)
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


def _per_round(sampling: Sampling | Sequence[Sampling], rounds: int) -> Sequence[Sampling]:
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
