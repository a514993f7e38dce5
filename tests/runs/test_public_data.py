"""Training on the server's public records: a warm start that learns."""

from pathlib import Path

import numpy as np
import pytest
import torch

from server.config.load import parse
from server.runs.assembly import Assembly, assemble
from server.runs.public_data import PublicTraining


def assembly(cache: Path, **public: object) -> Assembly:
    return assemble(
        parse(
            {
                "rounds": 3,
                "clients": 40,
                "sampling-rate": 0.2,
                "privacy": {"delta": 1e-3},
                "strategy": {"aggregation": "ffa"},
                "model": {"name": "random:bert", "rank": 2, "max-length": 48},
                "data": {"validation-records": 60, "test-records": 20, "records-per-client": 3, "cache": str(cache)},
                "public": public,
            }
        )
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_nothing_switched_on_uses_no_public_record(cache: Path) -> None:
    made = assembly(cache)
    public = PublicTraining.of(made)
    assert public.used == 0
    assert public.warm_start(made.start) is made.start


def test_a_warm_start_lowers_the_loss_on_the_records_it_used(cache: Path) -> None:
    made = assembly(cache, **{"warm-start-epochs": 10, "warm-start-learning-rate": 0.003})
    public = PublicTraining.of(made)
    assert public.used == 30
    assert public.records.tokens.tolist() == made.data.validation.select(np.arange(30)).tokens.tolist()
    assert public.engine is not None
    before = public.engine.evaluate(made.start, public.records).loss
    after = public.engine.evaluate(public.warm_start(made.start), public.records).loss
    assert after < before - 0.01
    assert torch.equal(public.warm_start(made.start), public.warm_start(made.start)), "not repeatable"
