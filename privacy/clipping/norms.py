r"""Clip maps that look at norms only.

==============  ===============================================================  =================================
map             encode(x)                                                        source
==============  ===============================================================  =================================
FlatClip        x / max(||x||, C)                                                Abadi et al. 2016 (1607.00133v2)
PerAdapterClip  block k: w_k x_k min(1, C_k/||x_k||), with sum (w_k C_k)^2 = 1   this project, see the class
AutomaticClip   x / (||x|| + gamma C)                                            Bu et al. 2023, AUTO-S
PsacClip        (x/C) / (n + r/(n + r)), n = ||x||/C                             Xia et al. 2023, DP-PSAC
NoUpdate        nothing                                                          a release of queries only
==============  ===============================================================  =================================

Guarantee of all: a Plan with noise multiplier z is a Gaussian mechanism of sensitivity 1 and noise z, add/remove one.

AUTO-S and PSAC rescale every row instead of only the long ones. With n = ||x||/C, both replace min(1, 1/n) by a smooth
weight that stays below 1/n, so an encoded row is shorter than 1 and the guarantee is that of flat clipping with the
same noise multiplier. Neither leaves any row as it is, so decode(encode(x)) differs from x: bias in exchange for a
threshold that no longer has to be tuned.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float64, Real
from torch import Tensor

from privacy import checks
from privacy.clipping.clip_map import check_bound, finite_rows
from privacy.clipping.units import squared_norms


@dataclass(frozen=True)
class _OneBound:
    """What the maps with one threshold for the whole row share: encoded space is in units of it.

    Attributes:
        bound: C, the largest L2 norm one unit's update keeps or is given.
        params: number of parameters of a row.
    """

    bound: float
    params: int

    def __post_init__(self) -> None:
        check_bound(self.bound)
        checks.integer_at_least(1, params=self.params)

    @property
    def dim(self) -> int:
        return self.params

    def decode(self, total: Float64[Tensor, " params"], expected_units: float) -> Float64[Tensor, " params"]:
        return total * (self.bound / expected_units)

    def spread(self) -> Float64[Tensor, ""]:
        return torch.tensor(self.bound, dtype=torch.float64)

    def arrays(self) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class FlatClip(_OneBound):
    """One threshold on the norm of the whole row: x min(1, C/||x||), in units of C."""

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units params"]:
        copy, norms = finite_rows(rows, self.params)
        return copy.mul_(norms.clamp_(min=self.bound).reciprocal_().unsqueeze(1))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "flat", "bound": self.bound, "params": self.params}


@dataclass(frozen=True)
class AutomaticClip(_OneBound):
    """AUTO-S of Bu et al. 2023 (arXiv 2206.07136v3): every row is normalised, C x / (||x|| + gamma C).

    The stability constant is relative to the bound here (their gamma = 0.01 is absolute, which is meaningless for
    updates of unknown scale). No row is ever left unscaled, so small updates keep a direction and little more.

    Attributes:
        gamma: stability constant, in units of ``bound``; 0 would send rows to the sphere and has no limit at 0.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.within(1e-12, 1e12, gamma=self.gamma, remedy="0.01 is the paper's value")

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units params"]:
        copy, norms = finite_rows(rows, self.params)
        return copy.mul_(norms.add_(self.gamma * self.bound).reciprocal_().unsqueeze(1))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "automatic", "bound": self.bound, "params": self.params, "gamma": self.gamma}


@dataclass(frozen=True)
class PsacClip(_OneBound):
    """PSAC of Xia et al. 2023 (DP-PSAC, arXiv 2212.00328): C x' / (n + r/(n + r)) with x' = x/C, n = ||x'||.

    A non-monotone weight: rows shorter than about C are stretched by less than AUTO-S stretches them, so that tiny
    rows do not drown the sum. The published map works on x itself with r = 0.1 or 0.01; here it works in units of the
    bound. n / (n + r/(n + r)) < 1, so an encoded row is shorter than 1.

    Attributes:
        r: regularity constant, in units of ``bound``.
    """

    r: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.within(1e-12, 1.0, r=self.r, remedy="0.1 and 0.01 are the paper's values")

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units params"]:
        copy, norms = finite_rows(rows, self.params)
        relative = norms.div_(self.bound)
        weight = 1.0 / (self.bound * (relative + self.r / (relative + self.r)))
        return copy.mul_(weight.unsqueeze(1))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "psac", "bound": self.bound, "params": self.params, "r": self.r}


