"""The mechanism: charge, then noise, then decode. The only place of the project that adds noise.

Two ways: the server adds it to the sum it sees (:func:`charged_release`), or every client adds a share of it to its own
vector (:func:`noisy_share`) behind a charge that is made before any client is asked (:func:`charged_request`), and the
server decodes what secure aggregation shows it, a sum with the noise in it (:func:`released_sum`).

With rows x_i of the units in the cohort, a plan (clip map e, noise multiplier z, queries f_j with std s_j):

    release = decode( sum_i e(x_i) + z N(0, I) ),  and for every query  sum_i f_j(x_i) + s_j N(0, I)

Guarantee: one Gaussian mechanism of noise multiplier z_eff = (z^-2 + sum_j (S_j/s_j)^2)^(-1/2) on the sampled cohort,
add or remove one unit (McMahan et al. 2018, arXiv 1710.06963v3, with several statistics in one joint Gaussian).
The divisor is the expected number of units, so a cohort that is small, partly failed or empty changes neither scale
nor noise, and is charged like any other.
"""

import math
from dataclasses import InitVar, dataclass
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from privacy.contribution import GRID, MAX_UNITS, Contribution, contribute, validate
from privacy.distributed_noise import NoiseShares
from privacy.events import CappedPoisson, FixedSize, ReleaseEvent, Sampling
from privacy.noise import DiscreteGaussianNoise, GaussianNoise, InsecureSeededNoise, InsecureZeroNoise, Noise
from privacy.plan import Plan
from privacy.release import SEAL, Release, decoded, reopened_release
from privacy.units import Units

__all__ = [
    "Contribution",
    "DiscreteGaussianNoise",
    "GaussianNoise",
    "InsecureSeededNoise",
    "InsecureZeroNoise",
    "Noise",
    "Plan",
    "Release",
    "Requested",
    "Units",
    "charged_release",
    "charged_request",
    "contribute",
    "noisy_share",
    "released_sum",
    "reopened_release",
    "validate",
]

_Receipt = TypeVar("_Receipt")


@runtime_checkable
class Ledger(Protocol[_Receipt]):
    """What the mechanism needs of ``privacy.ledger.Ledger``."""

    @property
    def not_private(self) -> str | None:
        """Why this run carries no guarantee, if it carries none."""

    def stamp_not_private(self, reason: str) -> None:
        """Record durably that this run carries no guarantee."""

    def charge(self, event: ReleaseEvent) -> _Receipt:
        """Debit the event durably before returning; raise BudgetExceeded and write nothing if it cannot be paid."""

    def released(self, receipt: _Receipt) -> None:
        """Note that the charged event was released."""


def charged_release(
    total: Contribution,
    plan: Plan,
    *,
    label: str,
    round: int,
    sampling: Sampling,
    ledger: Ledger[_Receipt],
    noise: Noise | None = None,
) -> Release:
    """Charge the ledger, add noise to the cohort's sum, decode.

    Args:
        total: sum over the cohort; ``Contribution.zero(plan)`` if nobody took part.
        plan: the plan the contributions were made under; it sets clipping and noise of the same round alike.
        label, round: name of the release in the ledger.
        sampling: how the cohort was drawn.
        ledger: charged, durably, before any noise is drawn. An error after that leaves the charge standing.
        noise: ``GaussianNoise()`` unless given. An insecure kind stamps the ledger NOT PRIVATE first.

    Raises:
        ValueError: ``total`` cannot be a sum of honest contributions under ``plan``; nothing was charged.
        BudgetExceeded: the ledger cannot pay; nothing was charged or released.
    """
    noise = GaussianNoise() if noise is None else noise
    validate(total, plan, _most_units(sampling))
    event = ReleaseEvent(label, round, sampling, plan.components())
    if noise.insecure and ledger.not_private is None:
        ledger.stamp_not_private(f"{type(noise).__name__} in place of noise that protects")
    receipt = ledger.charge(event)
    joint = torch.cat([total.encoded, *total.answers])
    noisy = joint + noise.draw([(part.noise_multiplier, part.dim) for part in event.components])  # the only noise added
    release = decoded(noisy.to(torch.float64) / GRID, plan, sampling.expected_units)
    ledger.released(receipt)
    return release


