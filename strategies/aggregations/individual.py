r"""Aggregations that need every client's own factors: FLoRA, FedEx-LoRA, FedGSA. Not for client-level privacy.

With s = alpha / r and n clients that hold W0 + s B_k A_k:

    flora:   B = [B_1 ... B_n],  A = [A_1; ...; A_n] / n        s B A = s mean_k B_k A_k goes into W0, adapters restart
    fedex:   B = mean_k B_k,  A = mean_k A_k                    the residual s (mean_k B_k A_k - B A) goes into W0
    fedgsa:  M_k = B_k A with A shared, U_k its r left singular vectors, U_g the r leading eigenvectors of
             mean_k U_k U_k^T;  U S V^T = svd(U_g^T mean_k M_k),  A <- V^T,  B <- U_g U S

References: FLoRA: Wang et al. 2024 (arXiv 2409.05976); FedEx-LoRA: Singhal et al. 2024 (arXiv 2410.09432); FedGSA
(arXiv 2608.03267).
Guarantee: none of their own. Products and subspaces of single clients cannot be had from a noisy sum of factors, and
releasing the factors themselves would need noise on every client. So they are refused where the unit is a client. They
are post-processing, hence free, where every client's factors are already private when they leave it: record-level noise
in each client. The functions below are for such factors, and weigh clients alike, because sizes are private.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters, Aggregation

Pair = tuple[Float[Tensor, "out _"], Float[Tensor, "_ in"]]
"""B and A of one client and one adapted layer, already private; clients may differ in rank."""


def stack_factors(factors: Sequence[Pair]) -> tuple[Float[Tensor, "out R"], Float[Tensor, "R in"]]:
    """FLoRA: factors of rank R = sum of ranks whose product is the mean of the products; ranks may differ."""
    _not_empty(factors)
    return torch.cat([b for b, _ in factors], dim=1), torch.cat([a for _, a in factors]) / len(factors)


def average_factors(
    factors: Sequence[Pair], scale: float
) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"], Float[Tensor, "out in"]]:
    """FedEx: mean factors, and the residual that W0 must take so that the mean of the products is met exactly."""
    _not_empty(factors)
    b, a = (torch.stack([pair[i] for pair in factors]).mean(0) for i in (0, 1))
    exact_b, exact_a = stack_factors(factors)
    return b, a, scale * (exact_b @ exact_a - b @ a)


def shared_subspace(
    bs: Sequence[Float[Tensor, "out r"]], a: Float[Tensor, "r in"]
) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
    """FedGSA: factors of the mean product, projected on the r output directions the clients agree on most.

    Args:
        bs: B of every client.
        a: the shared, frozen A.
    """
    _not_empty(bs)
    rank = a.shape[0]
    _, triangle = torch.linalg.qr(a.T)
    directions = [torch.linalg.svd(b @ triangle.T, full_matrices=False).U[:, :rank] for b in bs]
    # The leading eigenvectors of the mean projector are the left singular vectors of the directions side by side.
    common = torch.linalg.svd(torch.cat(directions, dim=1), full_matrices=False).U[:, :rank]
    u, singular, v = torch.linalg.svd(common.T @ torch.stack(list(bs)).mean(0) @ a, full_matrices=False)
    return common @ (u * singular), v


def _not_empty(factors: Sequence[object]) -> None:
    if not factors:
        raise ValueError("factors must be of at least one client, got none")


class _OfEachClient(Aggregation):
    """What the three have in common: all ranks of everyone, and the factors are put together where they arrive."""

    individual: ClassVar[bool] = True

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        return TrainedSubset("both")


@dataclass(frozen=True)
class Flora(_OfEachClient):
    """The FLoRA aggregation, see :func:`stack_factors`."""


@dataclass(frozen=True)
class FedEx(_OfEachClient):
    """The FedEx-LoRA aggregation, see :func:`average_factors`."""


@dataclass(frozen=True)
class FedGsa(_OfEachClient):
    """The FedGSA aggregation, see :func:`shared_subspace`."""

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        return TrainedSubset("b")