@dataclass(frozen=True)
class PerAdapterClip:
    r"""One threshold per block (an (A, B) pair, a head), with the noise that is optimal for them.

    Block k is clipped to C_k and multiplied by w_k = (S C_k / sqrt(d_k))^(-1/2), S = sum_j C_j sqrt(d_j). Then
    sum_k (w_k C_k)^2 = 1, so encoded space has sensitivity 1 and ONE isotropic Gaussian of std z is exactly as private
    as flat clipping with z. Decoded, block k carries noise of std s_k = z sqrt(S C_k / sqrt(d_k)) on the sum: the
    allocation of least total noise sum_k d_k s_k^2 = (z S)^2 among those with sum_k (C_k/s_k)^2 = z^-2 (Lagrange;
    the optimal split of the privacy budget has 1/s_k^2 proportional to sqrt(d_k)/C_k).

    Noise of std z C_k on every block, as in RLDP (arXiv 2507.22565v1), has the effective noise multiplier z / sqrt(K)
    only.

    Attributes:
        bounds: C_k, one per block.
        sizes: d_k, the number of parameters of each block, in the order in which they lie in a row.
    """

    bounds: tuple[float, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        checks.not_empty(bounds=self.bounds)
        checks.same_length(bounds=self.bounds, sizes=self.sizes)
        for bound, size in zip(self.bounds, self.sizes, strict=True):
            check_bound(bound)
            checks.integer_at_least(1, size=size)
        if max(self.bounds) / min(self.bounds) > 1e12:
            raise ValueError(
                f"bounds must lie within a factor of 1e12 of each other, got {self.bounds!r}; "
                "a block with a negligible threshold belongs out of the trained set"
            )

    @property
    def params(self) -> int:
        return sum(self.sizes)

    @property
    def dim(self) -> int:
        return self.params

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The weights w_k, each of which turns a clipped block into its share of the unit ball."""
        scale = math.fsum(c * math.sqrt(d) for c, d in zip(self.bounds, self.sizes, strict=True))
        return tuple((scale * c / math.sqrt(d)) ** -0.5 for c, d in zip(self.bounds, self.sizes, strict=True))

    @cached_property
    def _blocks(self) -> tuple[slice, ...]:
        return tuple(slice(*ends) for ends in pairwise(accumulate(self.sizes, initial=0)))

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units params"]:
        copy, _ = finite_rows(rows, self.params)
        for part, bound, weight in zip(self._blocks, self.bounds, self.weights, strict=True):
            block = copy[:, part]
            norms = squared_norms(block).sqrt_()
            block.mul_((weight * bound / norms.clamp_(min=bound)).unsqueeze(1))
        return copy

    def decode(self, total: Float64[Tensor, " params"], expected_units: float) -> Float64[Tensor, " params"]:
        update = total.clone()
        for part, weight in zip(self._blocks, self.weights, strict=True):
            update[part] /= weight * expected_units
        return update

    def spread(self) -> Float64[Tensor, " params"]:
        sizes = torch.tensor(self.sizes)
        return torch.tensor(self.weights, dtype=torch.float64).reciprocal_().repeat_interleave(sizes)

    def arrays(self) -> dict[str, Tensor]:
        return {}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "per-adapter", "bounds": list(self.bounds), "sizes": list(self.sizes)}


@dataclass(frozen=True)
class NoUpdate:
    """Releases no update: the plan's queries are everything. Rows may have any width, encoded space has none."""

    @property
    def params(self) -> int:
        return 0

    @property
    def dim(self) -> int:
        return 0

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units 0"]:
        return torch.zeros(rows.shape[0], 0, dtype=torch.float64, device=rows.device)

    def decode(self, total: Float64[Tensor, " 0"], expected_units: float) -> Float64[Tensor, " 0"]:
        return total

    def spread(self) -> Float64[Tensor, " 0"]:
        return torch.zeros(0, dtype=torch.float64)

    def arrays(self) -> dict[str, Tensor]:
        return {}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "none"}
