"""Two-world test: run a whole release path many times with one extra unit and many times without it, and try to tell.

    H0: the path is (1/z)-GDP with respect to one unit, z being the effective noise multiplier written in the ledger
    world 0: the honest units; world 1: the honest units plus a canary made to be as visible as the path allows
    score: projection of the release on the direction in which the canary must move it
    FAIL iff mu_lower(scores_1, scores_0; alpha) > 1/z

The path is a black box ``rows -> released vector``, so the test covers everything in it: clipping, weighting,
summation, noise scale, divisor, and whatever a caller wrapped around it. With R = 1000 runs per world and alpha = 1e-3
a correct path fails at most once in a thousand tests. The power depends on the audited z (``detectable_mu``): at
z = 1/2 a path with 0.83 of its noise is found half the time, at z = 1 with 0.75, at z = 4 with 0.45. The code under
test is the same for every z, so audit at a small one.

It tests ONE release on a known cohort, hence without amplification by sampling; that is what the claim 1/z is about. A
divisor that follows the realised cohort passes here, because its leak is small at one release: it is caught by the
deterministic test that the scale of the output does not depend on the cohort.

Nasr et al., "Tight auditing of differentially private machine learning", arXiv:2302.07956, for the Gaussian form of the
bound. Guarantee: none. A PASS says that this attacker with this canary did not refute the claim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from privacy import checks
from privacy.audit.bounds import (
    epsilon_lower_clopper_pearson,
    gdp_epsilon,
    mu_ceiling,
    mu_estimate,
    mu_lower,
    open_unit_interval,
)

Rows = Tensor  # [units, params], one row per unit: what the engine hands to ``contribute``
Released = Tensor  # [params] or any fixed-length vector of released numbers
ReleasePath = Callable[[Rows], Released]

DEFAULT_REPETITIONS = 1000
DEFAULT_ALPHA = 1e-3


@dataclass(frozen=True)
class TwoWorldAudit:
    """Outcome of a two-world test.

    claimed_mu: 1 / effective noise multiplier, the hypothesis.
    mu_lower, mu_estimate: bound at level 1 - alpha, and plain estimate, of the mu that the path really has.
    epsilon_*: the same at ``delta``; epsilon_lower_clopper_pearson holds for any mechanism, the others for a Gaussian.
    """

    claimed_mu: float
    mu_lower: float
    mu_estimate: float
    repetitions: int
    alpha: float
    delta: float
    epsilon_claimed: float
    epsilon_lower_gdp: float
    epsilon_lower_clopper_pearson: float

    @property
    def passed(self) -> bool:
        """Whether the claim survived: the lower bound of what leaks does not exceed it."""
        return self.mu_lower <= self.claimed_mu


def judge(
    scores_in: NDArray[np.float64],
    scores_out: NDArray[np.float64],
    *,
    noise_multiplier: float,
    alpha: float = DEFAULT_ALPHA,
    delta: float = 1e-5,
) -> TwoWorldAudit:
    """Bounds and verdict from the scores of both worlds ([R] each), against the claim mu = 1 / noise_multiplier."""
    checks.positive(noise_multiplier=noise_multiplier)
    open_unit_interval(delta=delta)
    ceiling = mu_ceiling(len(scores_in), len(scores_out), alpha=alpha)
    if 1 / noise_multiplier >= ceiling:
        raise ValueError(
            f"repetitions must be larger: {len(scores_in)} runs per world at alpha {alpha} prove at most "
            f"mu = {ceiling:.3f}, so the claim {1 / noise_multiplier:.3f} could not fail"
        )
    lower = mu_lower(scores_in, scores_out, alpha=alpha)
    return TwoWorldAudit(
        claimed_mu=1 / noise_multiplier,
        mu_lower=lower,
        mu_estimate=mu_estimate(scores_in, scores_out),
        repetitions=min(len(scores_in), len(scores_out)),
        alpha=alpha,
        delta=delta,
        epsilon_claimed=gdp_epsilon(1 / noise_multiplier, delta),
        epsilon_lower_gdp=gdp_epsilon(lower, delta),
        epsilon_lower_clopper_pearson=epsilon_lower_clopper_pearson(scores_in, scores_out, delta=delta, alpha=alpha),
    )


def two_world(
    release: ReleasePath,
    honest: Rows,
    canary: Tensor,
    *,
    noise_multiplier: float,
    direction: Tensor | None = None,
    repetitions: int = DEFAULT_REPETITIONS,
    alpha: float = DEFAULT_ALPHA,
    delta: float = 1e-5,
) -> TwoWorldAudit:
    """Run ``release`` R times on the honest rows and R times on honest rows + canary, and judge the projections.

    release: the path under audit; called 2R times, must draw fresh noise each time and hold no other state.
    honest: [units, params], may have no units. canary: [params], the extra unit's row, typically far above the bound.
    direction: weights of the score, of the length of what ``release`` returns; None is the canary itself. For several
      released parts of unequal noise give ``matched_filter(shifts, stds)``, the most powerful choice.
    Raises ValueError for mismatched shapes or a release that is not finite.
    """
    _check_rows(honest, canary)
    checks.integer_at_least(2, repetitions=repetitions)
    weights = _unit(canary if direction is None else direction)
    with_canary = torch.cat([honest, canary[None, :].to(honest.dtype)])
    inside, outside = np.empty(repetitions), np.empty(repetitions)
    for i in range(repetitions):  # worlds alternate, so that drifting state cannot pass for a difference between them
        outside[i] = _project(release(honest), weights)
        inside[i] = _project(release(with_canary), weights)
    return judge(inside, outside, noise_multiplier=noise_multiplier, alpha=alpha, delta=delta)


def two_world_successive(
    new_run: Callable[[], ReleasePath],
    honest: Rows,
    canary: Tensor,
    *,
    noise_multiplier: float,
    repetitions: int = DEFAULT_REPETITIONS,
    alpha: float = DEFAULT_ALPHA,
    delta: float = 1e-5,
) -> TwoWorldAudit:
    """Two rounds of one run, the canary in the second or not; the score is taken on (second - first).

    Finds noise that is used again: it cancels in the difference and the canary stands alone. A correct path shows a mu
    smaller than its claim by sqrt(2), since the difference carries the noise of both rounds.
    new_run: makes the release path of a fresh run; its result is called once per round.
    """
    _check_rows(honest, canary)
    checks.integer_at_least(2, repetitions=repetitions)
    weights = _unit(canary)
    with_canary = torch.cat([honest, canary[None, :].to(honest.dtype)])
    inside, outside = np.empty(repetitions), np.empty(repetitions)
    for i in range(repetitions):
        # A run for each world: thresholds are placed by world 0, so world 1 must not share its noise.
        for scores, second in ((outside, honest), (inside, with_canary)):
            release = new_run()
            first = release(honest)
            scores[i] = _project(release(second) - first, weights)
    return judge(inside, outside, noise_multiplier=noise_multiplier, alpha=alpha, delta=delta)


def matched_filter(shifts: Sequence[Tensor], stds: Sequence[float]) -> Tensor:
    """Weights shift_j / std_j^2 of the most powerful test (Neyman-Pearson) between N(0, S) and N(shift, S), S diagonal.

    shifts: how far the canary moves each released part; stds: that part's noise. Returns them concatenated.
    """
    if len(shifts) != len(stds) or not shifts:
        raise ValueError(f"need one std per shift and at least one, got {len(shifts)} shifts and {len(stds)} stds")
    for std in stds:
        checks.positive(std=std)
    return torch.cat([shift.double().flatten() / std**2 for shift, std in zip(shifts, stds, strict=True)])


def detectable_mu(claimed_mu: float, repetitions: int = DEFAULT_REPETITIONS, alpha: float = DEFAULT_ALPHA) -> float:
    """Smallest mu of a Gaussian path that the test refutes about half the time.

    claimed_mu / it is the share of the claimed noise that a path can get away with. Computed at the expected error
    counts, hence slightly pessimistic: in a real test the best threshold is picked from noisy counts.
    """
    checks.positive(claimed_mu=claimed_mu)
    grid = norm.isf((np.arange(repetitions) + 0.5) / repetitions)
    low, high = claimed_mu, 2 * claimed_mu + 4

    def refuted(mu: float) -> bool:
        return mu_lower(grid + mu, grid, alpha=alpha) > claimed_mu

    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high


def _check_rows(honest: Rows, canary: Tensor) -> None:
    if honest.ndim != 2 or canary.ndim != 1 or honest.shape[1] != canary.shape[0]:
        raise ValueError(
            f"honest must be [units, params] and canary [params], got {tuple(honest.shape)} and {tuple(canary.shape)}"
        )


def _unit(direction: Tensor) -> Tensor:
    vector = direction.double().flatten()
    length = float(vector.norm())
    if not 0 < length < float("inf"):
        raise ValueError(f"direction must be finite and not zero, got L2 norm {length}; it defines the score")
    return vector / length


def _project(released: Released, weights: Tensor) -> float:
    vector = released.double().flatten()
    if vector.shape != weights.shape:
        raise ValueError(f"release must return {weights.numel()} numbers, like the direction, got {vector.numel()}")
    score = float(vector @ weights)
    if not np.isfinite(score):
        raise ValueError("release returned a non-finite vector; a path that can do so marks the unit that caused it")
    return score
