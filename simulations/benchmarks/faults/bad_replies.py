"""Malformed and hostile replies, through the real strategy.

Run: `python -m simulations.benchmarks faults.bad_replies [--count 12000]`.

Every node of a federation of single clients answers, and just under half of them are hostile: each sends one reply of a
kind below, made at random of an honest one, from a seed, through Flower's own protobuf form, into
``DpFedAvg.aggregate_train``. After every round it is checked that

- nothing crashed, and reading no reply raised anything unforeseen;
- the release is that of the honest nodes alone, to the last bit (no noise is added here);
- replies whose bytes were changed at random, and which may therefore have become honest-looking lies, moved the sum by
  no more than one clipped update each;
- no line of the log repeats a word or a number that a hostile node planted in its reply.
"""

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.supercore.task_identity import TaskIdentity

from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import GRID, contribute
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import InsecureZeroNoise
from privacy.randomness.rng import torch_generator
from privacy.randomness.sampling import CohortSampler
from simulations.benchmarks.faults.malformed import NUMBER, REFUSED, WORD, failed, mutated, transported, unasked
from simulations.benchmarks.harness.results import origin, say, write
from strategies.adapter.layout import AdapterLayout, Entry
from strategies.aggregations.factors import Plain
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.dp_lac import DpLac
from strategies.dp_fedavg import DpFedAvg
from strategies.messages.client_update import TrainRequest, contribution_records
from strategies.optimizers.fedavg import FedAvg

CLIENTS, HOSTILE = 120, 55
LAYOUT = AdapterLayout(
    (
        Entry("q.lora_A.weight", (2, 3), 0, "A", "q"),
        Entry("q.lora_B.weight", (3, 2), 6, "B", "q"),
        Entry("classifier.bias", (2,), 12, "head", "classifier"),
    )
)


