"""Projecting on the leading directions of public gradients: what PDP-SGD does to a released update.

    u <- V^T V u,   V [k, d] the leading right singular vectors of public gradients

Reference: Zhou, Wu, Banerjee 2021, "Bypassing the Ambient Dimension: Private SGD with Gradient Subspace Identification"
(arXiv 2007.03813), Algorithm 1. Guarantee: post-processing of the release. The noise that is left is handed on, so that
an optimizer which corrects for noise corrects for what there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Projecting:
    """An optimizer that is given the released update projected on V: PDP-SGD.

    Attributes:
        inner: the optimizer.
        basis: V ``[k, d]``, orthonormal rows, in the coordinates of the sent vector.
        scales: those of the sent vector, which an optimizer's coordinates are without; None where all are 1.
    """

    inner: Any
    basis: Float[Tensor, "k d"]
    scales: Float[Tensor, " d"] | None = None

    @property
    def reads_public_loss(self) -> bool:
        return bool(self.inner.reads_public_loss)

    @property
    def moments(self) -> Mapping[str, Any]:
        moments: Mapping[str, Any] = self.inner.moments
        return moments

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.inner.init(parameters)
        return state

    def step(self, state: dict[str, Tensor], parameters: Tensor, step: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The inner step, with the noise that is left after projecting."""
        v = self.basis.double()
        into, out = (v, v) if self.scales is None else (v * self.scales, v / self.scales)
        update = (into @ step.update.double()) @ out
        covariance = (into * step.noise_std.double()) @ (into * step.noise_std.double()).T
        std = ((covariance @ out) * out).sum(dim=0).clamp_min(0.0).sqrt()
        given = replace(step, update=update.to(step.update.dtype), noise_std=std)
        stepped: tuple[dict[str, Tensor], Tensor] = self.inner.step(state, parameters, given)
        return stepped


def leading(rows: Float[Tensor, "n d"], rank: int) -> Float[Tensor, "k d"]:
    """The `rank` leading right singular vectors of the rows, orthonormal also where rows depend on each other."""
    wide = rows.double()
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    basis: Tensor = torch.linalg.qr(wide.T @ vectors[:, -rank:].flip(1)).Q.T.float().contiguous()
    return basis