@final
@dataclass(frozen=True, eq=False)
class Requested(Generic[_Receipt]):
    """A paid release whose noise the clients are about to make; only ``charged_request`` makes it.

    Attributes:
        plan, event: what was charged.
        receipt: of the ledger.
        seal: of this module.
    """

    plan: Plan
    event: ReleaseEvent
    receipt: _Receipt
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not SEAL:
            raise TypeError("a Requested is made by privacy.mechanism.charged_request only")


def charged_request(
    plan: Plan,
    *,
    label: str,
    round: int,
    sampling: Sampling,
    noise_shares: NoiseShares,
    ledger: Ledger[_Receipt],
    insecure: bool = False,
) -> Requested[_Receipt]:
    """Charge the ledger for a release whose noise the clients make; asked before any of them draws a number.

    Whatever becomes of the round, the charge stands. ``insecure`` says that the clients were told to add none.

    Raises:
        BudgetExceeded: the ledger cannot pay; nothing was charged.
        ValueError: the modulus has no room for this plan.
    """
    event = ReleaseEvent(label, round, sampling, plan.components(), noise_shares)
    noise_shares.grid_bits([part.noise_multiplier for part in event.components])
    if insecure and ledger.not_private is None:
        ledger.stamp_not_private("the clients were told to add no noise")
    return Requested(plan, event, ledger.charge(event), SEAL)


def noisy_share(
    contribution: Contribution, plan: Plan, noise_shares: NoiseShares, noise: Noise | None = None
) -> Int64[Tensor, " n"]:
    """One client's vector for the secure sum: its contribution on the coarser grid, with its share of the noise.

    Args:
        contribution: of ONE unit.
        plan: it was made under.
        noise_shares: what the federation agreed on.
        noise: ``DiscreteGaussianNoise()`` unless given; in place of it, an insecure kind only.

    Returns:
        Encoded update and answers, one after the other, 2^g grid steps per unit of sensitivity.
    """
    noise = DiscreteGaussianNoise() if noise is None else noise
    if not noise.insecure and not isinstance(noise, DiscreteGaussianNoise):
        raise ValueError(
            f"noise of a share must be DiscreteGaussianNoise, got {type(noise).__name__}; sums of it add up"
        )
    validate(contribution, plan, 1)
    components = plan.components()
    bits = noise_shares.grid_bits([part.noise_multiplier for part in components])
    joint = torch.cat([contribution.encoded, *contribution.answers])
    coarse = torch.div(joint, int(GRID) >> bits, rounding_mode="trunc")  # toward zero: no norm grows
    share = noise_shares.scale(bits) / GRID
    return coarse + noise.draw([(part.noise_multiplier * share, part.dim) for part in components])  # the client's noise


def released_sum(noisy: Int64[Tensor, " n"], requested: Requested[_Receipt], ledger: Ledger[_Receipt]) -> Release:
    """Decode a sum of :func:`noisy_share` vectors that was paid for by ``requested``.

    Args:
        noisy: the opened sum, of at least as many shares as were agreed.
        requested: the charge.
        ledger: that was charged.

    Raises:
        ValueError: the sum is longer than vectors of norm 1 and their noise can make it. What one party can still do
            unseen is to be as loud as all of them together.
    """
    plan, shares = requested.plan, requested.event.noise_shares
    assert shares is not None
    components = requested.event.components
    if noisy.dtype != torch.int64 or tuple(noisy.shape) != (sum(part.dim for part in components),):
        raise ValueError(f"noisy must be int64 of the plan's length, got {noisy.dtype} of shape {tuple(noisy.shape)}")
    bits = shares.grid_bits([part.noise_multiplier for part in components])
    for part, block in zip(components, torch.split(noisy, [part.dim for part in components]), strict=True):
        total_std = shares.share(part.noise_multiplier, bits) * math.sqrt(shares.parties)
        # A Gaussian vector is longer than sqrt(d) + 10 standard deviations with probability exp(-50).
        longest = shares.parties * 2.0**bits + total_std * (math.sqrt(part.dim) + 10.0)
        if float(block.to(torch.float64).norm()) > longest:
            raise ValueError(f"{part.name} is longer than any honest sum: a party sent what no clipped vector can be")
    steps = 2.0**bits
    release = decoded(noisy.to(torch.float64) / steps, plan, requested.event.sampling.expected_units)
    ledger.released(requested.receipt)
    return release


def _most_units(sampling: Sampling) -> int:
    match sampling:
        case FixedSize(size=size):
            return min(size, MAX_UNITS)
        case CappedPoisson(cap=cap):
            return min(cap, MAX_UNITS)
        case _:
            return min(sampling.population, MAX_UNITS)
