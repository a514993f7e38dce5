"""The two release paths of the negative control in ``flower_dp.py``: Flower's wrappers, unchanged, and ours.

Both take one update per client and return what is released: the change of the global arrays. ``C = 1`` and 20 expected
clients throughout, so one client may move the release by 1/20.

Flower's path is one training round in this process: the strategy makes its instructions, a real ClientApp (with
Flower's client-side mods where they belong) answers them, and the strategy aggregates the replies. Only the transport
is missing.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray
from torch import Tensor

from privacy.audit.two_world import ReleasePath
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import Plan, contribute
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release, charged_release
from privacy.queries import NormBit
from privacy.randomness.noise import InsecureZeroNoise
from privacy.randomness.sampling import CohortSampler

FAILED = 2  # ErrorCode.CLIENT_APP_RAISED_EXCEPTION


@dataclass
class Nodes:
    """What a strategy asks of Flower's Grid when it configures a round: who is connected."""

    count: int

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.count + 1))


@dataclass(frozen=True)
class Clients:
    """What the clients will answer.

    Attributes:
        updates: [clients, params], added to the arrays that a client receives; its dtype is that of the arrays.
        examples: num-examples reported by each client; 10 each by default.
        losses: train_loss reported by each client; 0 each by default.
        mods: Flower's client-side mods.
        failing: indices whose reply is an error; absent: indices that never reply.
    """

    updates: NDArray[Any]
    examples: Sequence[float] | None = None
    losses: Sequence[float] | None = None
    mods: Sequence[Any] = ()
    failing: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()

    def app(self) -> ClientApp:
        app = ClientApp(mods=list(self.mods))

        @app.train()
        def train(message: Message, context: Context) -> Message:
            i = context.node_id - 1
            received = next(iter(message.content.array_records.values()))["w"].numpy()
            metrics = MetricRecord()
            metrics["num-examples"] = self.examples[i] if self.examples else 10
            metrics["train_loss"] = self.losses[i] if self.losses else 0.0
            reply = RecordDict()
            reply["arrays"], reply["metrics"] = arrays(received + self.updates[i]), metrics
            return Message(reply, reply_to=message)

        return app


@dataclass(frozen=True)
class Outcome:
    """What a round released: the change of the arrays and the metrics; None where Flower returned nothing."""

    update: NDArray[Any] | None
    metrics: dict[str, Any] = field(default_factory=dict)

    def released(self) -> NDArray[Any]:
        """The change of the arrays; ValueError where there is none."""
        if self.update is None:
            raise ValueError("the round released nothing")
        return self.update


def fedavg() -> FedAvg:
    """Flower's FedAvg over all connected clients, no federated evaluation."""
    return FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)


def one_round(strategy: Strategy, clients: Clients, number: int = 1) -> Outcome:
    """Run round ``number`` from all-zero arrays; whatever Flower raises comes through."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    start = np.zeros(clients.updates.shape[1], dtype=clients.updates.dtype)
    instructions = strategy.configure_train(number, arrays(start), ConfigRecord({}), Nodes(len(clients.updates)))  # type: ignore[arg-type]
    app, replies = clients.app(), []
    for message in instructions:
        i = message.metadata.dst_node_id - 1
        message.metadata.__dict__["_message_id"] = str(i)
        if i in clients.failing:
            replies.append(Message(Error(FAILED, "planned failure"), reply_to=message))
        elif i not in clients.absent:
            context = Context(run_id=1, node_id=i + 1, node_config={}, state=RecordDict(), run_config={})
            replies.append(app(message=message, context=context))
    released, metrics = strategy.aggregate_train(number, replies)
    return Outcome(None if released is None else released["w"].numpy() - start, dict(metrics or {}))


def arrays(values: NDArray[Any]) -> ArrayRecord:
    """One array called w."""
    return ArrayRecord({"w": Array(values)})


BOUND = 1.0
CLIENTS = 20
SAMPLING = Poisson(rate=0.02, population=1000)  # expects 20 clients
ABSENT = 1e-9  # the update that stands for "took no part" in Flower's paths, which cannot take a zero one

FLOWER: dict[str, tuple[type[Any], tuple[Any, ...]]] = {
    "server-side fixed": (DifferentialPrivacyServerSideFixedClipping, ()),
    "client-side fixed": (DifferentialPrivacyClientSideFixedClipping, (fixedclipping_mod,)),
    "server-side adaptive": (DifferentialPrivacyServerSideAdaptiveClipping, ()),
    "client-side adaptive": (DifferentialPrivacyClientSideAdaptiveClipping, (adaptiveclipping_mod,)),
}


def flower_strategy(kind: str, noise_multiplier: float, bound: float = BOUND, **options: Any) -> Strategy:
    """One of Flower's wrappers around FedAvg for 20 sampled clients."""
    made, _ = FLOWER[kind]
    name = "clipping_norm" if "fixed" in kind else "initial_clipping_norm"
    strategy: Strategy = made(fedavg(), noise_multiplier, num_sampled_clients=CLIENTS, **{name: bound}, **options)
    return strategy


