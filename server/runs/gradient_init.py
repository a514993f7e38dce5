r"""Input directions of the adapters from public gradients, instead of random ones.

    A = c V_r^T,   V_r the r leading eigenvectors of  sum_i G_i^T G_i,   G_i = d loss_i / d W  [out, in]

The i are public records. What a client can change through B is the part of its gradient that lies in the rows of A:
with random A about r / in of its energy, with these most of it, at the same number of trained values and so under the
same noise. The G_i are taken where the head has been trained but no adapter acts. They are not formed: with A = 0 and
a random B, the gradient of A is (alpha / r) B^T G_i, a sketch of G_i that keeps its input side.

c makes the gradients of all B together as long as those of the heads (root mean square over the public records), so
that one threshold clips both alike. Where there is no head, the rows of A get the length that they had.

Reference: starting LoRA from the singular vectors of a gradient is LoRA-GA (Wang, Yu, Li 2024, arXiv 2407.05000v1),
there from a batch of the training data and for both factors; freezing A is FFA-LoRA (Sun et al. 2024).
Guarantee: A is a function of public records alone, so nothing is paid for it.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from client.data.records import Records
from client.engine.engine import Engine
from privacy.randomness.rng import torch_generator
from strategies.adapter.layout import AdapterLayout, Entry


def aligned(
    start: Float[Tensor, " size"], warm: Float[Tensor, " size"], engine: Engine, records: Records, seed: int
) -> Float[Tensor, " size"]:
    """``start`` with the rows of every A aligned, and the engine left training what it trained.

    Args:
        start: full vector, of which heads and B (zero) are kept.
        warm: full vector with trained heads; a head that has learnt nothing has no gradient to give.
        engine: any engine on the run's model.
        records: the public records.
        seed: of the random B.
    """
    layout = engine.layout
    factors = _factors(layout)
    probe = warm.clone()
    for number, (a, b) in enumerate(_pairs(layout)):
        draws = torch.randn(b.shape, generator=torch_generator(seed, "alignment", number))
        b.of(probe).copy_(draws / math.sqrt(b.shape[0]))
        a.of(probe).zero_()
    result = start.clone()
    engine.train_factors("a")
    moments = {a.name: torch.zeros(a.shape[1], a.shape[1]) for a, _ in _pairs(layout)}
    for rows in _gradients(engine, probe, records):
        for entry, offset in engine.layout.trainable_entries():
            if entry.factor == "A":
                sketches = rows[:, offset : offset + entry.size].reshape(-1, entry.shape[1])
                moments[entry.name].addmm_(sketches.T, sketches)
    for a, b in _pairs(layout):
        length = a.of(start).norm(dim=1).square().mean().sqrt()
        _, vectors = torch.linalg.eigh(moments[a.name].double())
        a.of(result).copy_(vectors[:, -a.shape[0] :].flip(1).T * length)
        a.of(probe).copy_(a.of(result))
        b.of(probe).zero_()
    engine.train_factors("b")
    adapters = heads = 0.0
    for rows in _gradients(engine, probe, records):
        for entry, offset in engine.layout.trainable_entries():
            energy = float(rows[:, offset : offset + entry.size].double().square().sum())
            adapters, heads = (adapters, heads + energy) if entry.factor == "head" else (adapters + energy, heads)
    engine.train_factors(factors)
    if adapters > 0 and heads > 0:
        for a, _ in _pairs(layout):
            a.of(result).mul_(math.sqrt(heads / adapters))
    return result


def _pairs(layout: AdapterLayout) -> Iterator[tuple[Entry, Entry]]:
    """A and B of every adapter."""
    of = {(entry.pair, entry.factor): entry for entry in layout.entries}
    yield from ((entry, of[entry.pair, "B"]) for entry in layout.entries if entry.factor == "A")


def _factors(layout: AdapterLayout) -> str:
    trained = {entry.factor for entry in layout.entries if entry.trainable}
    return "both" if {"A", "B"} <= trained or not trained & {"A", "B"} else "a" if "A" in trained else "b"


def _gradients(engine: Engine, vector: Tensor, records: Records) -> Iterator[Tensor]:
    for chunk in engine.per_record_gradients(vector, records):
        yield chunk.rows.float().cpu()
