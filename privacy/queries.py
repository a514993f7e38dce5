"""Queries: any other statistic asked of the same units in the same round.

A query answers with one row per unit whose L2 norm is at most ``sensitivity``, so adding or removing one unit moves the
sum by no more than that; Gaussian noise of std ``noise_std`` goes on the SUM. A unit that does not take part adds 0,
and so does one that has nothing to say (a row that is not finite, no vote). The update and all queries of a round are
one joint Gaussian release on one cohort; ``Plan.effective_noise_multiplier`` is what they cost together.

=============  =========================================================  ===========  ================================
query          one unit's answer                                          sensitivity  asked by
=============  =========================================================  ===========  ================================
NormBit        +-1/2: is its norm within the threshold?                   1/2          Andrew et al. 2021 (1905.03871v5)
AdapterBits    the same for each of n blocks                              sqrt(n)/2    per-adapter clipping, RL
BoundedMean    its loss, clamped to [0, L] (or centred: +-L/2)            L (or L/2)   DP-CLAC (arXiv 2605.10272)
BoundedMean    its share of right answers, centred                        1/2          private evaluation
NormHistogram  one-hot bin of its norm                                    1            DC-SGD (arXiv 2503.22988)
LossHistogram  one-hot bin of its loss                                    1            DP-CLAC, first threshold
OneHotVote     one-hot bin of the threshold that it would choose          1            DP-LAC (arXiv 2605.10272)
=============  =========================================================  ===========  ================================

Grids and thresholds are public constants or made of earlier releases: a grid fitted to the data would be a release of
its own. (Under replace-one a one-hot row has sensitivity sqrt(2); the ledger's factor of two for that adjacency covers
it.)
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from privacy import checks
from privacy.clipping.units import Units, float64_copy, losses_of, slabs, squared_norms

# Bits over an irrational sensitivity, rounded toward zero to the grid: off by at most this much per unit.
_GRID_ERROR = 2.0**-39


@runtime_checkable
class Query(Protocol):
    """A bounded statistic of one unit; ``privacy/audit/contracts.py`` checks an implementation."""

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
        """The number m of coordinates of an answer."""

    def answer(self, units: Units) -> Float64[Tensor, "units m"]:
        """One row per unit, each of L2 norm <= ``sensitivity`` and computed from that unit alone."""

    def is_possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
        """Whether ``total`` can be a sum of answers of at most ``max_units`` units; the server's check of a reply."""

    def to_json(self) -> dict[str, Any]:
        """Plain values from which :func:`query_from_json` rebuilds the query."""


