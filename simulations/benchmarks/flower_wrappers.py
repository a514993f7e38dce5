"""One training round through Flower's own differential-privacy wrappers, unchanged and in this process.

The strategy makes its instructions, a real ClientApp (with Flower's client-side mods where they belong) answers them,
and the strategy aggregates the replies. Only the transport is missing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

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


def silence() -> None:
    """Flower logs every clipping; the checks read its results, not its log."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
