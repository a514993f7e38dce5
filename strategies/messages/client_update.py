"""Typed messages between server and clients, and the only place that knows their form as Flower records.

Down: the global adapter once, the plan, and the ids of the logical clients the node is to train (or how it draws them,
:mod:`strategies.messages.own_clients`). Up: one bounded
integer sum per node, never a number of a single client beyond that. Whatever arrives is checked before it is used;
what is wrong is named by :class:`BadMessage`, in words that repeat nothing of the sender's data.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from privacy.contribution import Contribution, Plan, validate
from strategies.adapter.trainable import TrainedSubset
from strategies.messages.own_clients import Draw
from strategies.messages.records import (
    BadMessage,
    arrays_of,
    config_of,
    exactly,
    model_arrays,
    read_setting,
    residual_of,
    vector,
)

T = TypeVar("T")


@dataclass(frozen=True)
class TrainRequest:
    """Server to node: train these clients from this adapter and send their bounded sum.

    Attributes:
        round: number of the round; 0 is the initial release.
        adapter: float32 ``[size]``, the full adapter vector (frozen factors included).
        plan: what is clipped, asked and noised.
        part: what of the adapter is trained and sent.
        clients: int64 ids of logical clients.
        ranks: int64, for every client how many ranks it can train (what it sends is zero beyond them), or None: all.
        job: canonical JSON of everything that stays the same over the run (model, data, local training, engine).
        own_draw: how a node with many clients draws those of the cohort (``clients`` is empty then); None: are named.
    """

    round: int
    adapter: np.ndarray
    plan: Plan
    part: TrainedSubset
    clients: np.ndarray
    job: str
    ranks: np.ndarray | None = None
    own_draw: Draw | None = None

    def only(self, position: int) -> "TrainRequest":
        """Narrow the request to one of its clients."""
        one = slice(position, position + 1)
        return replace(self, clients=self.clients[one], ranks=None if self.ranks is None else self.ranks[one])

    def to_records(self) -> RecordDict:
        arrays = {"adapter": Array(self.adapter.astype(np.float32)), "clients": Array(self.clients.astype(np.int64))}
        arrays |= {f"clip-{name}": Array(values.numpy()) for name, values in self.plan.clip.arrays().items()}
        if self.ranks is not None:
            arrays["ranks"] = Array(self.ranks.astype(np.int64))
        return RecordDict(
            {
                "arrays": ArrayRecord(arrays),
                "config": ConfigRecord(
                    {
                        "round": self.round,
                        "part": json.dumps(self.part.to_json()),
                        "plan": json.dumps(self.plan.to_json()),
                        "job": self.job,
                        **({} if self.own_draw is None else {"draw": self.own_draw.to_json()}),
                    }
                ),
            }
        )

    @staticmethod
    def from_records(records: RecordDict) -> "TrainRequest":
        config = config_of(records)
        clients = vector(records, "clients", "int64")
        if not bool(np.all(np.diff(clients) > 0)):  # a client listed twice would count twice: sensitivity 2
            raise BadMessage("clients must be listed once each, in increasing order")
        ranks = vector(records, "ranks", "int64", (len(clients),)) if "ranks" in arrays_of(records) else None
        if ranks is not None and not bool(np.all(ranks >= 1)):
            raise BadMessage("ranks must be >= 1")
        draw = Draw.from_json(read_setting(config, "draw", str)) if "draw" in config else None
        if draw is not None and (len(clients) or ranks is not None):
            raise BadMessage("a request that says how clients are drawn must not name any")
        return TrainRequest(
            round=read_setting(config, "round", int),
            adapter=vector(records, "adapter", "float32"),
            plan=_parsed(config, "plan", lambda values: Plan.from_json(values, _clip_arrays(records))),
            part=_parsed(config, "part", TrainedSubset.from_json),
            clients=clients,
            job=read_setting(config, "job", str),
            ranks=ranks,
            own_draw=draw,
        )


@dataclass(frozen=True)
class EvaluateRequest:
    """Server to worker: the metrics of a served adapter on records ``start..stop`` of a PUBLIC split.

    ``residual``: float32, of the base's weights, see :mod:`strategies.adapter.residual`; None: none.
    """

    adapter: np.ndarray
    split: str
    start: int
    stop: int
    job: str
    residual: np.ndarray | None = None

    def to_records(self) -> RecordDict:
        return RecordDict(
            {
                "arrays": ArrayRecord(model_arrays(self.adapter, self.residual)),
                "config": ConfigRecord({"split": self.split, "start": self.start, "stop": self.stop, "job": self.job}),
            }
        )

    @staticmethod
    def from_records(records: RecordDict) -> "EvaluateRequest":
        config = config_of(records)
        return EvaluateRequest(
            adapter=vector(records, "adapter", "float32"),
            split=read_setting(config, "split", str),
            start=read_setting(config, "start", int),
            stop=read_setting(config, "stop", int),
            job=read_setting(config, "job", str),
            residual=residual_of(records),
        )


def contribution_records(contribution: Contribution, round: int) -> RecordDict:
    """Node to server: the sum over the node's clients."""
    arrays = {"encoded": Array(contribution.encoded.numpy())}
    arrays |= {f"answer-{i}": Array(answer.numpy()) for i, answer in enumerate(contribution.answers)}
    return RecordDict(
        {"arrays": ArrayRecord(arrays), "config": ConfigRecord({"round": round, "code": code_fingerprint()})}
    )


