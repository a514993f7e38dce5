"""Clip maps that rescale every row instead of only the long ones: AUTO-S and PSAC.

With n = ||x||/C, both replace min(1, 1/n) by a smooth weight that stays below 1/n, so an encoded row is shorter than 1
and the guarantee is that of flat clipping with the same noise multiplier. Neither leaves any row as it is, so
decode(encode(x)) differs from x: bias in exchange for a threshold that no longer has to be tuned.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Real
from torch import Tensor

from privacy import checks
from privacy.clip_map import check_bound, finite_rows


@dataclass(frozen=True)
class AutomaticClip:
    """AUTO-S of Bu et al. 2023 (arXiv 2206.07136v3): every row is normalised, C x / (||x|| + gamma C).

    The stability constant is relative to the bound here (their gamma = 0.01 is absolute, which is meaningless for
    updates of unknown scale). No row is ever left unscaled, so small updates keep a direction and little more.

    Attributes:
        bound: C, the length an update is given.
        params: number of parameters of a row.
        gamma: stability constant, in units of ``bound``; 0 would send rows to the sphere and has no limit at 0.
    """

    bound: float
    params: int
    gamma: float = 0.01

    def __post_init__(self) -> None:
        check_bound(self.bound)
        checks.integer_at_least(1, params=self.params)
        checks.within(1e-12, 1e12, gamma=self.gamma, remedy="0.01 is the paper's value")

    @property
    def dim(self) -> int:
        return self.params

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units params"]:
        copy, norms = finite_rows(rows, self.params)
        return copy.mul_(norms.add_(self.gamma * self.bound).reciprocal_().unsqueeze(1))

    def decode(self, total: Float64[Tensor, " params"], expected_units: float) -> Float64[Tensor, " params"]:
        return total * (self.bound / expected_units)

    def spread(self) -> Float64[Tensor, ""]:
        return torch.tensor(self.bound, dtype=torch.float64)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "automatic", "bound": self.bound, "params": self.params, "gamma": self.gamma}


@dataclass(frozen=True)
class PsacClip:
    """PSAC of Xia et al. 2023 (DP-PSAC, arXiv 2212.00328): C x' / (n + r/(n + r)) with x' = x/C, n = ||x'||.

    A non-monotone weight: rows shorter than about C are stretched by less than AUTO-S stretches them, so that tiny
    rows do not drown the sum. The published map works on x itself with r = 0.1 or 0.01; here it works in units of the
    bound. n / (n + r/(n + r)) < 1, so an encoded row is shorter than 1.

    Attributes:
        bound: C, the largest length an update can get.
        params: number of parameters of a row.
        r: regularity constant, in units of ``bound``.
    """

    bound: float
    params: int
    r: float = 0.1

    def __post_init__(self) -> None:
        check_bound(self.bound)
        checks.integer_at_least(1, params=self.params)
        checks.within(1e-12, 1.0, r=self.r, remedy="0.1 and 0.01 are the paper's values")

    @property
    def dim(self) -> int:
        return self.params

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units params"]:
        copy, norms = finite_rows(rows, self.params)
        relative = norms.div_(self.bound)
        weight = 1.0 / (self.bound * (relative + self.r / (relative + self.r)))
        return copy.mul_(weight.unsqueeze(1))

    def decode(self, total: Float64[Tensor, " params"], expected_units: float) -> Float64[Tensor, " params"]:
        return total * (self.bound / expected_units)

    def spread(self) -> Float64[Tensor, ""]:
        return torch.tensor(self.bound, dtype=torch.float64)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "psac", "bound": self.bound, "params": self.params, "r": self.r}
