"""What a worker sends for a cohort: the clipped sum of what plain PEFT would give each client, one client at a time.

For every aggregation: rounds of other factors, other ranks, other scales, clients of different rank. And the guarantee
at its root: one planted client, whatever its update, moves the encoded sum by at most one.
"""

import functools
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from client.data.columns.shares import parts_of, share_row
from client.data.prepare import prepare
from client.data.records import Records
from client.data.spec import DataSpec
from client.engine.sequential import SequentialEngine
from client.models.base import load_base
from client.models.lora import LoraSpec
from client.models.tasks import SequenceClassification
from client.worker import UnitsFailed, Worker, local_seed
from privacy.clipping.clip_map import ClipMap
from privacy.clipping.norms import FlatClip, PerAdapterClip
from privacy.clipping.units import Units
from privacy.contribution import GRID, Plan, contribute
from server.config.load import parse
from server.runs.assembly import Assembly, assemble_client_level
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters
from strategies.messages.client_update import EvaluateRequest, TrainRequest

N, RANK = 12, 4
CLIENTS = np.array([0, 2, 3, 5, 8, 11])
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "plain": {"scale-a": 0.5, "scale-b": 4.0},
    "ffa": {},
    "rolora": {"scale-a": 3.0, "scale-b": 0.5},
    "local-heads": {"scale-b": 2.0},
    "fedsvd": {"scale-b": 5.0},
    "dp-dylora": {"scale-b": 3.0},
    "zero-pad": {"ranks": "1,2,4"},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def assembly_of(cache: Path, aggregation: str, learning_rate: float = 0.2) -> Assembly:
    table = {
        "rounds": 6,
        "clients": N,
        "sampling-rate": 0.5,
        "privacy": {"delta": 1e-3},
        "strategy": {
            "controller": "fixed",
            "aggregation": aggregation,
            "aggregation-options": AGGREGATIONS[aggregation],
        },
        "model": {"name": "random:bert", "rank": RANK, "max-length": 32},
        "data": {"validation-records": 20, "test-records": 20, "records-per-client": 4, "cache": str(cache)},
        "local": {"learning-rate": learning_rate, "batch-size": 2},
        "public": {"warm-start-epochs": 1},
    }
    return assemble_client_level(parse(table))


@pytest.fixture(scope="module", params=AGGREGATIONS)
def assembly(request: pytest.FixtureRequest, cache: Path) -> Assembly:
    return assembly_of(cache, request.param)


@pytest.fixture(scope="module")
def worker(assembly: Assembly) -> Worker:
    return Worker(assembly.job)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_metrics_read_no_private_record(split: str, cache: Path) -> None:
    spec = DataSpec(tokenizer="random:bert", clients=N, validation_records=20, test_records=20, cache=str(cache))
    data = prepare(spec)
    worker: Any = object.__new__(Worker)
    worker.data = replace(data, train=None)  # type: ignore[arg-type]
    worker.engine = SimpleNamespace(set_residual=lambda residual: None, evaluate=lambda adapter, part: part)
    read = worker.metrics(EvaluateRequest(np.zeros(3, np.float32), split, 4, 9, "{}", None))
    assert np.array_equal(read.tokens, getattr(data, split).select(np.arange(4, 9)).tokens)


def start_of(assembly: Assembly) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return assembly.start + 0.05 * torch.randn(len(assembly.start), generator=generator)


def request_of(assembly: Assembly, round: int, clients: np.ndarray, clip: ClipMap) -> TrainRequest:
    adapters, aggregation = Adapters(RANK, N, assembly.config.seed), assembly.methods.aggregation
    return TrainRequest(
        round,
        start_of(assembly).numpy(),
        Plan(clip, 1.5),
        aggregation.part(adapters, round),
        clients,
        assembly.job.to_json(),
        aggregation.client_ranks(adapters, clients),
    )


def flat(assembly: Assembly, round: int, bound: float) -> FlatClip:
    return FlatClip(bound, assembly.setting.dimension(round))


@functools.cache
def plain_peft(spec: LoraSpec, labels: int) -> SequentialEngine:
    model, _ = load_base("random:bert", "classification", labels)
    return SequentialEngine(model, spec, SequenceClassification(labels), precision="fp32")


def alone(assembly: Assembly, request: TrainRequest, client: int, ranks: int) -> Tensor:
    """The sent vector of one client by PEFT with an adapter of its own rank, put together by names and slices."""
    scale = assembly.spec.alpha / RANK
    spec = replace(assembly.spec, rank=ranks, alpha=scale * ranks, train=request.part.factors)
    engine = plain_peft(spec, assembly.data.num_labels)
    whole = assembly.layout.tensors(start_of(assembly))
    cut = {n: v[:ranks] if "lora_A" in n else v[:, :ranks] if "lora_B" in n else v for n, v in whole.items()}
    start = engine.layout.vector(cut)
    records = assembly.data.client(client)
    seed = local_seed(assembly.job.seed, request.round, client)
    (update,) = engine.train_all(start, [records], assembly.job.local, [seed])
    moved = engine.layout.tensors(engine.layout.with_trainable(torch.zeros(engine.layout.size), update))
    most, sent = request.part.ranks or RANK, []
    for entry in assembly.layout.entries:
        values = moved[entry.name]
        if entry.factor == "A" and request.part.factors != "b":
            padded = torch.zeros(most, entry.shape[1])
            padded[:ranks] = values * request.part.scale_a
            sent.append(padded.flatten())
        elif entry.factor == "B" and request.part.factors != "a":
            padded = torch.zeros(entry.shape[0], most)
            padded[:, :ranks] = values * request.part.scale_b
            sent.append(padded.flatten())
        elif entry.factor == "head" and request.part.heads:
            sent.append(values.flatten())
    return torch.cat(sent)


