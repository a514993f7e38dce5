"""Typed messages between server and clients, and the only place that knows their form as Flower records.

Down: the global adapter once, the plan, and the ids of the logical clients the node is to train. Up: one bounded
integer sum per node, never a number of a single client beyond that. Whatever arrives is checked before it is used;
what is wrong is named by :class:`BadMessage`, in words that repeat nothing of the sender's data.
"""

import functools
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import privacy
from privacy.mechanism import Contribution, Plan, validate
from privacy.queries import query_from_json
from privacy.subspace import SubspaceClip


class BadMessage(ValueError):
    """A message that does not have the form it must have."""


@dataclass(frozen=True)
class TrainRequest:
    """Server to node: train these clients from this adapter and send their bounded sum.

    Attributes:
        round: number of the round; 0 is the initial release.
        adapter: float32 ``[size]``, the full adapter vector (frozen factors included).
        plan: what is clipped, asked and noised.
        train: factors trained this round, ``"both"``, ``"a"`` or ``"b"``.
        clients: int64 ids of logical clients.
        basis: float32 ``[k, d]`` of the public subspace the run clips in, or None; needed to read a plan that uses it.
        job: canonical JSON of everything that stays the same over the run (model, data, local training, engine).
    """

    round: int
    adapter: np.ndarray
    plan: Plan
    train: str
    clients: np.ndarray
    job: str
    basis: np.ndarray | None = None

    def to_records(self) -> RecordDict:
        arrays = {"adapter": Array(self.adapter.astype(np.float32)), "clients": Array(self.clients.astype(np.int64))}
        if self.basis is not None:
            arrays["basis"] = Array(self.basis.astype(np.float32).ravel())
        return RecordDict(
            {
                "arrays": ArrayRecord(arrays),
                "config": ConfigRecord(
                    {
                        "round": self.round,
                        "train": self.train,
                        "plan": json.dumps(self.plan.to_json()),
                        "job": self.job,
                        "rank": 0 if self.basis is None else len(self.basis),
                    }
                ),
            }
        )

    @staticmethod
    def from_records(records: RecordDict) -> "TrainRequest":
        config = _config(records)
        clients = _array(records, "clients", "int64")
        if not bool(np.all(np.diff(clients) > 0)):  # a client listed twice would count twice: sensitivity 2
            raise BadMessage("clients must be listed once each, in increasing order")
        basis = _basis(records, config)
        text = _typed(config, "plan", str)
        try:
            plan = _plan(json.loads(text), basis)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"plan cannot be read: {type(error).__name__}: {error}") from None
        return TrainRequest(
            round=_typed(config, "round", int),
            adapter=_array(records, "adapter", "float32"),
            plan=plan,
            train=_typed(config, "train", str),
            clients=clients,
            job=_typed(config, "job", str),
            basis=basis,
        )


