"""Queries whose answer is a single one in a row of zeros: histograms and votes. L2 sensitivity 1, add/remove one unit.

(Under replace-one it is sqrt(2); the ledger's factor of two for that adjacency covers it.) The grids are public
constants: a grid fitted to the data would be a release of its own.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from privacy import checks
from privacy.units import Units, losses_of


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
        checks.increasing(edges=self.edges)
        checks.positive(noise_std=self.noise_std)

    @property
    def sensitivity(self) -> float:
        return 1.0

    @property
    def dim(self) -> int:
        return len(self.edges) + 1

    def possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
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
        checks.increasing(bins=self.bins)
        checks.positive(smallest_bin=self.bins[0], noise_std=self.noise_std)
        checks.increasing(candidates=self.candidates)
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

    def possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
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


def _one_hot(index: Int64[Tensor, " units"], dim: int) -> Float64[Tensor, "units m"]:
    """A one in column index; an index outside [0, dim) gives a row of zeros."""
    return (index.unsqueeze(1) == torch.arange(dim)).to(torch.float64)


def _one_hot_bins(values: Float64[Tensor, " units"], edges: tuple[float, ...]) -> Float64[Tensor, "units m"]:
    index = torch.bucketize(values, torch.tensor(edges, dtype=torch.float64))
    return _one_hot(index.masked_fill_(values.isnan(), -1), len(edges) + 1)


def _counts(total: Float64[Tensor, " m"], max_units: int) -> bool:
    return bool((total == total.round()).all()) and bool((total >= 0).all()) and bool(total.sum() <= max_units)