@pytest.mark.parametrize("round", [1, 2])
def test_the_sum_is_that_of_plain_peft_one_client_at_a_time(assembly: Assembly, worker: Worker, round: int) -> None:
    request = request_of(assembly, round, CLIENTS, flat(assembly, round, 0.05))
    ranks = [request.part.ranks or RANK] * len(CLIENTS) if request.ranks is None else request.ranks.tolist()
    rows = torch.stack([alone(assembly, request, int(c), r) for c, r in zip(CLIENTS, ranks, strict=True)])
    lengths = rows.norm(dim=1)
    assert (lengths > 0.05).any(), "nobody is clipped"
    expected = contribute(Units(rows), request.plan).encoded.double() / GRID
    found = worker.contribution(request).encoded.double() / GRID
    assert float((found - expected).norm()) < 1e-4 * float(expected.norm())


@pytest.mark.parametrize("kind", ["flat", "per-adapter"])
@pytest.mark.parametrize("round", [1, 2])
@pytest.mark.nightly
def test_a_planted_client_moves_the_sum_by_at_most_one(
    assembly: Assembly, worker: Worker, round: int, kind: str
) -> None:
    """The threshold is far below every update, so the bound is met: a sum that were more sensitive would show."""
    blocks = assembly.setting.blocks(round)
    clip = flat(assembly, round, 1e-6) if kind == "flat" else PerAdapterClip((1e-6,) * len(blocks), blocks)
    without = worker.contribution(request_of(assembly, round, CLIENTS, clip)).encoded
    request = request_of(assembly, round, np.sort(np.append(CLIENTS, 7)), clip)
    moved = worker.contribution(request).encoded - without
    squares = sum(int(number) ** 2 for number in moved.tolist())
    assert (0.999 * GRID) ** 2 < squares <= int(GRID) ** 2


@pytest.mark.parametrize("aggregation", ["rolora", "zero-pad"])
def test_planted_clients_that_diverge_stay_within_one(cache: Path, aggregation: str) -> None:
    made = assembly_of(cache, aggregation, learning_rate=1e38)
    diverging, lengths = Worker(made.job), []
    for client in CLIENTS:
        request = request_of(made, 1, np.array([client]), flat(made, 1, 0.1))
        encoded = diverging.contribution(request).encoded
        lengths.append(sum(int(number) ** 2 for number in encoded.tolist()) / int(GRID) ** 2)
    assert max(lengths) <= 1.0
    assert 0.0 in lengths, "nobody diverged"


def test_a_client_that_raises_takes_no_other_with_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others' contributions to the sum are what they are without it, also where its work ends the joint pass."""
    made = assembly_of(cache, "zero-pad")
    sane, clip = Worker(made.job), flat(made, 1, 0.1)
    bad = int(made.data.client(int(CLIENTS[2])).offsets[0])

    def raising(start, clients, *rest):
        if any(int(records.offsets[0]) == bad for records in clients):
            raise IndexError("quoted from a record")
        return train(start, clients, *rest)

    train = sane.engine.train
    expected = sane.contribution(request_of(made, 1, np.delete(CLIENTS, 2), clip)).encoded
    monkeypatch.setattr(sane.engine, "train", raising)
    assert torch.equal(sane.contribution(request_of(made, 1, CLIENTS, clip)).encoded, expected)
    for lost in (CLIENTS[2:3], CLIENTS[[2, 2]]):
        with pytest.raises(UnitsFailed, match=r"every client raised \(IndexError in raising") as failure:
            sane.contribution(request_of(made, 1, lost, clip))
        told = "".join(traceback.format_exception(failure.value))  # as whoever logs it would
        assert "quoted from a record" not in told + caplog.text


def test_a_client_that_raises_while_it_is_asked_takes_no_other_with_it(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = assembly.job.num_labels + sum(parts_of(0).values())
    request = request_of(assembly, 1, CLIENTS, FlatClip(2.0, told))
    asked = Worker(assembly.job.replace(asks=True))
    expected = asked.contribution(replace(request, clients=np.delete(CLIENTS, 2), ranks=None)).encoded
    bad, row = int(assembly.data.client(int(CLIENTS[2])).offsets[0]), share_row

    def raising(records: Records, *rest: Any) -> np.ndarray:
        if int(records.offsets[0]) == bad:
            raise IndexError
        return row(records, *rest)

    monkeypatch.setattr("client.worker.share_row", raising)
    assert expected.any()
    assert torch.equal(asked.contribution(replace(request, ranks=None)).encoded, expected)


def test_every_round_trains_what_the_setting_says(assembly: Assembly) -> None:
    """Controllers plan with these sizes; they must be those of the sent vectors."""
    adapters = Adapters(RANK, N, assembly.config.seed)
    seen = set()
    for round in range(1, 7):
        part: TrainedSubset = assembly.methods.aggregation.part(adapters, round)
        assert assembly.setting.blocks(round) == part.layout(assembly.layout).blocks()
        seen.add(assembly.setting.dimension(round))
    assert len(seen) > 1 if assembly.config.strategy.aggregation == "dp-dylora" else len(seen) == 1
