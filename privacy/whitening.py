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
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float32, Float64, Real
from torch import Tensor

from privacy.clip_map import check_length, check_scales, check_vector, finite_rows, in_unit_ball, same_arrays
from privacy.geoclip import GeoClip


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
        """What travels beside the JSON, as float32 vectors."""
        return {"centre": self.centre, "scale": self.scale}

    def to_json(self) -> dict[str, Any]:
        return {"kind": "adaclip", "params": self.params}

    def __eq__(self, other: object) -> bool:
        return same_arrays(self, other)

    def __repr__(self) -> str:
        return f"AdaClip({self.params} scales)"


def whitening_from_json(data: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> AdaClip | GeoClip:
    """Rebuild a map from ``to_json`` and ``arrays``; KeyError or ValueError where they do not fit."""
    if data["kind"] == "adaclip":
        clip = AdaClip(arrays["centre"], arrays["scale"])
        if clip.params != data["params"]:
            raise ValueError(f"scale must have {data['params']} values, got {clip.params}")
        return clip
    return GeoClip(
        arrays["centre"],
        arrays["directions"],
        arrays["weights"],
        arrays["rest"],
        tuple(map(int, data["sizes"])),
        tuple(map(int, data["ranks"])),
    )
