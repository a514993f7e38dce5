"""Training on the server's public records: a warm start that learns, a basis that spans public gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch

from server.config.load import ConfigError, parse
from server.runs.assembly import Assembly, assemble
from server.runs.gradient_init import aligned
from server.runs.public_data import PublicTraining
from strategies.adapter.trainable import TrainedSubset


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
    assert public.engine is not None
    before = public.engine.evaluate(made.start, public.records).loss
    after = public.engine.evaluate(public.warm_start(made.start), public.records).loss
    assert after < before - 0.01
    assert torch.equal(public.warm_start(made.start), public.warm_start(made.start)), "not repeatable"


def test_aligned_adapters_reach_more_of_the_gradient(cache: Path) -> None:
    """A random A lets B reach about r / in of a gradient's energy, an aligned one most; both B and head are as long."""
    made = assembly(cache, aligned=True, **{"warm-start-epochs": 3})
    public, layout = PublicTraining.of(made), made.layout
    engine = public.engine
    assert engine is not None
    warm = public._trained(made.start)
    found = aligned(made.start, warm, engine, public.records, 0)
    assert torch.equal(found, aligned(made.start, warm, engine, public.records, 0)), "not repeatable"
    assert torch.equal(engine.layout.trainable(found), engine.layout.trainable(made.start)), "only A may change"

    def norms(adapter: torch.Tensor, factor: str) -> float:
        """Root mean square over the records of the gradients of all B, or of the heads, where B = 0."""
        probe = warm.clone()
        for entry in layout.entries:
            if entry.factor == "A":
                entry.of(probe).copy_(entry.of(adapter))
            elif entry.factor == "B":
                entry.of(probe).zero_()
        energy = 0.0
        for chunk in engine.per_record_gradients(probe, public.records):
            for entry, offset in engine.layout.trainable_entries():
                if entry.factor == factor:
                    energy += float(chunk.rows[:, offset : offset + entry.size].square().sum())
        return energy**0.5

    assert norms(found, "B") == pytest.approx(norms(found, "head"), rel=1e-3)
    length = [
        float(torch.cat([e.of(v).flatten() for e in layout.entries if e.factor == "A"]).norm())
        for v in (found, made.start)
    ]
    assert norms(found, "B") / length[0] > 2 * norms(made.start, "B") / length[1]


def test_alignment_without_a_warm_start_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match="needs warm-start-epochs"):
        assembly(cache, aligned=True)


def test_the_basis_is_the_leading_span_of_public_gradients(cache: Path) -> None:
    made = assembly(cache, subspace=8, **{"warm-start-epochs": 1})
    public = PublicTraining.of(made)
    start = public.warm_start(made.start)
    basis = public.basis(start, TrainedSubset("b")).double()
    assert basis.shape == (8, made.setting.dimension(1))
    assert torch.allclose(basis @ basis.T, torch.eye(8, dtype=torch.float64), atol=1e-5)
    assert public.engine is not None
    rows = torch.zeros(public.used, made.setting.dimension(1), dtype=torch.float64)
    for chunk in public.engine.per_record_gradients(start, public.records):
        rows[torch.from_numpy(np.asarray(chunk.records))] = chunk.rows.double()
    singular = torch.linalg.svdvals(rows)
    assert float((rows @ basis.T).square().sum()) == pytest.approx(float(singular[:8].square().sum()), rel=1e-4)


def test_a_basis_is_of_what_a_round_sends(cache: Path) -> None:
    """Other factors, one rank of two, a scale: gradients of the truncated adapter, cut and scaled as updates are."""
    made = assembly(cache, subspace=4)
    public, part = PublicTraining.of(made), TrainedSubset("both", 1, scale_a=3.0)
    start = made.start + 0.1
    basis = public.basis(start, part).double()
    engine = public.engine
    assert engine is not None
    engine.train_factors("both")
    rows = torch.zeros(public.used, engine.layout.dim)
    for chunk in engine.per_record_gradients(engine.layout.truncated(start, 1), public.records):
        rows[torch.from_numpy(np.asarray(chunk.records))] = chunk.rows
    sent = part.sent(engine.layout, rows).double()
    assert basis.shape == (4, sent.shape[1]) == (4, part.layout(made.layout).dim)
    singular = torch.linalg.svdvals(sent)
    assert float((sent @ basis.T).square().sum()) == pytest.approx(float(singular[:4].square().sum()), rel=1e-4)


def test_a_subspace_larger_than_the_public_records_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"public\.subspace = 31"):
        PublicTraining.of(assembly(cache, subspace=31))
