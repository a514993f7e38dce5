"""Queries: any other statistic asked of the same units in the same round.

A query answers with one row per unit whose L2 norm is at most ``sensitivity``, so adding or removing one unit moves the
sum by no more than that; Gaussian noise of std ``noise_std`` goes on the SUM. A unit that does not take part adds 0,
and so does one that has nothing to say (a row that is not finite, no vote). The update and all queries of a round are
one joint Gaussian release on one cohort; ``Plan.effective_noise_multiplier`` is what they cost together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from privacy import checks
from privacy.adapter_bits import AdapterBits
from privacy.histograms import LossHistogram, NormHistogram, OneHotVote
from privacy.units import Units, losses_of

__all__ = [
    "QUERIES",
    "AdapterBits",
    "BoundedMean",
    "LossHistogram",
    "NormBit",
    "NormHistogram",
    "OneHotVote",
    "Query",
    "query_from_json",
]


@runtime_checkable
class Query(Protocol):
    """A bounded statistic of one unit; ``privacy/conformance.py`` checks an implementation."""

    @property
    def name(self) -> str:
        """Name of the released statistic, unique within a plan; appears in the ledger."""

    @property
    def sensitivity(self) -> float:
        """Largest L2 norm of one unit's answer."""

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on every coordinate of the SUM."""

    @property
    def dim(self) -> int:
        """m, the number of coordinates of an answer."""

    def answer(self, units: Units) -> Float64[Tensor, "units m"]:
        """One row per unit, each of L2 norm <= ``sensitivity`` and computed from that unit alone."""

    def possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
        """Whether ``total`` can be a sum of answers of at most ``max_units`` units; the server's check of a reply."""

    def to_json(self) -> dict[str, Any]:
        """Plain values from which :func:`query_from_json` rebuilds the query."""


@dataclass(frozen=True)
class NormBit:
    """+1/2 where the unit's norm is at most the threshold, else -1/2 (Andrew et al. 2021, arXiv 1905.03871v5).

    Centred, so that the sensitivity is 1/2 under adding or removing a unit (bits in {0, 1} have 1). With S the noisy
    sum and m the expected number of units, the share of unclipped units is estimated by S/m + 1/2.

    Attributes:
        threshold: the norm compared with; the clipping threshold of the same round.
        noise_std: sigma_b of the paper; m/20 is its default.
    """

    threshold: float
    noise_std: float
    name: str = "norm-bit"

    def __post_init__(self) -> None:
        checks.positive(threshold=self.threshold, noise_std=self.noise_std)

    @property
    def sensitivity(self) -> float:
        return 0.5

    @property
    def dim(self) -> int:
        return 1

    def answer(self, units: Units) -> Float64[Tensor, "units 1"]:
        bits = (units.norms <= self.threshold).to(torch.float64) - (units.norms > self.threshold).to(torch.float64)
        return (bits / 2).unsqueeze(1)  # neither comparison holds for NaN: a row that is not finite adds 0

    def possible(self, total: Float64[Tensor, " 1"], max_units: int) -> bool:
        return bool((2 * total == (2 * total).round()).all()) and bool((total.abs() <= max_units / 2).all())

    def to_json(self) -> dict[str, Any]:
        return {"kind": "norm-bit", "threshold": self.threshold, "noise_std": self.noise_std, "name": self.name}


@dataclass(frozen=True)
class BoundedMean:
    """The unit's loss, clamped to [0, bound]: DP-CLAC's noisy mean loss (arXiv 2605.10272).

    The noisy sum is divided by the expected number of units. A loss that is not finite counts as ``bound``: a model
    that diverged must not look perfect.

    Centred, ``bound / 2`` is taken off every answer and added to the mean again (:meth:`mean`). That halves the
    sensitivity, and the cohort's random size, by which a mean over the EXPECTED number of units is off, then only
    multiplies the distance of the mean from ``bound / 2``.

    Attributes:
        bound: largest loss that counts.
        noise_std: std of the noise on the sum.
        centred: whether answers lie in [-bound/2, bound/2] in place of [0, bound].
    """

    bound: float
    noise_std: float
    name: str = "bounded-mean"
    centred: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        checks.positive(bound=self.bound, noise_std=self.noise_std)

    @property
    def centre(self) -> float:
        """What is taken off every loss."""
        return self.bound / 2 if self.centred else 0.0

    @property
    def sensitivity(self) -> float:
        return self.bound - self.centre

    @property
    def dim(self) -> int:
        return 1

    def answer(self, units: Units) -> Float64[Tensor, "units 1"]:
        losses = losses_of(units, self.name)
        losses = losses.where(losses.isfinite(), losses.new_tensor(self.bound)).clamp(0.0, self.bound)
        return (losses - self.centre).unsqueeze(1)

    def mean(self, total: Float64[Tensor, " 1"], expected_units: float) -> float:
        """The mean loss that a released sum stands for."""
        return float(total[0]) / expected_units + self.centre

    def possible(self, total: Float64[Tensor, " 1"], max_units: int) -> bool:
        least = -max_units * self.centre
        return bool((total >= least).all() and (total <= max_units * self.sensitivity).all())

    def to_json(self) -> dict[str, Any]:
        kept = {"bound": self.bound, "noise_std": self.noise_std, "name": self.name, "centred": self.centred}
        return {"kind": "bounded-mean", **kept}


def query_from_json(data: Mapping[str, Any]) -> Query:
    """Rebuild a query from ``to_json``; ValueError for an unknown kind or impossible values."""
    noise_std, name = float(data["noise_std"]), str(data["name"])
    match data["kind"]:
        case "norm-bit":
            return NormBit(float(data["threshold"]), noise_std, name)
        case "adapter-bits":
            thresholds, sizes = tuple(map(float, data["thresholds"])), tuple(map(int, data["sizes"]))
            return AdapterBits(thresholds, sizes, noise_std, name)
        case "norm-histogram":
            return NormHistogram(tuple(map(float, data["edges"])), noise_std, name)
        case "loss-histogram":
            return LossHistogram(tuple(map(float, data["edges"])), noise_std, name)
        case "one-hot-vote":
            return OneHotVote(
                tuple(map(float, data["bins"])),
                noise_std,
                candidates=tuple(map(float, data["candidates"])),
                simulated_noise_std_per_bound=float(data["simulated_noise_std_per_bound"]),
                name=name,
            )
        case "bounded-mean":
            return BoundedMean(float(data["bound"]), noise_std, name, centred=bool(data["centred"]))
        case other:
            raise ValueError(
                "kind of query must be norm-bit, adapter-bits, norm-histogram, loss-histogram, one-hot-vote or "
                f"bounded-mean, got {other!r}; server and client must run the same version"
            )


# Every query, for the property tests that prove them all alike.
QUERIES: tuple[type[Query], ...] = (NormBit, AdapterBits, NormHistogram, LossHistogram, OneHotVote, BoundedMean)
