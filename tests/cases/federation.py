"""Ledgers and releases for tests of methods, and a federation in memory for tests of the strategy.

Nodes answer with what the real mechanism makes of fixed client updates; messages go through Flower's serialisation.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release, charged_release
from privacy.randomness.noise import InsecureZeroNoise, Noise
from privacy.randomness.rng import torch_generator
from privacy.randomness.sampling import CohortSampler
from strategies.adapter.layout import AdapterLayout, Entry
from strategies.aggregations.factors import Plain
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.fixed import Fixed
from strategies.dp_fedavg import DpFedAvg
from strategies.messages.client_update import TrainRequest, contribution_records
from strategies.optimizers.fedavg import FedAvg
from tests.cases.drawn import cohort

ReleaseOf = Callable[..., Release]
N, RATE, ROUNDS, BOUND = 60, 0.25, 5, 0.5
SAMPLING = Poisson(RATE, N)
LAYOUT = AdapterLayout(
    (
        Entry("q.lora_A.weight", (2, 3), 0, "A", "q"),
        Entry("q.lora_B.weight", (3, 2), 6, "B", "q"),
        Entry("classifier.bias", (2,), 12, "head", "classifier"),
    )
)
DIM = LAYOUT.dim
UPDATES = torch.randn(N, DIM, generator=torch_generator(0, "updates")) * 0.4
START = torch.linspace(-1, 1, LAYOUT.size)


@pytest.fixture
def ledger_for(tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    """A function that makes a ledger which pays for ``rounds`` rounds and one histogram at any noise."""
    opened: list[Ledger] = []

    def make(sampling: Poisson, rounds: int, noise_multiplier: float = 0.0) -> Ledger:
        floor = (
            FloorStep("histogram", Poisson(1.0, sampling.population), noise_multiplier),
            FloorStep("round", sampling, noise_multiplier, rounds),
        )
        commitment = Commitment(
            "client", "add_remove", sampling.population, 1.0, 1e-5, floor=floor, not_private="a test"
        )
        opened.append(Ledger.create(tmp_path / f"ledger-{len(opened)}.jsonl", commitment))
        return opened[-1]

    yield make
    for ledger in opened:
        ledger.close()


@pytest.fixture
def quick_ledger_for(ledger_for: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ledger]:
    """``ledger_for`` without waiting for the disk, for hundreds of rounds; what fsync is for is tested elsewhere."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return ledger_for


@pytest.fixture
def released(ledger_for: Callable[..., Ledger]) -> ReleaseOf:
    """A function that releases a sum under a plan, without noise unless some is given."""

    def release(plan: Plan, total: Contribution, sampling: Poisson, noise: Noise | None = None) -> Release:
        label, round = ("round", 1) if plan.clip.dim else ("histogram", 0)
        ledger = ledger_for(sampling, 1)
        noise = noise or InsecureZeroNoise()
        return charged_release(total, plan, cohort(sampling, round, ledger, label), ledger=ledger, noise=noise)

    return release


