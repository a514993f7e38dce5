"""The mechanism: charge, then noise, then decode. The only place of the project that adds noise.

Two ways: the server adds it to the sum it sees (:func:`charged_release`), or every client adds a share of it to its own
vector (:func:`noisy_share`) behind a charge that is made before any client is asked (:func:`charged_request`), and the
server decodes what secure aggregation shows it, a sum with the noise in it (:func:`released_sum`).

With rows x_i of the units in the cohort, a plan (clip map e, noise multiplier z, queries f_j with std s_j):

    release = decode( sum_i e(x_i) + z N(0, I) ),  and for every query  sum_i f_j(x_i) + s_j N(0, I)

Guarantee: one Gaussian mechanism of noise multiplier z_eff = (z^-2 + sum_j (S_j/s_j)^2)^(-1/2) on the sampled cohort,
add or remove one unit (McMahan et al. 2018, arXiv 1710.06963v3, with several statistics in one joint Gaussian). Where
records are sampled, each brings a row x_i, and a unit K of them: see ``privacy.accountants.mixture``.
The divisor is the expected number of units, so a cohort that is small, partly failed or empty changes neither scale
nor noise, and is charged like any other. With :class:`~privacy.randomness.correlated.CorrelatedNoise` the N(0, I) of
successive releases hang together as the charged event says (``privacy.events.correlation``, which has the guarantee).

A :class:`Release` is what comes out; it is made of a noisy vector here, or taken from disk again
(:func:`reopened_release`), and nowhere else.
"""

import math
from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from privacy.contribution import GRID, MAX_UNITS, Contribution, Plan, validate
from privacy.errors import CorruptRun
from privacy.events import Correlation, CyclicPoisson, NoiseShares, Poisson, ReleaseEvent
from privacy.ledger.ledger import Charge
from privacy.randomness.correlated import CorrelatedNoise, loudness
from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise, Noise
from privacy.randomness.sampling import Cohort