@dataclass(frozen=True)
class NormBit:
    """One bit per unit: +1/2 where its norm is at most the threshold, else -1/2.

    Source: Andrew et al. 2021, arXiv 1905.03871v5.

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

    def is_possible(self, total: Float64[Tensor, " 1"], max_units: int) -> bool:
        return bool((2 * total == (2 * total).round()).all()) and bool((total.abs() <= max_units / 2).all())

    def to_json(self) -> dict[str, Any]:
        return {"kind": "norm-bit", "threshold": self.threshold, "noise_std": self.noise_std, "name": self.name}


@dataclass(frozen=True)
class AdapterBits:
    """One bit per block: +1/2 where the unit's norm of that block is at most its threshold, else -1/2.

    With S the noisy sum and m the expected number of units, the share of units unclipped in block k is estimated by
    S_k/m + 1/2. n bits with noise s each raise the cost of a round by n/(4 s^2) in 1/z^2. A unit whose row is not
    finite adds 0 everywhere, as it does to the update.

    Attributes:
        thresholds: the norms compared with; the thresholds of :class:`~privacy.clipping.norms.PerAdapterClip` of that
            round.
        sizes: number of parameters of each block, in the order in which they lie in a row.
        noise_std: std of the noise on every bit's sum.
    """

    thresholds: tuple[float, ...]
    sizes: tuple[int, ...]
    noise_std: float
    name: str = "adapter-bits"

    def __post_init__(self) -> None:
        checks.not_empty(thresholds=self.thresholds)
        checks.same_length(thresholds=self.thresholds, sizes=self.sizes)
        checks.positive(noise_std=self.noise_std)
        for threshold, size in zip(self.thresholds, self.sizes, strict=True):
            checks.positive(threshold=threshold)
            checks.integer_at_least(1, size=size)

    @property
    def sensitivity(self) -> float:
        return math.sqrt(len(self.thresholds)) / 2

    @property
    def dim(self) -> int:
        return len(self.thresholds)

    def answer(self, units: Units) -> Float64[Tensor, "units m"]:
        width = units.rows.shape[1]
        if width != sum(self.sizes):
            raise ValueError(
                f"rows must have {sum(self.sizes)} columns for {self.name!r}, got {width}; the plan and the model's "
                "adapter layout must agree"
            )
        bits = torch.zeros(len(units), self.dim, dtype=torch.float64)
        parts = [slice(*ends) for ends in pairwise(accumulate(self.sizes, initial=0))]
        thresholds = torch.tensor(self.thresholds, dtype=torch.float64)
        for slab in slabs(len(units), width):
            copy = float64_copy(units.rows[slab])
            squares = torch.stack([squared_norms(copy[:, part]).cpu() for part in parts], dim=1)
            inside = (squares.sqrt() <= thresholds).to(torch.float64) - 0.5
            bits[slab] = inside.masked_fill_(~squares.sum(dim=1, keepdim=True).isfinite(), 0.0)
        return bits

    def is_possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
        error = max_units * _GRID_ERROR * self.sensitivity
        halves = 2 * total
        whole = bool(((halves - halves.round()).abs() <= 2 * error).all())
        return whole and bool((total.abs() <= max_units / 2 + error).all())

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "adapter-bits",
            "thresholds": list(self.thresholds),
            "sizes": list(self.sizes),
            "noise_std": self.noise_std,
            "name": self.name,
        }


@dataclass(frozen=True)
class BoundedMean:
    """The unit's loss, clamped to [0, bound]: DP-CLAC's noisy mean loss (arXiv 2605.10272).

    The noisy sum is divided by the expected number of units. A loss that is not finite counts as ``bound`` (an accuracy
    as 0): a model that diverged must not look perfect.

    Centred, ``bound / 2`` is taken off every answer and added to the mean again (:meth:`mean`). That halves the
    sensitivity, and the cohort's random size, by which a mean over the EXPECTED number of units is off, then only
    multiplies the distance of the mean from ``bound / 2``.

    Attributes:
        bound: largest loss that counts.
        noise_std: std of the noise on the sum.
        centred: whether answers lie in [-bound/2, bound/2] in place of [0, bound].
        of: ``"losses"``, or ``"accuracies"``, whose bound is 1.
    """

    bound: float
    noise_std: float
    name: str = "bounded-mean"
    centred: bool = field(default=False, kw_only=True)
    of: str = field(default="losses", kw_only=True)

    def __post_init__(self) -> None:
        checks.positive(bound=self.bound, noise_std=self.noise_std)
        checks.one_of(("losses", "accuracies"), of=self.of)

    @property
    def centre(self) -> float:
        """The value that is taken off every loss."""
        return self.bound / 2 if self.centred else 0.0

    @property
    def sensitivity(self) -> float:
        return self.bound - self.centre

    @property
    def dim(self) -> int:
        return 1

    def answer(self, units: Units) -> Float64[Tensor, "units 1"]:
        losses, worst = losses_of(units, self.name, self.of), self.bound if self.of == "losses" else 0.0
        losses = losses.where(losses.isfinite(), losses.new_tensor(worst)).clamp(0.0, self.bound)
        return (losses - self.centre).unsqueeze(1)

    def mean(self, total: Float64[Tensor, " 1"], expected_units: float) -> float:
        """The mean loss that a released sum stands for."""
        return float(total[0]) / expected_units + self.centre

    def is_possible(self, total: Float64[Tensor, " 1"], max_units: int) -> bool:
        least = -max_units * self.centre
        return bool((total >= least).all() and (total <= max_units * self.sensitivity).all())

    def to_json(self) -> dict[str, Any]:
        kept = {"bound": self.bound, "noise_std": self.noise_std, "name": self.name, "centred": self.centred}
        return {"kind": "bounded-mean", **kept, "of": self.of}


@dataclass(frozen=True)
class _Histogram:
    """One-hot bin of one number of the unit on a public grid.

    Bin 0 holds numbers <= edges[0], bin i those in (edges[i-1], edges[i]], the last bin everything above edges[-1].

    Attributes:
        edges: increasing, chosen without looking at the data.
        noise_std: std of the noise on every count.
    """

    kind: ClassVar[str]
    edges: tuple[float, ...]
    noise_std: float
    name: str

    def __post_init__(self) -> None:
        checks.strictly_increasing(edges=self.edges)
        checks.positive(noise_std=self.noise_std)

    @property
    def sensitivity(self) -> float:
        return 1.0

    @property
    def dim(self) -> int:
        return len(self.edges) + 1

    def is_possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
        return _counts(total, max_units)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "edges": list(self.edges), "noise_std": self.noise_std, "name": self.name}


@dataclass(frozen=True)
class NormHistogram(_Histogram):
    """Bins of the unit's norm (DC-SGD, arXiv 2503.22988; log-spaced edges for updates)."""

    kind: ClassVar[str] = "norm-histogram"
    name: str = "norm-histogram"

    def answer(self, units: Units) -> Float64[Tensor, "units m"]:
        return _one_hot_bins(units.norms, self.edges)