def read_contribution(records: RecordDict, plan: Plan, round: int, clients: int) -> Contribution:
    """The sum a node sent for ``clients`` clients, checked: form, round, code, and that such a sum is possible.

    Memory: what arrived, and one copy of the sum's own size; every declared size is compared before it is used.

    Raises:
        BadMessage: naming what is wrong, in words that hold nothing of the sender's and no number of clients.
    """
    config = config_of(records)
    if read_setting(config, "round", int) != round:
        raise BadMessage(f"reply is for another round, this is round {round}")
    if read_setting(config, "code", str) != code_fingerprint():
        raise BadMessage(f"client runs other code than the server ({code_fingerprint()[:12]})")
    shapes = [plan.clip.dim, *(query.dim for query in plan.queries)]
    names = ["encoded", *(f"answer-{i}" for i in range(len(plan.queries)))]
    if len(arrays_of(records)) != len(names) or set(arrays_of(records)) != set(names):
        raise BadMessage(f"reply must hold the arrays {names} and no others")
    encoded, *answers = (
        torch.from_numpy(vector(records, name, "int64", (size,))) for name, size in zip(names, shapes, strict=True)
    )
    if len(config) != 2:
        raise BadMessage("config must hold round and code and no others")
    exactly(records, "arrays", "config")
    contribution = Contribution(encoded, tuple(answers))
    try:
        validate(contribution, plan, clients)
    except ValueError as error:
        raise BadMessage(str(error)) from None
    return contribution


@dataclass(frozen=True)
class ShardMetrics:
    """Worker to server: the metrics of a shard of a PUBLIC split.

    Attributes:
        loss, accuracy: means over the shard.
        count: records, or tokens, averaged over.
        confusion: int64 ``[classes, classes]``, records by class and answer; None where the worker counts none.
    """

    loss: float
    accuracy: float
    count: int
    confusion: np.ndarray | None = None

    def to_records(self) -> RecordDict:
        metrics = MetricRecord({"loss": self.loss, "accuracy": self.accuracy, "count": self.count})
        if self.confusion is None:
            return RecordDict({"metrics": metrics})
        pairs = ArrayRecord({"confusion": Array(self.confusion.astype(np.int64).ravel())})
        return RecordDict({"metrics": metrics, "arrays": pairs})

    @staticmethod
    def from_records(records: RecordDict) -> "ShardMetrics":
        loss, accuracy, count = _totals(records)
        if "arrays" not in records.array_records:
            return ShardMetrics(loss, accuracy, count)
        pairs = vector(records, "confusion", "int64")
        classes = math.isqrt(len(pairs))
        if classes**2 != len(pairs) or bool((pairs < 0).any()) or int(pairs.sum()) != count:
            raise BadMessage("confusion must be a square of counts that add up to the records of the shard")
        return ShardMetrics(loss, accuracy, count, pairs.reshape(classes, classes))


def _totals(records: RecordDict) -> tuple[float, float, int]:
    metrics = records.metric_records.get("metrics")
    if metrics is None or {"loss", "accuracy", "count"} != set(metrics):
        raise BadMessage("evaluation reply must hold loss, accuracy and count")
    loss, accuracy, count = metrics["loss"], metrics["accuracy"], metrics["count"]
    if not isinstance(loss, float) or not isinstance(accuracy, float) or not isinstance(count, int) or count < 1:
        raise BadMessage("evaluation reply must hold two floats and a count of at least 1")
    if not 0 <= accuracy <= 1:
        raise BadMessage("evaluation reply must hold an accuracy in [0, 1]")
    return loss, accuracy, count


@functools.cache
def code_fingerprint() -> str:
    """SHA-256 over the sources of ``client``, ``strategies`` and ``privacy``: both sides must run the same.

    Flower's actors import what their working directory offers; this tells a stale or foreign copy apart.
    """
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for package in ("client", "strategies", "privacy"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _parsed(config: ConfigRecord, name: str, build: Callable[[Any], T]) -> T:
    text = read_setting(config, name, str)
    try:
        return build(json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"{name} cannot be read: {type(error).__name__}: {error}") from None


def _clip_arrays(records: RecordDict) -> dict[str, torch.Tensor]:
    names = [name for name in arrays_of(records) if name.startswith("clip-")]
    return {name.removeprefix("clip-"): torch.from_numpy(vector(records, name, "float32")) for name in names}