SEAL = object()
"""What only this module may hand to a :class:`Release`."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Release:
    """The mechanism's result: noise included, free to use, log and publish.

    ``charged_release`` makes it, ``reopened_release`` takes it from disk again; nothing else can.

    Attributes:
        update: mean update over the expected cohort, float32; empty with ``NoUpdate()``.
        answers: per query of the plan, the noisy SUM over the cohort.
        expected_units: the public divisor for means.
        encoded: the noisy sum in encoded space, for methods that use its coordinates; None in a reopened release.
        loudness: standard deviation of its noise in units of what the plan says; 1 but for correlated noise.
    """

    plan: Plan
    update: Float32[Tensor, " params"]
    answers: tuple[Float64[Tensor, " _"], ...]
    expected_units: float
    seal: InitVar[object]
    encoded: Float64[Tensor, " k"] | None = None
    loudness: float = 1.0

    def __post_init__(self, seal: object) -> None:
        if seal is not SEAL:
            raise TypeError("a Release is made by privacy.mechanism.charged_release only; pass sums to it")

    def __repr__(self) -> str:
        names = ", ".join(query.name for query in self.plan.queries)
        return f"Release(update of {len(self.update)}, answers ({names}), expected_units {self.expected_units})"

    def answer(self, name: str) -> Float64[Tensor, " m"]:
        """The noisy sum of the query called ``name``; ValueError if the plan had none."""
        for query, answer in zip(self.plan.queries, self.answers, strict=True):
            if query.name == name:
                return answer
        raise ValueError(f"name must be one of {[query.name for query in self.plan.queries]}, got {name!r}")


_Receipt = TypeVar("_Receipt")


@runtime_checkable
class Ledger(Protocol[_Receipt]):
    """The part of ``privacy.ledger.ledger.Ledger`` that the mechanism needs."""

    @property
    def not_private(self) -> str | None:
        """The reason for which this run carries no guarantee, if it carries none."""

    def stamp_not_private(self, reason: str) -> None:
        """Record durably that this run carries no guarantee."""

    def attempts(self, label: str, round: int) -> int:
        """Count the charges for the release of this name."""

    def charge(self, event: ReleaseEvent) -> _Receipt:
        """Debit the event durably before returning; raise BudgetExceeded and write nothing if it cannot be paid."""

    def note_release(self, receipt: _Receipt) -> None:
        """Note that the charged event was released."""


def charged_release(
    total: Contribution,
    plan: Plan,
    cohort: Cohort,
    *,
    ledger: Ledger[_Receipt],
    noise: Noise | None = None,
) -> Release:
    """Charge the ledger, add noise to the cohort's sum, decode.

    Args:
        total: sum over the cohort; ``Contribution.zero(plan)`` if nobody took part.
        plan: the plan the contributions were made under; it sets clipping and noise of the same round alike.
        cohort: whose sum it is; it names the release in the ledger, and how it was drawn is what is charged.
        ledger: charged, durably, before any noise is drawn. An error after that leaves the charge standing.
        noise: ``GaussianNoise()`` unless given. An insecure kind stamps the ledger NOT PRIVATE first.

    Raises:
        ValueError: ``total`` cannot be a sum of honest contributions under ``plan``, or the cohort was drawn before the
            release was charged last; nothing was charged.
        BudgetExceeded: the ledger cannot pay; nothing was charged or released.
    """
    noise = GaussianNoise() if noise is None else noise
    sampling = cohort.sampling
    validate(total, plan, min(sampling.rows, MAX_UNITS))
    correlation = noise.correlation(sampling, ledger) if isinstance(noise, CorrelatedNoise) else None
    event = _event_of(cohort, plan, None, ledger, correlation)
    if noise.insecure and ledger.not_private is None:
        ledger.stamp_not_private(f"{type(noise).__name__} in place of noise that protects")
    receipt = ledger.charge(event)
    joint = torch.cat([total.encoded, *total.answers])
    noisy = joint + noise.draw([(part.noise_multiplier, part.dim) for part in event.components])  # the only noise added
    release = decode_release(noisy.to(torch.float64) / GRID, plan, sampling.expected_units, _loudness(event))
    ledger.note_release(receipt)
    return release


def _event_of(
    cohort: Cohort,
    plan: Plan,
    noise_shares: NoiseShares | None,
    ledger: Ledger[_Receipt],
    correlation: Correlation | None = None,
) -> ReleaseEvent:
    """What is charged for a plan on a cohort; a cohort from a seed is stamped first.

    Raises:
        ValueError: it was drawn before the last charge of this release. Two releases on one cohort are one sampling
            with less noise, and would be charged as two.
    """
    if cohort.attempt != ledger.attempts(cohort.label, cohort.round):
        raise ValueError(
            f"{cohort} must be drawn after the last charge of this release, its attempt is not the number of charges; "
            "draw another cohort"
        )
    if cohort.insecure and ledger.not_private is None:
        ledger.stamp_not_private("its cohort is drawn from a seed")
    return ReleaseEvent(cohort.label, cohort.round, cohort.sampling, plan.components(), noise_shares, correlation)


def _loudness(event: ReleaseEvent) -> float:
    """Standard deviation of the noise that a release carries, in units of what its components say."""
    if event.correlation is None:
        return 1.0
    assert isinstance(event.sampling, CyclicPoisson)
    assert event.sampling.turn is not None
    return loudness(event.correlation, event.sampling.turn)


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
    cohort: Cohort,
    *,
    noise_shares: NoiseShares,
    ledger: Ledger[_Receipt],
    insecure: bool = False,
) -> Requested[_Receipt]:
    """Charge the ledger for a release whose noise the clients make; asked before any of them draws a number.

    Whatever becomes of the round, the charge stands. ``insecure`` says that the clients were told to add none.

    Raises:
        BudgetExceeded: the ledger cannot pay; nothing was charged.
        ValueError: the modulus has no room for this plan, or the cohort was drawn before the last charge.
    """
    event = _event_of(cohort, plan, noise_shares, ledger)
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
    release = decode_release(noisy.to(torch.float64) / steps, plan, requested.event.sampling.expected_units)
    ledger.note_release(requested.receipt)
    return release


def reopened_release(
    plan: Plan,
    update: Tensor,
    answers: tuple[Tensor, ...],
    *,
    label: str,
    round: int,
    sampling: Poisson,
    charges: Iterable[Charge],
    noise_shares: NoiseShares | None = None,
    correlation: Correlation | None = None,
) -> Release:
    """A release that was made, written to disk and read back, for a run that is resumed. No noise is drawn.

    Args:
        plan: the one it was made under.
        update, answers: its values, float32 ``[params]`` and float64.
        label, round, sampling, noise_shares, correlation: as they were charged.
        charges: of the run's ledger.

    Raises:
        CorruptRun: the ledger knows of no such release, or the values do not have the plan's form.
    """
    event = ReleaseEvent(label, round, sampling, plan.components(), noise_shares, correlation)
    if not any(charge.event == event and charge.released_at is not None for charge in charges):
        raise CorruptRun(f"the ledger knows of no release {label!r} of round {round} under this plan; restore the run")
    sizes = [plan.clip.params, *(query.dim for query in plan.queries)]
    types = [torch.float32, *(torch.float64 for _ in plan.queries)]
    if [(len(part), part.dtype) for part in (update, *answers)] != list(zip(sizes, types, strict=True)):
        raise CorruptRun(f"the stored values of round {round} do not have the form that its plan gives")
    return Release(plan, update, answers, sampling.expected_units, SEAL, loudness=_loudness(event))


def decode_release(noisy: Float64[Tensor, " n"], plan: Plan, expected_units: float, loudness: float = 1.0) -> Release:
    """The release of a noisy joint vector in encoded space."""
    update, *answers = torch.split(noisy, [plan.clip.dim, *(query.dim for query in plan.queries)])
    sums = tuple(answer * query.sensitivity for query, answer in zip(plan.queries, answers, strict=True))
    mean = plan.clip.decode(update, expected_units).to(torch.float32)
    return Release(plan, mean, sums, expected_units, SEAL, update, loudness)
