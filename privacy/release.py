"""What comes out of the mechanism, made from a noisy vector, and taken from disk again. No noise is drawn here."""

from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from typing import final

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from privacy.distributed_noise import NoiseShares
from privacy.errors import CorruptRun
from privacy.events import ReleaseEvent, Sampling
from privacy.plan import Plan
from privacy.receipts import Charge

SEAL = object()
"""What only this room may hand to a :class:`Release`."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Release:
    """What came out of the mechanism: noise included, free to use, log and publish.

    ``charged_release`` makes it, ``reopened_release`` takes it from disk again; nothing else can.

    Attributes:
        plan: what was computed.
        update: mean update over the expected cohort, float32; empty with ``NoUpdate()``.
        answers: per query of the plan, the noisy SUM over the cohort.
        expected_units: the public divisor for means.
        encoded: the noisy sum in encoded space, for methods that use its coordinates; None in a reopened release.
    """

    plan: Plan
    update: Float32[Tensor, " params"]
    answers: tuple[Float64[Tensor, " _"], ...]
    expected_units: float
    seal: InitVar[object]
    encoded: Float64[Tensor, " k"] | None = None

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


def reopened_release(
    plan: Plan,
    update: Tensor,
    answers: tuple[Tensor, ...],
    *,
    label: str,
    round: int,
    sampling: Sampling,
    charges: Iterable[Charge],
    noise_shares: NoiseShares | None = None,
) -> Release:
    """A release that was made, written to disk and read back, for a run that goes on after a break. No noise is drawn.

    Args:
        plan: the one it was made under.
        update, answers: its values, float32 ``[params]`` and float64.
        label, round, sampling, noise_shares: as they were charged.
        charges: of the run's ledger.

    Raises:
        CorruptRun: the ledger knows of no such release, or the values do not have the plan's form.
    """
    event = ReleaseEvent(label, round, sampling, plan.components(), noise_shares)
    if not any(charge.event == event and charge.released_at is not None for charge in charges):
        raise CorruptRun(f"the ledger knows of no release {label!r} of round {round} under this plan; restore the run")
    sizes = [plan.clip.params, *(query.dim for query in plan.queries)]
    types = [torch.float32, *(torch.float64 for _ in plan.queries)]
    if [(len(part), part.dtype) for part in (update, *answers)] != list(zip(sizes, types, strict=True)):
        raise CorruptRun(f"the stored values of round {round} do not have the form that its plan gives")
    return Release(plan, update, answers, sampling.expected_units, SEAL)


def decoded(noisy: Float64[Tensor, " n"], plan: Plan, expected_units: float) -> Release:
    """The release of a noisy joint vector in encoded space."""
    update, *answers = torch.split(noisy, [plan.clip.dim, *(query.dim for query in plan.queries)])
    sums = tuple(answer * query.sensitivity for query, answer in zip(plan.queries, answers, strict=True))
    mean = plan.clip.decode(update, expected_units).to(torch.float32)
    return Release(plan, mean, sums, expected_units, SEAL, update)