@dataclass
class Nodes:
    """What stands where Flower's grid stands: nodes that answer, or fail as told.

    ``tamper`` may change a node's list of replies; ``requests`` remembers what was asked of whom.
    """

    ids: Iterable[int] = (1, 2, 3)
    tamper: Callable[[int, list[Message]], list[Message]] = lambda node, replies: replies
    requests: list[tuple[int, TrainRequest]] = field(default_factory=list)

    def get_node_ids(self) -> list[int]:
        return list(self.ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            request = TrainRequest.from_records(transported(message.content))
            self.requests.append((node, request))
            replies += self.tamper(node, [answer(message, request)])
        return replies

    @property
    def cohort(self) -> list[int]:
        return sorted(int(client) for _, request in self.requests for client in request.clients)


def transported(records: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(records))


def answer(message: Message, request: TrainRequest) -> Message:
    return Message(
        transported(contribution_records(sum_of(request.clients, request.plan), request.round)), reply_to=message
    )


def sum_of(clients: Any, plan: Plan) -> Contribution:
    rows = UPDATES[torch.as_tensor(np.array(clients), dtype=torch.int64)]
    return contribute(Units(rows[:, : plan.clip.params or DIM], votes=votes_of(clients)), plan)


def votes_of(clients: Any) -> Tensor:
    """Most clients vote for bin 7."""
    return torch.tensor([7 if int(client) % 3 else 12 for client in clients], dtype=torch.int64)


def error_reply(reply: Message) -> Message:
    """What Flower makes of a node that raised, or of a reply that cannot be fetched (then from the server itself)."""
    failed = Message(RecordDict(), 0, MessageType.TRAIN)
    failed.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return Message(Error(1, "out of memory"), reply_to=failed)


def again(reply: Message, to: str | None = None) -> Message:
    """A second reply of the same content, to the same message or to another one."""
    message = Message(RecordDict(), reply.metadata.src_node_id, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id if to is None else to
    return Message(reply.content, reply_to=message)


def failing(*bad: int, how: str) -> Callable[[int, list[Message]], list[Message]]:
    def tamper(node: int, replies: list[Message]) -> list[Message]:
        if node not in bad:
            return replies
        (reply,) = replies
        match how:
            case "silent":
                return []
            case "error":
                return [error_reply(reply)]
            case "error, then an answer":
                return [error_reply(reply), reply]
            case "too large":
                encoded = np.full(DIM, 2**59, dtype=np.int64)
                reply.content.array_records["arrays"]["encoded"] = Array(encoded)
            case "not finite":
                reply.content.array_records["arrays"]["encoded"] = Array(np.full(DIM, np.nan))
            case "last round":
                reply.content.config_records["config"]["round"] = 0
            case "other code":
                reply.content.config_records["config"]["code"] = "0" * 64
            case "empty":
                reply.content = RecordDict()
        return [reply]

    return tamper


def hold(strategy: DpFedAvg, nodes: Nodes, shuffle: int | None = None) -> Release:
    """One round, as the server's loop holds it."""
    round = strategy.next_release().round
    messages = list(strategy.configure_train(round, ArrayRecord(), ConfigRecord(), nodes))  # type: ignore[arg-type]
    replies = nodes.send_and_receive(messages)
    if shuffle is not None:
        random.Random(shuffle).shuffle(replies)
    strategy.aggregate_train(round, replies)
    assert strategy.release is not None
    strategy.observe(PublicSignals(round, 0.9**round))
    return strategy.release


def expected_mean(clients: Iterable[int], bound: float = BOUND) -> Tensor:
    """sum of clipped updates / (q N), in float64, written out."""
    total = torch.zeros(DIM, dtype=torch.float64)
    for client in clients:
        row = UPDATES[client].double()
        total += row * min(1.0, bound / float(row.norm()))
    return total / (RATE * N)


def state_of(strategy: DpFedAvg) -> Any:
    assert strategy.state is not None
    return strategy.state


class Federation:
    """Strategies to make, nodes to answer them, and what should come out."""

    N, RATE, ROUNDS, BOUND, DIM = N, RATE, ROUNDS, BOUND, DIM
    SAMPLING, LAYOUT, START = SAMPLING, LAYOUT, START
    Nodes = Nodes
    failing, again, hold = staticmethod(failing), staticmethod(again), staticmethod(hold)
    expected_mean, state_of, sum_of = staticmethod(expected_mean), staticmethod(state_of), staticmethod(sum_of)

    def __init__(self, ledger_for: Callable[..., Ledger]) -> None:
        self.ledger_for = ledger_for

    def make(self, **parts: Any) -> DpFedAvg:
        """A strategy that has begun; keyword arguments replace its parts."""
        ledger = parts.pop("ledger", None) or self.ledger_for(SAMPLING, parts.pop("budget", ROUNDS))
        given: dict[str, Any] = {
            "controller": Fixed(BOUND),
            "optimizer": FedAvg(),
            "aggregation": Plain(),
            "info": RunInfo(ROUNDS, (LAYOUT.blocks(),), SAMPLING, (1.5,) * ROUNDS),
            "layout": LAYOUT,
            "ledger": ledger,
            "sampler": CohortSampler.insecure_from_seed(3),
            "job": "{}",
            "nodes": 3,
            "noise": InsecureZeroNoise(),
            "patience": 0.0,
        } | parts
        made = DpFedAvg(**given)
        made.begin(START, PublicSignals(0, 1.0))
        return made


@pytest.fixture
def fed(ledger_for: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch) -> Federation:
    """See :class:`Federation`. Flower's messages ask a class of their process who it is."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return Federation(ledger_for)
