"""Evaluation shared out over real workers gives the metrics of one engine over the whole split, shortest first."""

from pathlib import Path

import numpy as np
import pytest
import torch

import client.app
from client.engine.batching import MicroBatch, padded_lengths
from client.engine.forward import Forward
from client.worker import make_engine
from server.config.load import parse
from server.evaluation.metrics import on_workers
from server.runs.assembly import Assembly, assemble_client_level
from simulations.engines.inprocess import SERVER_NODE, InProcessGrid, identity


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    cache: Path = tmp_path_factory.mktemp("cache")
    data = {"validation-records": 37, "test-records": 20, "records-per-client": 4, "cache": str(cache)}
    return assemble_client_level(
        parse(
            {
                "clients": 12,
                "sampling-rate": 0.5,
                "privacy": {"delta": 1e-3},
                "model": {"name": "random:bert", "rank": 2, "max-length": 128},
                "data": data,
                "engine": {"token-budget": 256},
            }
        )
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_metrics_do_not_depend_on_the_number_of_workers(
    assembly: Assembly, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = assembly.start + 0.3 * torch.randn(len(assembly.start), generator=torch.Generator().manual_seed(1))
    records = assembly.data.validation
    whole = make_engine(assembly.job).evaluate(adapter, records.select(np.arange(5, 37)))
    longest: list[list[int]] = []
    cut = Forward.micro_batches

    def watched(self: Forward, lengths: np.ndarray, owner: np.ndarray | None = None) -> list[MicroBatch]:
        pieces = cut(self, lengths, owner)
        longest.append([int(padded_lengths(lengths[piece.rows], self.longest).max()) for piece in pieces])
        return pieces

    monkeypatch.setattr(Forward, "micro_batches", watched)
    with identity(SERVER_NODE):
        evaluate = on_workers(
            InProcessGrid(client.app.app, workers), workers, assembly.job.to_json(), {"validation": (5, 37)}, 60.0
        )
        found = evaluate(adapter, "validation")
    assert found.count == whole.count == 32
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)
    assert found.accuracy == pytest.approx(whole.accuracy)
    assert len(longest) == workers
    assert all(pieces == sorted(pieces) for pieces in longest)
    assert any(len(set(pieces)) > 1 for pieces in longest), "nothing was sorted by length"
