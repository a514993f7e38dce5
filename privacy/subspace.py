"""Clipping inside a subspace known to everyone: less noise, because fewer directions carry it.

    encode:  e(x) = clip_1( V x / C ),  V [k, d] with orthonormal rows        decode:  x = C V^T (noisy sum) / (q N)

The rows of V span gradients of PUBLIC records at the current adapter, so V is a function of public data and of earlier
releases. Projection comes before clipping: what a client's update holds outside the subspace, mostly noise of its few
records, neither eats its norm nor is released, and the Gaussian has k coordinates instead of d.
References: the subspace of public gradients is that of PDP-SGD (Zhou, Wu, Banerjee 2021, arXiv 2007.03813), which
projects the noisy sum, and of GEP (Yu, Zhang, Chen, Liu 2021, arXiv 2102.12677), whose embedding is clipped as here
(the form that drops the residual, B-GEP), per record; ours is per client.
Guarantee: L2 sensitivity 1 in encoded space whatever V is, because clipping is the last step of ``encode``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32, Float64, Real
from torch import Tensor

from privacy.clip_map import check_bound, finite_rows
from privacy.units import squared_norms


@dataclass(frozen=True, eq=False, repr=False)
class SubspaceClip:
    """Flat clipping of the coordinates in a public subspace.

    Attributes:
        basis: V, float32 ``[k, d]``, orthonormal rows (needed for a decode without distortion, not for privacy).
        bound: C, L2 threshold of the projected update.
    """

    basis: Float32[Tensor, "k d"]
    bound: float

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if self.basis.dim() != 2 or not 0 < self.basis.shape[0] <= self.basis.shape[1]:
            raise ValueError(
                f"basis must be a matrix [k, d] with 1 <= k <= d, got shape {tuple(self.basis.shape)}; "
                "ask for a smaller subspace"
            )
        if not bool(self.basis.isfinite().all()):
            raise ValueError("basis must be finite, it is not; the public gradients overflowed")

    @property
    def params(self) -> int:
        return self.basis.shape[1]

    @property
    def dim(self) -> int:
        return self.basis.shape[0]

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units k"]:
        """Project, then clip to the unit ball; a row that is not finite becomes 0."""
        finite, _ = finite_rows(rows, self.params)
        basis = self.basis.to(finite.device, torch.float64)
        # Row by row, each in memory of its own: a product may round a row differently beside others or at another
        # alignment, and a unit's contribution must depend on that unit alone, to the last bit.
        encoded = finite.new_zeros(len(finite), self.dim)
        for row, out in zip(finite, encoded, strict=True):
            out.copy_(torch.mv(basis, row.clone()))
        encoded.div_(self.bound)
        norms = squared_norms(encoded).sqrt_()
        lost = ~norms.isfinite()
        encoded[lost] = 0.0
        norms[lost] = 0.0
        return encoded.div_(norms.clamp_min(1.0).unsqueeze(1))

    def decode(self, total: Float64[Tensor, " k"], expected_units: float) -> Float64[Tensor, " params"]:
        """The noisy sum as a mean update, back in parameter space."""
        return (total * (self.bound / expected_units)) @ self.basis.to(total.device, torch.float64)

    def spread(self) -> Float64[Tensor, " params"]:
        lengths: Tensor = torch.linalg.vector_norm(self.basis.double(), dim=0)
        return lengths * self.bound

    def to_json(self) -> dict[str, Any]:
        """Threshold and sizes; the basis travels beside it as an array (``client.wire``)."""
        return {"kind": "subspace", "bound": self.bound, "rank": self.dim, "params": self.params}

    def __repr__(self) -> str:
        return f"SubspaceClip(bound {self.bound:g}, {self.dim} of {self.params} directions)"