@dataclass(frozen=True)
class LossHistogram(_Histogram):
    """Bins of the unit's loss: the first loss threshold of DP-CLAC (arXiv 2605.10272).

    A loss that is not finite falls into the last bin (a model that diverged).
    """

    kind: ClassVar[str] = "loss-histogram"
    name: str = "loss-histogram"

    def answer(self, units: Units) -> Float64[Tensor, "units m"]:
        return _one_hot_bins(losses_of(units, self.name).nan_to_num(nan=math.inf), self.edges)


@dataclass(frozen=True)
class OneHotVote:
    """One vote per unit for a bin of a public grid: how DP-LAC chooses its first threshold (arXiv 2605.10272).

    The unit tries ``candidates`` times its own norm as a threshold, simulates clipping and noise on its own update,
    and votes for the bin nearest to the candidate whose loss stays closest to the loss without noise. The vote is
    worked out where the unit is trained; here it only arrives as ``Units.votes``.

    Attributes:
        bins: the grid of thresholds, increasing and positive; 2^(j/2), j = -12..12, by default of the method.
        noise_std: std of the noise on every count.
        candidates: thresholds a unit tries, as multiples of its own norm.
        simulated_noise_std_per_bound: std per coordinate of the noise a unit simulates, for a threshold of 1
            (z / expected units: what the averaged update will really carry).
    """

    bins: tuple[float, ...]
    noise_std: float
    candidates: tuple[float, ...] = field(default=(0.25, 0.5, 1.0), kw_only=True)
    simulated_noise_std_per_bound: float = field(kw_only=True)
    name: str = field(default="vote", kw_only=True)

    def __post_init__(self) -> None:
        checks.strictly_increasing(bins=self.bins)
        checks.positive(smallest_bin=self.bins[0], noise_std=self.noise_std)
        checks.strictly_increasing(candidates=self.candidates)
        checks.positive(smallest_candidate=self.candidates[0])
        checks.non_negative(simulated_noise_std_per_bound=self.simulated_noise_std_per_bound)

    @property
    def sensitivity(self) -> float:
        return 1.0

    @property
    def dim(self) -> int:
        return len(self.bins)

    def nearest_bin(self, threshold: float) -> int:
        """Index of the bin nearest to ``threshold`` on a log scale; -1 if it is not a positive finite number."""
        if not 0 < threshold < math.inf:
            return -1
        middles = [math.sqrt(low * high) for low, high in pairwise(self.bins)]
        return bisect_left(middles, threshold)

    def answer(self, units: Units) -> Float64[Tensor, "units m"]:
        if units.votes is None:
            raise ValueError(f"votes must be given for the query {self.name!r}, got None; -1 where a unit has none")
        return _one_hot(units.votes.cpu(), self.dim)

    def is_possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
        return _counts(total, max_units)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "one-hot-vote",
            "bins": list(self.bins),
            "noise_std": self.noise_std,
            "candidates": list(self.candidates),
            "simulated_noise_std_per_bound": self.simulated_noise_std_per_bound,
            "name": self.name,
        }


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
            of = str(data.get("of", "losses"))
            return BoundedMean(float(data["bound"]), noise_std, name, centred=bool(data["centred"]), of=of)
        case other:
            raise ValueError(
                "kind of query must be norm-bit, adapter-bits, norm-histogram, loss-histogram, one-hot-vote or "
                f"bounded-mean, got {other!r}; server and client must run the same version"
            )


# Every query, for the property tests that prove them all alike.
QUERIES: tuple[type[Query], ...] = (NormBit, AdapterBits, NormHistogram, LossHistogram, OneHotVote, BoundedMean)


def _one_hot(index: Int64[Tensor, " units"], dim: int) -> Float64[Tensor, "units m"]:
    """A one in column index; an index outside [0, dim) gives a row of zeros."""
    return (index.unsqueeze(1) == torch.arange(dim)).to(torch.float64)


def _one_hot_bins(values: Float64[Tensor, " units"], edges: tuple[float, ...]) -> Float64[Tensor, "units m"]:
    index = torch.bucketize(values, torch.tensor(edges, dtype=torch.float64))
    return _one_hot(index.masked_fill_(values.isnan(), -1), len(edges) + 1)


def _counts(total: Float64[Tensor, " m"], max_units: int) -> bool:
    return bool((total == total.round()).all()) and bool((total >= 0).all()) and bool(total.sum() <= max_units)
