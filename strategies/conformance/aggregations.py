"""Checks of what a run relies on in a LoRA aggregation."""

import numpy as np
import torch
from torch import Tensor

from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.contribution import Plan, contribute, validate
from privacy.randomness.rng import simulation_generator
from strategies.adapter.layout import AdapterLayout, Entry
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters, Aggregation, Rewritten
from strategies.conformance.purity import Subject, raise_broken, rule

RANK, CLIENTS, ROUNDS, BOUND = 4, 40, 12, 0.7
_LAYOUT = AdapterLayout(
    (
        Entry("q.lora_A.weight", (RANK, 6), 0, "A", "q"),
        Entry("q.lora_B.weight", (5, RANK), 24, "B", "q"),
        Entry("v.lora_A.weight", (RANK, 4), 44, "A", "v"),
        Entry("v.lora_B.weight", (4, RANK), 60, "B", "v"),
        Entry("classifier.weight", (2, 5), 76, "head", "classifier"),
    )
)


def check_aggregation(aggregation: Aggregation, *, seed: int = 0) -> None:
    """Raise ConformanceError unless ``aggregation`` keeps its contract on a small adapter of rank 4.

    Checked, under the names of the rules: the protocol is there ("protocol"); it works on the noisy sum of the sent
    vectors, not on single clients' factors ("sum"); what a round trains is decided by configuration, round and public
    seed alone ("deterministic", "inputs", "global randomness"), and fits the adapters ("part"); one client moves the
    sum of the sent vectors by at most C after clipping, whatever it trained, and what it sends comes back as it was
    ("sensitivity"); a client's ranks follow from its id ("ranks"); rewriting changes the coordinates of the adapter,
    not the model: B'A' = BA and B' = B R, heads untouched ("rewriting").

    Args:
        seed: of the made-up adapters and updates.
    """
    for member in vars(Aggregation):
        if not member.startswith("_") and not hasattr(aggregation, member):
            raise_broken("protocol", f"{type(aggregation).__name__} has no {member}", "see strategies/aggregation")
    if aggregation.individual:
        raise_broken(
            "sum",
            f"{type(aggregation).__name__} needs every client's own factors",
            "client-level privacy releases the noisy sum alone; take what you need from that, with individual = False",
        )
    subject = Subject(aggregation)
    for adapters in (Adapters(RANK, CLIENTS, seed), Adapters(RANK, CLIENTS, seed + 1)):
        ranks = _check_ranks(subject, adapters)
        for round in range(1, ROUNDS + 1):
            part = subject.call("part", adapters, round, form=lambda part: part.to_json())
            if not isinstance(part, TrainedSubset):
                raise_broken(
                    "part", f"round {round} trains {part!r}", "return a strategies.adapter.trainable.TrainedSubset"
                )
            with rule("part", f"what round {round} trains does not fit adapters of rank {RANK}", "mend part()"):
                part.layout(_LAYOUT)
            _check_sensitivity(part, ranks, round, seed)
    for number in range(3):
        adapter = _made_up(seed, number, _LAYOUT.size)
        if number == 0:  # a run starts with B = 0
            for entry in _LAYOUT.entries:
                entry.of(adapter).mul_(float(entry.factor != "B"))
        _check_rewriting(subject, adapter)


def _check_ranks(subject: Subject, adapters: Adapters) -> np.ndarray | None:
    everybody = np.arange(adapters.clients, dtype=np.int64)

    def asked(clients: np.ndarray) -> np.ndarray | None:
        form = lambda ranks: None if ranks is None else ranks.tolist()  # noqa: E731
        ranks: np.ndarray | None = subject.call("client_ranks", adapters, clients, form=form)
        return ranks

    ranks = asked(everybody)
    if ranks is None:
        return None
    if ranks.shape != (adapters.clients,) or not bool(((ranks >= 1) & (ranks <= adapters.rank)).all()):
        raise_broken("ranks", f"client_ranks gives {ranks!r}", f"one number from 1 to {adapters.rank} per client")
    some = everybody[[1, 2, 7, 19, 30]]
    alone = asked(some)
    if alone is None or not np.array_equal(alone, ranks[some]):
        raise_broken(
            "ranks", "a client's rank depends on who else is asked", "decide it by the client's id and the seed"
        )
    return ranks


