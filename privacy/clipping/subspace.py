r"""Clip maps over the span of public gradients: noise where the signal is, because fewer directions carry it.

=====================  ===========================================================  ===============================
map                    encode(x)                                                    source
=====================  ===========================================================  ===============================
SubspaceClip           clip(V x / C)                                                GEP without residual (B-GEP)
EmbeddingResidualClip  sqrt(p) clip(V x / S0), sqrt(1-p) clip((x - V^T V x) / S1)   GEP, Yu et al. 2021, 2102.12677
CoefficientClip        Z / (||Z|| + 1e-8),  Z = (G^T G + eta I)^-1 G^T x            PE-SGD, Zou et al. ICLR 2026
=====================  ===========================================================  ===============================

V [k, d] is an orthonormal basis of public gradients, G holds gradients of public (synthetic) records as columns. They
are made of public data, of earlier releases and of the current adapter, which itself is one. decode multiplies by V^T
or G and divides by the expected units: post-processing.

Guarantee: every column is normalised, or clipped, by itself and last, so encoded space has L2 sensitivity 1 whatever G
or V is: one Gaussian of multiplier z.

Projection comes before clipping: what a row holds outside the subspace, mostly noise of few records, neither eats its
norm nor is released, and the Gaussian has k coordinates instead of d. (PDP-SGD, Zhou, Wu, Banerjee 2021, arXiv
2007.03813, projects the noisy sum.)
GEP: two vectors of one batch are ONE joint event. With p = 1/2 each part has noise multiplier sqrt(2) z inside the one
subsampled Gaussian of multiplier z; the published accountant instead doubles the subsampled RDP of each.
PE-SGD, deviations from its published code: eta is relative to the mean diagonal of G^T G (their 1e-6 is absolute, and
gradients of adapters have squared norms of that size); the divisor is the expected batch, never the realised one; a
column that is not finite is zero.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float32, Float64, Real
from torch import Tensor

from privacy import checks
from privacy.clipping.clip_map import check_bound, finite_rows, in_unit_ball, same_arrays
from privacy.clipping.units import squared_norms


class _Spanned:
    """A map with a public matrix, given in float32 and copied once to float64 on every device that clips with it.

    Long rows come one at a time: a copy for each would take longer than its product.
    """

    @cached_property
    def _copies(self) -> dict[torch.device, Float64[Tensor, "n d"]]:
        return {}

    def _on(self, device: torch.device, matrix: Float32[Tensor, "n d"]) -> Float64[Tensor, "n d"]:
        if device not in self._copies:
            self._copies[device] = matrix.to(device, torch.float64)
        return self._copies[device]


@dataclass(frozen=True, eq=False, repr=False)
class SubspaceClip(_Spanned):
    """Flat clipping of the coordinates in a public subspace.

    Attributes:
        basis: V, float32 ``[k, d]``, orthonormal rows (needed for a decode without distortion, not for privacy).
        bound: C, L2 threshold of the projected update.
    """

    basis: Float32[Tensor, "k d"]
    bound: float

    def __post_init__(self) -> None:
        _check_matrix("basis", self.basis)
        check_bound(self.bound)
        checks.within(1, self.params, rank=self.dim, remedy="ask for a smaller subspace")

    @property
    def params(self) -> int:
        return self.basis.shape[1]

    @property
    def dim(self) -> int:
        return self.basis.shape[0]

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units k"]:
        """Project, then clip to the unit ball; a row that is not finite becomes 0."""
        finite, _ = finite_rows(rows, self.params)
        basis = self._on(finite.device, self.basis)
        # Row by row, each in memory of its own: a product may round a row differently beside others or at another
        # alignment, and a unit's contribution must depend on that unit alone, to the last bit.
        encoded = finite.new_zeros(len(finite), self.dim)
        for row, out in zip(finite, encoded, strict=True):
            out.copy_(torch.mv(basis, row.clone()))
        return in_unit_ball(encoded.div_(self.bound))

    def decode(self, total: Float64[Tensor, " k"], expected_units: float) -> Float64[Tensor, " params"]:
        """The noisy sum as a mean update, back in parameter space."""
        return (total * (self.bound / expected_units)) @ self._on(total.device, self.basis)

    def spread(self) -> Float64[Tensor, " params"]:
        return _column_lengths(self.basis) * self.bound

    def arrays(self) -> dict[str, Tensor]:
        return {"basis": self.basis.flatten()}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "subspace", "bound": self.bound, "rank": self.dim, "params": self.params}

    def __eq__(self, other: object) -> bool:
        return same_arrays(self, other)

    def __repr__(self) -> str:
        return f"SubspaceClip(bound {self.bound:g}, {self.dim} of {self.params} directions)"


RIDGE = 1e-6
"""Default eta, as a share of the mean diagonal of G^T G."""

_STABILITY = 1e-8


@dataclass(frozen=True, eq=False, repr=False)
class CoefficientClip(_Spanned):
    """PE-SGD: the direction of a row, in coefficients of public gradients.

    Attributes:
        gradients: G^T, float32 ``[n, d]``, one public gradient per row; rows may depend on each other linearly.
        ridge: eta / mean diagonal of G^T G, > 0.
    """

    gradients: Float32[Tensor, "n d"]
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        checks.positive(ridge=self.ridge)
        _check_matrix("gradients", self.gradients)

    @property
    def params(self) -> int:
        return self.gradients.shape[1]

    @property
    def dim(self) -> int:
        return self.gradients.shape[0]

    @cached_property
    def _factors(self) -> dict[torch.device, Float64[Tensor, "n n"] | None]:
        return {}

    def _factor_on(self, device: torch.device) -> Float64[Tensor, "n n"] | None:
        """Cholesky factor of G^T G + eta I; None where that is not to be had: all gradients zero, or too large."""
        if device not in self._factors:
            rows = self._on(device, self.gradients)
            gram = rows @ rows.T
            gram.diagonal().add_(self.ridge * gram.diagonal().mean())
            factor, failed = torch.linalg.cholesky_ex(gram)
            self._factors[device] = None if bool(failed) or not bool(factor.isfinite().all()) else factor
        return self._factors[device]

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units n"]:
        """Solve for the coefficients of every row and normalise them; what is not finite becomes 0."""
        finite, _ = finite_rows(rows, self.params)
        encoded = finite.new_zeros(len(finite), self.dim)
        matrix, factor = self._on(finite.device, self.gradients), self._factor_on(finite.device)
        if factor is None:
            return encoded
        for row, out in zip(finite, encoded, strict=True):  # row by row, see SubspaceClip
            out.copy_(torch.cholesky_solve(torch.mv(matrix, row.clone()).unsqueeze(1), factor).squeeze(1))
        largest = encoded.abs().amax(dim=1, keepdim=True)
        encoded.div_(largest.clamp_min(1.0))  # the square of a norm must not overflow
        encoded[~largest.squeeze(1).isfinite()] = 0.0
        return in_unit_ball(encoded.div_(squared_norms(encoded).sqrt_().add_(_STABILITY).unsqueeze(1)))

    def decode(self, total: Float64[Tensor, " n"], expected_units: float) -> Float64[Tensor, " params"]:
        """Turn a noisy sum z of coefficients into the mean update G z / (q N)."""
        return (total / expected_units) @ self._on(total.device, self.gradients)

    def spread(self) -> Float64[Tensor, " params"]:
        return _column_lengths(self.gradients)

    def arrays(self) -> dict[str, Tensor]:
        return {"gradients": self.gradients.flatten()}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "coefficients", "rank": self.dim, "params": self.params, "ridge": self.ridge}

    def __eq__(self, other: object) -> bool:
        return same_arrays(self, other)

    def __repr__(self) -> str:
        return f"CoefficientClip({self.dim} gradients of {self.params} values)"


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddingResidualClip(_Spanned):
    """GEP: what of a row lies in a public subspace, and the rest, clipped apart and released together.

    Attributes:
        basis: V, float32 ``[k, d]``, orthonormal rows (needed for a decode without distortion, not for privacy).
        embedding_bound: S0, L2 threshold of V x.
        residual_bound: S1, L2 threshold of x - V^T V x.
        share: p in (0, 1), the embedding's share of 1/z^2; the paper gives both parts the same noise multiplier.
    """

    basis: Float32[Tensor, "k d"]
    embedding_bound: float
    residual_bound: float
    share: float = 0.5

    def __post_init__(self) -> None:
        _check_matrix("basis", self.basis)
        check_bound(self.embedding_bound)
        check_bound(self.residual_bound)
        checks.within(1e-6, 1 - 1e-6, share=self.share, remedy="for the embedding alone clip in the subspace")

    @property
    def params(self) -> int:
        return self.basis.shape[1]

    @property
    def dim(self) -> int:
        return sum(self.basis.shape)

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units k"]:
        """Embedding and residual of every row, each clipped; a row that is not finite becomes 0."""
        finite, _ = finite_rows(rows, self.params)
        basis = self._on(finite.device, self.basis)
        rank = len(basis)
        encoded = finite.new_zeros(len(finite), self.dim)
        for row, out in zip(finite, encoded, strict=True):  # row by row, see SubspaceClip
            inside = torch.mv(basis, row.clone())
            out[:rank] = inside
            out[rank:] = row - torch.mv(basis.T, inside)
        in_unit_ball(encoded[:, :rank].div_(self.embedding_bound)).mul_(self.share**0.5)
        in_unit_ball(encoded[:, rank:].div_(self.residual_bound)).mul_((1 - self.share) ** 0.5)
        return in_unit_ball(encoded)

    def decode(self, total: Float64[Tensor, " k"], expected_units: float) -> Float64[Tensor, " params"]:
        """Turn a noisy sum into the mean update V^T (mean embedding) + mean residual."""
        rank = self.basis.shape[0]
        embedding = total[:rank] * (self.embedding_bound / (expected_units * self.share**0.5))
        residual = total[rank:] * (self.residual_bound / (expected_units * (1 - self.share) ** 0.5))
        mean: Tensor = embedding @ self._on(total.device, self.basis) + residual
        return mean

    def spread(self) -> Float64[Tensor, " params"]:
        embedding = _column_lengths(self.basis) * (self.embedding_bound / self.share**0.5)
        return torch.hypot(embedding, embedding.new_tensor(self.residual_bound / (1 - self.share) ** 0.5))

    def arrays(self) -> dict[str, Tensor]:
        return {"basis": self.basis.flatten()}

    def to_json(self) -> dict[str, Any]:
        bounds = {"embedding_bound": self.embedding_bound, "residual_bound": self.residual_bound, "share": self.share}
        return {"kind": "embedding-residual", "rank": self.basis.shape[0], "params": self.params, **bounds}

    def __eq__(self, other: object) -> bool:
        return same_arrays(self, other)

    def __repr__(self) -> str:
        return f"EmbeddingResidualClip({self.basis.shape[0]} of {self.params} directions and the rest)"


def _column_lengths(matrix: Float32[Tensor, "k d"]) -> Float64[Tensor, " d"]:
    lengths: Tensor = torch.linalg.vector_norm(matrix, dim=0, dtype=torch.float64)
    return lengths


def _check_matrix(name: str, matrix: Tensor) -> None:
    if matrix.dim() != 2 or 0 in matrix.shape or matrix.dtype != torch.float32:
        raise ValueError(
            f"{name} must be a float32 matrix with a row per direction, got {matrix.dtype} of shape "
            f"{tuple(matrix.shape)}"
        )
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{name} must be finite, it is not; the public gradients overflowed")