def flower_outcome(kind: str, updates: NDArray[Any], noise_multiplier: float = 0.0, **replies: Any) -> Outcome:
    """One round of one of Flower's wrappers; without noise unless a multiplier is given."""
    clients = Clients(updates, mods=replies.pop("mods", FLOWER[kind][1]), **replies)
    return one_round(flower_strategy(kind, noise_multiplier), clients)


def accounted_outcome(updates: NDArray[Any], **replies: Any) -> str:
    """What server-side fixed clipping does with such a round if it is given an accountant, in one word."""
    config = PrivacyConfig(1e-5, 1000, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    strategy = flower_strategy("server-side fixed", 1.0, accountant=RdpAccountant(config))
    try:
        outcome = one_round(strategy, Clients(updates, **replies))
    except ValueError:
        return "refused"
    return "not released" if outcome.update is None else "released"


def flower(kind: str, updates: NDArray[Any], noise_multiplier: float = 0.0, **replies: Any) -> NDArray[Any]:
    """What such a round releases: the change of the arrays."""
    return flower_outcome(kind, updates, noise_multiplier, **replies).released()


def flower_path(kind: str, noise_multiplier: float, canary_examples: int = 10, present: int = CLIENTS) -> ReleasePath:
    """Rows -> release for the two-world audit, zero-out adjacency: whoever is missing sends an update of 1e-9.

    present: how many of the 20 clients reply; the last of them is the canary's place.
    """
    examples = [10.0] * CLIENTS
    examples[present - 1] = float(canary_examples)
    absent = frozenset(range(present, CLIENTS))

    def release(rows: Tensor) -> Tensor:
        updates = np.full((CLIENTS, rows.shape[1]), ABSENT, dtype=np.float32)
        updates[: len(rows)] = rows.numpy()
        return torch.from_numpy(flower(kind, updates, noise_multiplier, examples=examples, absent=absent))

    return release


@contextmanager
def scratch_ledger() -> Iterator[Ledger]:
    """A real ledger in a folder that is thrown away, with a budget that never ends; in memory where the system can."""
    memory = Path("/dev/shm")
    commitment = Commitment("client", "add_remove", SAMPLING.population, 1e9, 1e-5, mode="filter", order=2, rho=1e8)
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        Ledger.create(Path(folder) / "ledger.jsonl", commitment) as ledger,
    ):
        yield ledger


def ours(
    updates: Tensor, ledger: Ledger, plan: Plan | None = None, *, losses: Tensor | None = None, noiseless: bool = False
) -> Release:
    """One release of our path; without noise if asked (the ledger is then stamped NOT PRIVATE)."""
    plan = plan or Plan(FlatClip(BOUND, updates.shape[1]), 1.0)
    total = contribute(Units(updates, losses=losses), plan)
    noise = InsecureZeroNoise() if noiseless else None
    cohort = CohortSampler.create().draw(SAMPLING, 0, ledger.attempts("round", 0))
    return charged_release(total, plan, cohort, ledger=ledger, noise=noise)


def our_path(noise_multiplier: float, ledger: Ledger, bit_std: float | None = None) -> ReleasePath:
    """Rows -> released update for the two-world audit.

    bit_std: release a norm bit with this noise in the same event, at the same effective noise multiplier; None for no
    bit.
    """
    queries = () if bit_std is None else (NormBit(BOUND, bit_std),)
    update = sum((noise_multiplier**-2, *(-((query.sensitivity / query.noise_std) ** 2) for query in queries))) ** -0.5

    def release(rows: Tensor) -> Tensor:
        return ours(rows, ledger, Plan(FlatClip(BOUND, rows.shape[1]), update, queries)).update

    return release


PARAMS = 1000


@dataclass(frozen=True)
class Cell:
    """What was measured, in words, and whether the property held."""

    holds: bool
    text: str
    value: float | None = None


@dataclass(frozen=True)
class Pair:
    """One line of the table."""

    flower: Cell
    lacquer: Cell


def honest() -> NDArray[np.float32]:
    """Updates of 20 clients, all longer than C."""
    return np.random.default_rng(0).normal(size=(CLIENTS, PARAMS)).astype(np.float32)
