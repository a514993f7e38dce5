"""One clip bit per adapter, all in one answer: how often each threshold of per-adapter clipping binds.

Centred bits (Andrew et al. 2021, arXiv 1905.03871v5) of n blocks together have L2 sensitivity sqrt(n)/2 under adding or
removing one unit, so n bits with noise s each raise the cost of a round by n / (4 s^2) in 1/z^2.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from privacy import checks
from privacy.units import Units, float64_copy, slabs, squared_norms

# Bits over an irrational sensitivity, rounded toward zero to the grid: off by at most this much per unit.
_GRID_ERROR = 2.0**-39


@dataclass(frozen=True)
class AdapterBits:
    """For every block +1/2 where the unit's norm of that block is at most its threshold, else -1/2.

    With S the noisy sum and m the expected number of units, the share of units unclipped in block k is estimated by
    S_k/m + 1/2. A unit whose row is not finite adds 0 everywhere, as it does to the update.

    Attributes:
        thresholds: the norms compared with; the thresholds of :class:`~privacy.clipping.PerAdapterClip` of that round.
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

    def possible(self, total: Float64[Tensor, " m"], max_units: int) -> bool:
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