def _check_sensitivity(part: TrainedSubset, ranks: np.ndarray | None, round: int, seed: int) -> None:
    """Sent vectors of wild clients, clipped and summed by the real mechanism, with and without one of them."""
    remedy = "let part() alone decide what is sent; it is clipped whole"
    engine = _LAYOUT.training(part.factors)
    dim = part.layout(_LAYOUT).dim
    updates = torch.stack([_made_up(seed, 100 * round + i, engine.dim) * 10.0 ** (i - 2) for i in range(6)])
    with rule("sensitivity", f"vectors of round {round} cannot be sent and received", remedy):
        sent = part.sent_rows(engine, updates)
        back = part.engine_rows(engine, sent)
        again = part.sent_rows(engine, back)
    if sent.shape != (6, dim) or not torch.allclose(again, sent, rtol=1e-5):
        raise_broken("sensitivity", f"what is sent in round {round} does not come back as it was", remedy)
    clients = sent
    if ranks is not None:
        full = engine.with_trainable(updates.new_zeros(6, engine.size), updates)
        cut = torch.stack(
            [engine.trainable_values(engine.truncate_ranks(row, int(ranks[i]))) for i, row in enumerate(full)]
        )
        clients = part.sent_rows(engine, cut)
    plan = Plan(FlatClip(BOUND, dim), 1.0)
    with rule("sensitivity", f"the sum of round {round} is no sum of clipped vectors", remedy):
        everybody = contribute(Units(clients), plan)
        validate(everybody, plan, 6)
        for absent in range(6):
            others = contribute(Units(torch.cat([clients[:absent], clients[absent + 1 :]])), plan)
            moved = plan.clip.decode((everybody.encoded - others.encoded).double() * 2.0**-40, 1.0)
            if float(moved.norm()) > BOUND * (1 + 1e-9):
                raise_broken(
                    "sensitivity", f"one client moves the sum by {float(moved.norm())}, more than C = {BOUND}", remedy
                )


def _check_rewriting(subject: Subject, adapter: Tensor) -> None:
    def form(rewritten: Rewritten | None) -> list[Tensor]:
        return [] if rewritten is None else [rewritten.adapter, *rewritten.turns.values()]

    rewritten: Rewritten | None = subject.call("rewritten", adapter, _LAYOUT, form=form)
    if rewritten is None:
        return
    entries = {(entry.pair, entry.factor): entry for entry in _LAYOUT.entries}
    remedy = "return the same function in other coordinates: post-processing that keeps B A"
    if rewritten.adapter.shape != adapter.shape or not bool(rewritten.adapter.isfinite().all()):
        raise_broken("rewriting", "the rewritten adapter has another shape, or numbers that are not finite", remedy)
    for entry in _LAYOUT.entries:
        new, old = entry.of(rewritten.adapter), entry.of(adapter)
        if entry.factor == "head" and not torch.equal(new, old):
            raise_broken("rewriting", f"{entry.name} was changed", remedy)
        if entry.factor == "B":
            a = entries[entry.pair, "A"]
            same = torch.allclose(new @ a.of(rewritten.adapter), old @ a.of(adapter), atol=1e-4)
            if not same or not torch.allclose(old @ rewritten.turns[entry.pair], new, atol=1e-4):
                raise_broken("rewriting", f"B A of {entry.pair} is another matrix, or turns does not turn B", remedy)


def _made_up(seed: int, number: int, size: int) -> Tensor:
    return torch.from_numpy(simulation_generator(seed, "conformance adapter", number).uniform(-1, 1, size)).float()