@dataclass(frozen=True)
class EvaluateRequest:
    """Server to worker: the metrics of a served adapter on records ``start..stop`` of a PUBLIC split."""

    adapter: np.ndarray
    split: str
    start: int
    stop: int
    job: str

    def to_records(self) -> RecordDict:
        return RecordDict(
            {
                "arrays": ArrayRecord({"adapter": Array(self.adapter.astype(np.float32))}),
                "config": ConfigRecord({"split": self.split, "start": self.start, "stop": self.stop, "job": self.job}),
            }
        )

    @staticmethod
    def from_records(records: RecordDict) -> "EvaluateRequest":
        config = _config(records)
        return EvaluateRequest(
            adapter=_array(records, "adapter", "float32"),
            split=_typed(config, "split", str),
            start=_typed(config, "start", int),
            stop=_typed(config, "stop", int),
            job=_typed(config, "job", str),
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

    Raises:
        BadMessage: naming what is wrong.
    """
    config = _config(records)
    if (got := _typed(config, "round", int)) != round:
        raise BadMessage(f"reply is for round {got}, this is round {round}")
    if (code := _typed(config, "code", str)) != code_fingerprint():
        raise BadMessage(f"client runs other code ({code[:12]}) than the server ({code_fingerprint()[:12]})")
    shapes = [plan.clip.dim, *(query.dim for query in plan.queries)]
    names = ["encoded", *(f"answer-{i}" for i in range(len(plan.queries)))]
    if sorted(_arrays(records)) != sorted(names):
        raise BadMessage(f"reply must hold the arrays {names} and no others")
    encoded, *answers = (
        torch.from_numpy(_array(records, name, "int64", (size,))) for name, size in zip(names, shapes, strict=True)
    )
    contribution = Contribution(encoded, tuple(answers))
    try:
        validate(contribution, plan, clients)
    except ValueError as error:
        raise BadMessage(str(error)) from None
    return contribution


def totals_records(loss: float, accuracy: float, count: int) -> RecordDict:
    """Worker to server: metrics of a shard of a public split."""
    return RecordDict({"metrics": MetricRecord({"loss": loss, "accuracy": accuracy, "count": count})})


def read_totals(records: RecordDict) -> tuple[float, float, int]:
    """Loss, accuracy and number of records of a shard."""
    metrics = records.metric_records.get("metrics")
    if metrics is None or {"loss", "accuracy", "count"} - set(metrics):
        raise BadMessage("evaluation reply must hold loss, accuracy and count")
    loss, accuracy, count = metrics["loss"], metrics["accuracy"], metrics["count"]
    if not isinstance(loss, float) or not isinstance(accuracy, float) or not isinstance(count, int) or count < 1:
        raise BadMessage("evaluation reply must hold two floats and a count of at least 1")
    return loss, accuracy, count


@functools.cache
def code_fingerprint() -> str:
    """SHA-256 over the sources of ``client`` and ``privacy``: both sides must run the same.

    Flower's actors import what their working directory offers; this tells a stale or foreign copy apart.
    """
    digest = hashlib.sha256()
    for room in (Path(__file__).parent, Path(str(privacy.__file__)).parent):
        for path in sorted(room.rglob("*.py")):
            digest.update(f"{room.name}/{path.relative_to(room)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _basis(records: RecordDict, config: ConfigRecord) -> np.ndarray | None:
    if "basis" not in _arrays(records):
        return None
    values, rank = _array(records, "basis", "float32"), _typed(config, "rank", int)
    if rank < 1 or len(values) % rank:
        raise BadMessage(f"a basis of {len(values)} values cannot have {rank} rows")
    return values.reshape(rank, -1)


def _plan(data: dict[str, Any], basis: np.ndarray | None) -> Plan:
    if data["clip"]["kind"] != "subspace":
        return Plan.from_json(data)
    if basis is None:
        raise ValueError("a plan that clips in a subspace needs its basis")
    queries = tuple(query_from_json(query) for query in data["queries"])
    clip = SubspaceClip(torch.from_numpy(basis.copy()), float(data["clip"]["bound"]))
    return Plan(clip, float(data["noise_multiplier"]), queries)


def _config(records: RecordDict) -> ConfigRecord:
    config = records.config_records.get("config")
    if config is None:
        raise BadMessage("message has no record 'config'")
    return config


def _arrays(records: RecordDict) -> ArrayRecord:
    arrays = records.array_records.get("arrays")
    if arrays is None:
        raise BadMessage("message has no record 'arrays'")
    return arrays


def _typed(config: ConfigRecord, name: str, kind: type) -> Any:
    value = config.get(name)
    if type(value) is not kind:
        raise BadMessage(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def _array(records: RecordDict, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A vector that says of itself what it is: the bytes are compared with the one header it can have, not parsed."""
    array = _arrays(records).get(name)
    if array is None:
        raise BadMessage(f"message has no array {name!r}")
    if array.dtype != dtype or array.stype != "numpy.ndarray" or len(array.shape) != 1 or array.shape[0] < 0:
        raise BadMessage(f"array {name!r} must be a vector of {dtype}")
    if shape is not None and tuple(array.shape) != shape:
        raise BadMessage(f"array {name!r} must have shape {shape}, got {tuple(array.shape)}")
    header = _npy_header(int(array.shape[0]), dtype)
    if len(array.data) != len(header) + int(array.shape[0]) * np.dtype(dtype).itemsize:
        raise BadMessage(f"array {name!r} does not hold as many bytes as its shape says")
    if not array.data.startswith(header):
        raise BadMessage(f"array {name!r} is not what its header says")
    return np.frombuffer(array.data, dtype, offset=len(header)).copy()


def _npy_header(length: int, dtype: str) -> bytes:
    """What numpy writes before the values of a vector (format 1.0; Flower's arrays are .npy files)."""
    header = io.BytesIO()
    description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()