@dataclass
class Tally:
    """What was sent, by kind, and what became of it."""

    sent: Counter[str] = field(default_factory=Counter)
    unparsable: int = 0
    refused: int = 0
    lies: int = 0
    rounds: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class _Listener(logging.Handler):
    """Every line that reading replies logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attack(count: int, seed: int = 0) -> Tally:
    """Send at least ``count`` bad replies; AssertionError if one of them does more than a refused reply may."""
    tally, rng, listener = Tally(), random.Random(seed), _Listener()
    logger = logging.getLogger("strategies.messages.dispatch")
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.multiple(TaskIdentity, _run_id=1, _node_id=1, _task_id=1),
        patch.multiple(logger, handlers=[listener], propagate=False, isEnabledFor=lambda level: True),
    ):
        _hold_rounds(Path(folder), count, rng, tally, listener)
    return tally


def _hold_rounds(folder: Path, count: int, rng: random.Random, tally: Tally, listener: _Listener) -> None:
    updates = torch.randn(CLIENTS, LAYOUT.dim, generator=torch_generator(0, "updates"))
    sampling, rounds = Poisson(1.0, CLIENTS), 1 + count // HOSTILE * 2
    steps = (FloorStep("histogram", sampling, 0.0), FloorStep("round", sampling, 0.0, rounds))
    commitment = Commitment("client", "add_remove", CLIENTS, 1.0, 1e-5, floor=steps, not_private="bad replies")
    old: list[Message] = []
    with Ledger.create(folder / "ledger.jsonl", commitment) as ledger:
        strategy = DpFedAvg(
            controller=DpLac(), optimizer=FedAvg(), aggregation=Plain(), ledger=ledger, layout=LAYOUT, job="{}",
            info=RunInfo(rounds, (LAYOUT.blocks(),), sampling, (1.5,) * rounds), nodes=CLIENTS, clients_per_node=1,
            sampler=CohortSampler.insecure_from_seed(0), noise=InsecureZeroNoise(),
        )  # fmt: skip
        strategy.begin(torch.zeros(LAYOUT.size), PublicSignals(0, 1.0))
        while tally.total < count:
            old = _round(strategy, updates, rng, tally, listener, old)
            strategy.observe(PublicSignals(tally.rounds, 1.0))
            tally.rounds += 1


def _round(
    strategy: DpFedAvg,
    updates: torch.Tensor,
    rng: random.Random,
    tally: Tally,
    listener: _Listener,
    old: list[Message],
) -> list[Message]:
    """One round with hostile nodes, and everything checked; its honest replies."""
    listener.lines.clear()
    planned = strategy.next_release()
    round, plan, sampling = planned.round, planned.plan, planned.sampling
    hostile = set(rng.sample(range(1, CLIENTS + 1), HOSTILE))
    replies: list[Message] = []
    honest: list[Message] = []
    expected = contribute(Units(updates[:0, : plan.clip.params], votes=torch.zeros(0, dtype=torch.int64)), plan)
    refused = lies = foreign = 0
    nodes: Any = _Nodes()
    for message in strategy.configure_train(round, ArrayRecord(), ConfigRecord(), nodes):
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = f"{round}-{node}"
        request = TrainRequest.from_records(message.content)
        rows = updates[torch.from_numpy(request.clients)][:, : plan.clip.params]
        mine = contribute(Units(rows, votes=torch.tensor([node % 25])), plan)
        reply = Message(transported(contribution_records(mine, round)), reply_to=message)
        if node not in hostile:
            expected = expected + mine
            honest.append(reply)
            replies.append(reply)
            continue
        kind: Any = rng.choice([*REFUSED, mutated, failed, unasked])
        tally.sent[kind.__name__] += 1
        if kind is failed:
            refused += 1
            replies.append(failed(rng, reply))
        elif kind is unasked:
            expected = expected + mine
            foreign += 1
            replies += unasked(rng, reply, old)
        else:
            bad = kind(rng, reply.content)
            if bad is None:
                tally.unparsable += 1
                continue
            refused += kind is not mutated
            lies += kind is mutated
            replies.append(Message(transported(bad) if kind is not mutated else bad, reply_to=message))
    rng.shuffle(replies)
    strategy.aggregate_train(round, replies)
    accepted = _check(strategy, expected, plan, sampling.expected_units, lies)
    text = "\n".join(listener.lines)
    assert "reading it raised" not in text, text
    assert WORD not in text, "a log line repeats a word of a hostile reply"
    assert str(NUMBER) not in text, "a log line repeats a number of a hostile reply"
    assert "\x1b" not in text
    turned_away = sum(" refused: " in line or " failed: " in line for line in listener.lines)
    assert refused <= turned_away <= refused + lies, (refused, turned_away, lies)
    assert accepted <= refused + lies - turned_away
    tally.refused += turned_away + foreign
    tally.lies += refused + lies - turned_away
    return honest


def _check(strategy: DpFedAvg, expected: Any, plan: Any, units: float, lies: int) -> float:
    """How many clipped updates the sum is away from that of the honest; 0 unless there were lies."""
    release = strategy.release
    assert release is not None
    if plan.clip.dim:
        right = plan.clip.decode(expected.encoded.double() / GRID, units).float()
        away = float((release.update - right).double().norm()) * units / float(plan.clip.bound)
    else:
        right = expected.answers[0].double() / GRID * plan.queries[0].sensitivity
        away = float((release.answers[0] - right).norm())
    assert torch.isfinite(release.update).all()
    if not lies:
        assert away == 0.0
    return max(0.0, away - 1e-6)


class _Nodes:
    """As much of a grid as choosing nodes needs."""

    def get_node_ids(self) -> Iterator[int]:
        yield from range(1, CLIENTS + 1)


def main(count: Annotated[int, typer.Option(help="bad replies, at least")] = 12_000) -> None:
    """Attack, and write the result."""
    tally = attack(count)
    result = {
        "replies": tally.total,
        "kinds": dict(sorted(tally.sent.items())),
        "rounds": tally.rounds,
        "refused": tally.refused,
        "unparsable": tally.unparsable,
        "honest_looking": tally.lies,
        "crashes": 0,
        "seed": 0,
        **origin(),
    }
    say(result)
    write("bad-replies", result)


if __name__ == "__main__":
    typer.run(main)
