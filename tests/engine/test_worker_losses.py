"""Queries about losses are answered with the loss of the model as it was sent, whatever training made of it after."""

import numpy as np
import pytest
import torch

from client.worker import Worker
from privacy.clipping.norms import FlatClip
from privacy.contribution import GRID, Plan
from privacy.queries import BoundedMean, LossHistogram
from privacy.randomness.rng import torch_generator
from server.config.load import parse
from server.runs.assembly import Assembly, assemble_client_level
from strategies.adapter.trainable import TrainedSubset
from strategies.messages.client_update import TrainRequest

CLIENTS = np.arange(2, 10)


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    table = {
        "rounds": 2,
        "clients": 12,
        "sampling-rate": 0.5,
        "privacy": {"delta": 1e-3, "mode": "filter"},
        "strategy": {"controller": "fixed"},
        "model": {"name": "random:bert", "rank": 2, "max-length": 32},
        "data": {
            "validation-records": 20,
            "test-records": 20,
            "records-per-client": 4,
            "cache": str(tmp_path_factory.mktemp("cache")),
        },
        "local": {"learning-rate": 5.0},
    }
    return assemble_client_level(parse(table))


@pytest.mark.parametrize("sequential", [False, True])
def test_the_mean_is_that_of_the_broadcast_models_losses(assembly: Assembly, sequential: bool) -> None:
    worker = Worker(assembly.job.replace(sequential=sequential))
    clients = [worker.data.client(int(client)) for client in CLIENTS]
    start = assembly.start + 0.2 * torch.randn(len(assembly.start), generator=torch_generator(0, "start"))
    losses = worker.engine.losses(start, clients)
    bound = float(losses.median())  # half of them are cut
    edges = (float(losses.min()), bound)
    queries = (BoundedMean(bound, 1.0), LossHistogram(edges, 1.0))
    plan = Plan(FlatClip(0.1, assembly.setting.dimension(1)), 1.0, queries)
    request = TrainRequest(1, start.numpy(), plan, TrainedSubset(), CLIENTS, worker.job.to_json())
    mean, histogram = worker.contribution(request).answers
    assert float(mean) * bound / GRID == pytest.approx(float(losses.clamp(0, bound).sum()), rel=1e-6)
    assert int(histogram.sum()) == len(CLIENTS) * GRID
    trained = worker.engine.train_all(start, clients, worker.job.local, [0] * len(clients))
    after = worker.engine.candidate_losses(start, (assembly.layout.trainable_values(start) + trained)[:, None], clients)
    assert not torch.allclose(after[:, 0], losses, rtol=0.05)  # so that losses after training would not have passed
