r"""Averaging silos that are private already: the server adds no noise and is not trusted with anything.

    plain, ffa:   x_{t+1} = x_t + (1/n) sum_k Delta_k        over the n silos that sent an update
    flora:        B A = the best rank-r factors of (1/n) sum_k B_k A_k
    fedgsa:       A shared, B and A from the silos' common subspace, see ``aggregation/individual.py``

Delta_k is what K private steps of silo k moved the adapter (``client/silo_member.py``), B_k and A_k its factors after
them. References: McMahan et al. 2017 (arXiv 1602.05629v4); Liu et al., "DP-LoRA" (arXiv 2312.17493), for averaging
LoRA factors that were trained by DP-SGD in every client; FLoRA and FedGSA as in ``aggregation/individual.py``.
Guarantee: post-processing of the silos' releases. Each silo's epsilon is its own, for one unit of its own data. Silos
weigh alike, since sizes may be private; a silo that refuses, fails or sends nonsense is left out of the mean.
Deviations: FLoRA writes the sum of the products into W0 and restarts its adapters; here W0 stays what it is, and the
mean of the products is kept at the adapter's rank, so what lies beyond it is lost. FedEx differs from plain by nothing
but the residual that it writes into W0, so it is refused here.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from client.lora import AdapterLayout
from strategies.aggregation.individual import FedEx, FedGsa, Flora, shared_subspace, stacked

log = logging.getLogger(__name__)

Combine = Callable[[Float[Tensor, " size"], Sequence[Float[Tensor, " size"]], AdapterLayout], Float[Tensor, " size"]]
"""From the global adapter and the silos' updates of it to the next global adapter."""


@dataclass(frozen=True)
class SiloAnswer:
    """What one silo sent, checked.

    Attributes:
        silo: its number.
        update: float32 ``[size]``, None if it took no step.
        steps: private steps taken.
        refused: why it took none or fewer than asked.
    """

    silo: int
    update: Float[Tensor, " size"] | None
    steps: int
    refused: str


def combine_of(aggregation: object) -> Combine:
    """How silos are put together under an aggregation of ``strategies``.

    Raises:
        ValueError: FedEx, whose residual has no place in an adapter.
    """
    if isinstance(aggregation, FedEx):
        raise ValueError(
            "fedex writes a residual into the base model, which stays frozen here; take plain, which is fedex without "
            "it, or flora or fedgsa"
        )
    if isinstance(aggregation, Flora):
        return best_rank
    return common_subspace if isinstance(aggregation, FedGsa) else averaged


def averaged(adapter: Tensor, updates: Sequence[Tensor], layout: AdapterLayout) -> Tensor:
    """The mean update, added."""
    return adapter + torch.stack(list(updates)).mean(dim=0)


def best_rank(adapter: Tensor, updates: Sequence[Tensor], layout: AdapterLayout) -> Tensor:
    """Factors of the mean of the silos' products, cut to the adapter's rank; heads are averaged.

    The singular values are shared evenly: B = U sqrt(S), A = sqrt(S) V^T.
    """
    result = averaged(adapter, updates, layout)
    for a, b in _pairs(layout):
        silos = [(_of(layout, b, adapter + update), _of(layout, a, adapter + update)) for update in updates]
        tall, wide = stacked([(left.double(), right.double()) for left, right in silos])
        rank = silos[0][1].shape[0]
        q, triangle = torch.linalg.qr(tall)
        u, singular, v = torch.linalg.svd(triangle @ wide, full_matrices=False)
        root = singular[:rank].sqrt()
        _of(layout, b, result).copy_((q @ u[:, :rank]) * root)
        _of(layout, a, result).copy_(root[:, None] * v[:rank])
    return result


def common_subspace(adapter: Tensor, updates: Sequence[Tensor], layout: AdapterLayout) -> Tensor:
    """FedGSA for every adapter; heads are averaged."""
    result = averaged(adapter, updates, layout)
    for a, b in _pairs(layout):
        shared = _of(layout, a, adapter).double()
        bs = [_of(layout, b, adapter + update).double() for update in updates]
        if all(bool((matrix == 0).all()) for matrix in bs):
            continue  # nothing was learnt yet: there is no direction to agree on
        left, right = shared_subspace(bs, shared)
        _of(layout, b, result).copy_(left)
        _of(layout, a, result).copy_(right)
    return result


def _pairs(layout: AdapterLayout) -> list[tuple[str, str]]:
    """The names of A and of B of every adapter."""
    names: dict[str, dict[str, str]] = {}
    for entry in layout.entries:
        if entry.factor != "head":
            names.setdefault(entry.pair, {})[entry.factor] = entry.name
    return [(factors["A"], factors["B"]) for factors in names.values()]


def _of(layout: AdapterLayout, name: str, full: Tensor) -> Tensor:
    return next(entry for entry in layout.entries if entry.name == name).of(full)


def next_adapter(
    adapter: Float[Tensor, " size"], answers: Iterable[SiloAnswer], combine: Combine, layout: AdapterLayout, round: int
) -> Float[Tensor, " size"]:
    """The next global adapter; the old one if no silo took a step. Refusals are logged, and the round goes on."""
    updates = []
    for answer in sorted(answers, key=lambda answer: answer.silo):  # one order: sums of floats depend on it
        if answer.refused:
            log.warning("round %d: silo %d took %d steps: %s", round, answer.silo, answer.steps, answer.refused)
        if answer.update is not None:
            updates.append(answer.update)
    if not updates:
        log.warning("round %d: no silo took a step; the adapter stays as it is", round)
        return adapter
    return combine(adapter, updates, layout)
