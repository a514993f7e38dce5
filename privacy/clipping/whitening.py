r"""Clip maps that whiten: rows are moved and rescaled before they are clipped, so that noise goes where signal is.

    encode:  e(x) = clip_1( M (x - a) )        decode:  x = a + M^+ (noisy sum) / (q N)

=========  ==============================================  =====================================================
map        M                                               source
=========  ==============================================  =====================================================
AdaClip    diag(1/b), b_i = sqrt(s_i sum_l s_l)            Pichapati et al. 2019, AdaCliP (arXiv 1908.07643v2)
GeoClip    eigenvectors times weights lambda^(-1/4)        Gilani et al. 2025 (arXiv 2506.06549)
=========  ==============================================  =====================================================

s are standard deviations of single coordinates, lambda eigenvalues of the covariance of rows about a. Both maps are
what minimises the noise E||M^+ n||^2 while E||M (x - a)||^2 = 1 (AdaCliP over diagonal M). Flat clipping at the same
mean square spends d sum_i s_i^2 where AdaCliP spends (sum_i s_i)^2 and GeoClip (sum_i sqrt(lambda_i))^2.

Guarantee: L2 sensitivity 1 in encoded space whatever a and M are, because clipping is the last step of ``encode``; a
and M must be public or made of earlier releases. With n units the released mean is a (1 - n/(qN)) + (sum of rows)/(qN):
unbiased under Poisson sampling, and the realised n divides nothing.
(What Opacus calls AdaClip is quantile clipping, Andrew et al. 2021.)

Deviations of GeoClip: beside the paper's full and low-rank forms, one in which what is outside the leading directions
shares one weight instead of being lost; blocks, so that the (A, B) pairs of a LoRA adapter have eigenvectors of their
own.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Real
from torch import Tensor

from privacy import checks
from privacy.clipping.clip_map import check_length, check_scales, check_vector, finite_rows, in_unit_ball, same_arrays


@dataclass(frozen=True, eq=False, repr=False)
class AdaClip:
    """AdaCliP: one centre and one scale per coordinate.

    Attributes:
        centre: m, float32 ``[d]``.
        scale: b > 0, float32 ``[d]``; a row is clipped where sum_i ((x_i - m_i) / b_i)^2 > 1.
    """

    centre: Float32[Tensor, " d"]
    scale: Float32[Tensor, " d"]

    def __post_init__(self) -> None:
        checks.not_empty(scale=self.scale)
        check_vector("centre", self.centre)
        check_scales("scale", self.scale)
        check_length("centre", self.centre, len(self.scale))

    @property
    def params(self) -> int:
        return len(self.scale)

    @property
    def dim(self) -> int:
        return len(self.scale)

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units params"]:
        """Centre, rescale, clip to the unit ball; a row that is not finite becomes 0."""
        copy, norms = finite_rows(rows, self.params)
        lost = (norms == 0) & (rows != 0).any(dim=1)
        copy.sub_(self.centre.to(copy)).div_(self.scale.to(copy))
        copy[lost] = 0.0
        return in_unit_ball(copy)

    def decode(self, total: Float64[Tensor, " params"], expected_units: float) -> Float64[Tensor, " params"]:
        """The noisy sum as a mean update."""
        return self.centre.to(total) + total * self.scale.to(total) / expected_units

    def spread(self) -> Float64[Tensor, " params"]:
        return self.scale.double()

    def arrays(self) -> dict[str, Tensor]:
        return {"centre": self.centre, "scale": self.scale}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "adaclip", "params": self.params}

    def __eq__(self, other: object) -> bool:
        return same_arrays(self, other)

    def __repr__(self) -> str:
        return f"AdaClip({self.params} scales)"


def whitening_weights(
    eigenvalues: Float[Tensor, " n"], multiplicities: Float[Tensor, " n"] | float = 1.0
) -> Float64[Tensor, " n"]:
    r"""GeoClip's weights of eigenvectors, c_j = (sum_i n_i sqrt(lambda_i))^(-1/2) lambda_j^(-1/4).

    Then sum_j n_j c_j^2 lambda_j = 1, and sum_j n_j / c_j^2 = (sum_j n_j sqrt(lambda_j))^2 is least (Lagrange).

    Args:
        eigenvalues: lambda_j > 0.
        multiplicities: n_j, how many directions share an eigenvalue.
    """
    roots = eigenvalues.double().sqrt()
    scale = (roots * multiplicities).sum()
    return (scale * roots).rsqrt()


@dataclass(frozen=True, eq=False, repr=False)
class GeoClip:
    r"""GeoClip on consecutive blocks of a row, clipped together: in each, some directions have weights of their own.

    Block j, y = (x - a)_j, with orthonormal rows V_j ``[k_j, d_j]``, weights c_j and one weight r_j for the rest:
    w_j = r_j (y - V_j^T V_j y) + V_j^T diag(c_j) V_j y, the symmetric root of whitening by a covariance with k_j
    eigenvalues of its own and one that the d_j - k_j others share. r_j = 0 is the paper's low-rank form,
    w_j = diag(c_j) V_j y in k_j coordinates: what lies outside is lost. k_j = d_j is the full form.

    Attributes:
        centre: a, float32 ``[d]``.
        directions: V_j row by row, block after block, float32 ``[sum_j k_j d_j]``.
        weights: c_j > 0, float32 ``[sum_j k_j]``.
        rest: r_j >= 0, float32, one per block; all zero or all positive.
        sizes: d_j, which sum to d.
        ranks: k_j, 0 <= k_j <= d_j.
    """

    centre: Float32[Tensor, " d"]
    directions: Float32[Tensor, " kd"]
    weights: Float32[Tensor, " k"]
    rest: Float32[Tensor, " blocks"]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        checks.not_empty(sizes=self.sizes)
        checks.same_length(sizes=self.sizes, ranks=self.ranks)
        check_length("rest", self.rest, len(self.sizes))
        check_vector("centre", self.centre)
        check_vector("directions", self.directions)
        check_scales("weights", self.weights)
        if self.projects:
            checks.integer_at_least(1, rank=min(self.ranks), remedy="a projection on nothing releases nothing")
        else:
            check_scales("rest", self.rest)
        for size, rank in zip(self.sizes, self.ranks, strict=True):
            checks.within(0, size, rank=rank)
        check_length("centre", self.centre, sum(self.sizes))
        check_length("weights", self.weights, sum(self.ranks))
        pairs = zip(self.ranks, self.sizes, strict=True)
        check_length("directions", self.directions, sum(rank * size for rank, size in pairs))

    @property
    def projects(self) -> bool:
        """Whether only the directions are released."""
        return not bool(self.rest.any())

    @property
    def params(self) -> int:
        return sum(self.sizes)

    @property
    def dim(self) -> int:
        return sum(self.ranks) if self.projects else self.params

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units k"]:
        """Centre, whiten, clip to the unit ball; a row that is not finite becomes 0."""
        copy, norms = finite_rows(rows, self.params)
        lost = (norms == 0) & (rows != 0).any(dim=1)
        copy.sub_(self.centre.to(copy))
        encoded = copy.new_zeros(len(copy), self.dim)
        blocks = self._blocks(copy.device)
        # Row by row, each in memory of its own: a product may round a row differently beside others or at another
        # alignment, and a unit's contribution must depend on that unit alone, to the last bit.
        for row, out in zip(copy, encoded, strict=True):
            torch.cat([_whitened(row[part].clone(), v, c, r) for part, v, c, r in blocks], out=out)
        encoded[lost] = 0.0
        return in_unit_ball(encoded)

    def decode(self, total: Float64[Tensor, " k"], expected_units: float) -> Float64[Tensor, " params"]:
        """The noisy sum as a mean update."""
        mean, parts, start = total / expected_units, [], 0
        for part, v, c, r in self._blocks(total.device):
            size = len(c) if self.projects else part.stop - part.start
            block, start = mean[start : start + size], start + size
            parts.append((block / c) @ v if self.projects else _whitened(block, v, 1 / c, 1 / r))
        return self.centre.to(total) + torch.cat(parts)

    def spread(self) -> Float64[Tensor, " params"]:
        parts = []
        for part, v, c, r in self._blocks(self.centre.device):
            if self.projects:
                parts.append((v / c[:, None]).square().sum(dim=0))
            else:
                base = v.new_full((part.stop - part.start,), float(r) ** -2)
                parts.append(base + (c**-2 - r**-2) @ v.square())
        return torch.cat(parts).clamp_min(0).sqrt()

    def arrays(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("centre", "directions", "weights", "rest")}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "geoclip", "sizes": list(self.sizes), "ranks": list(self.ranks)}

    def __eq__(self, other: object) -> bool:
        return same_arrays(self, other)

    def __repr__(self) -> str:
        return f"GeoClip({self.params} values, {sum(self.ranks)} directions in {len(self.sizes)} blocks)"

    def _blocks(self, device: torch.device) -> list[tuple[slice, Tensor, Tensor, Tensor]]:
        """Of each block: where it lies in a row, V, c, r, in float64."""
        parts = [slice(*ends) for ends in pairwise(accumulate(self.sizes, initial=0))]
        sizes = [k * d for k, d in zip(self.ranks, self.sizes, strict=True)]
        matrices = torch.split(self.directions.to(device, torch.float64), sizes)
        weights = torch.split(self.weights.to(device, torch.float64), list(self.ranks))
        rest = self.rest.to(device, torch.float64)
        return [
            (part, matrix.view(len(c), part.stop - part.start), c, r)
            for part, matrix, c, r in zip(parts, matrices, weights, rest, strict=True)
        ]


def _whitened(y: Tensor, v: Tensor, c: Tensor, r: Tensor) -> Tensor:
    inside = torch.mv(v, y)
    if not bool(r):
        return c * inside
    return r * y + torch.mv(v.T, (c - r) * inside)
