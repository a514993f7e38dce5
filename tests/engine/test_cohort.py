"""The cohort engine gives every client what plain PEFT would have given it alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from client.engine import slots
from client.engine.batching import local_steps
from client.engine.cohort import CohortEngine
from client.engine.engine import build_engine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.engine.stacked_model import UnsupportedAdapter
from tests.cases.cohorts import ARCHITECTURES, build, clients, distance, fresh, start

SIZES = (5, 0, 9, 1, 7)
SEEDS = tuple(range(100, 105))
OPTIMIZERS = {
    "sgd": LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=4, epochs=2, weight_decay=0.01),
    "momentum": LocalTraining(optimizer="momentum", learning_rate=0.05, batch_size=4, epochs=2, weight_decay=0.01),
    "adamw": LocalTraining(optimizer="adamw", learning_rate=1e-3, batch_size=4, epochs=2, weight_decay=0.1),
}


def both(name, local, *, precision, train="both", slots=3, token_budget=96, weights=False):
    model, spec, task = build(name)
    spec, vector = replace(spec, train=train), start(model, spec)
    cohort = clients(SIZES, weights=weights)
    oracle = SequentialEngine(fresh(model), spec, task, precision=precision)
    engine = CohortEngine(fresh(model), spec, task, precision=precision, slots=slots, token_budget=token_budget)
    assert engine.layout == oracle.layout
    return engine.train_all(vector, cohort, local, SEEDS), oracle.train_all(vector, cohort, local, SEEDS)


SLOTS = [(3, 96), (1, 1), (1, 4096), (3, 50), (8, 200), (8, 4096), (None, 64)]
TABLE = [
    (ARCHITECTURES[row % 7], list(OPTIMIZERS)[row % 3], ("both", "a", "b")[row // 7], SLOTS[row // 3])
    for row in range(21)
]
"""Every pair of architecture, optimizer and trained factors, and every pair of optimizer and slots with tokens."""


@pytest.mark.parametrize(("name", "optimizer", "train", "sizes"), TABLE)
def test_updates_equal_sequential_peft_in_double_precision(name, optimizer, train, sizes):
    slots, tokens = sizes
    local = OPTIMIZERS[optimizer]
    found, expected = both(name, local, precision="fp64", train=train, slots=slots, token_budget=tokens)
    assert expected.norm(dim=1).tolist()[1] == 0.0
    assert (expected.norm(dim=1) > 0).sum() == len(SIZES) - 1
    for row, reference in zip(found, expected, strict=True):
        assert torch.linalg.norm(row - reference) <= 1e-10 * torch.linalg.norm(reference)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_updates_equal_sequential_peft_in_single_precision(name):
    for local in (OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]):
        found, expected = both(name, local, precision="fp32")
        assert distance(found, expected) < 1e-4


def test_token_weights_reach_the_loss():
    found, expected = both("gpt2", OPTIMIZERS["sgd"], precision="fp64", weights=True)
    plain, _ = both("gpt2", OPTIMIZERS["sgd"], precision="fp64")
    assert distance(found, expected) < 1e-10
    assert distance(plain, expected) > 1e-2


def test_an_update_depends_on_the_client_and_its_seed_only():
    model, spec, task = build("bert")
    vector, cohort, local = start(model, spec), clients(SIZES), OPTIMIZERS["sgd"]
    engine = CohortEngine(model, spec, task, precision="fp64", slots=4)
    together = engine.train_all(vector, cohort, local, SEEDS)
    order = [4, 0, 2]
    apart = engine.train_all(vector, [cohort[i] for i in order], local, [SEEDS[i] for i in order])
    assert distance(apart, together[order]) < 1e-12
    other = engine.train_all(vector, [cohort[4]], local, [1])
    assert distance(other, together[4:5]) > 1e-3


def test_all_clients_empty():
    model, spec, task = build("bert")
    engine = CohortEngine(model, spec, task)
    updates = engine.train_all(torch.zeros(engine.layout.size), clients((0, 0)), LocalTraining(), (1, 2))
    assert updates.shape == (2, engine.layout.dim)
    assert not updates.any()


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2-classifier"])  # language models: test_architectures.py
def test_per_record_gradients_equal_autograd_one_by_one(name):
    model, spec, task = build(name)
    task = replace(task, balance="none") if hasattr(task, "balance") else task
    vector, records = start(model, spec), clients((11,))[0]
    oracle = SequentialEngine(fresh(model), spec, task, precision="fp64")
    expected = torch.cat([chunk.rows for chunk in oracle.per_record_gradients(vector, records)])
    engine = CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=60)
    seen = []
    for chunk in engine.per_record_gradients(vector, records):
        longest = records.lengths[chunk.records].max()
        assert len(chunk.records) * longest <= 60
        assert distance(chunk.rows, expected[chunk.records]) < 1e-12
        seen += chunk.records.tolist()
    assert sorted(seen) == list(range(11))


def test_a_module_the_loss_does_not_reach_has_gradient_zero():
    model, spec, task = build("bert")
    spec = replace(spec, targets=("query",))
    engine = CohortEngine(model, spec, task, precision="fp64", token_budget=60)
    vector = torch.randn(engine.layout.size, dtype=torch.float64)
    head = engine.layout.blocks()[-1]
    model.classifier.forward = lambda pooled: pooled[:, :3]  # the head is there, but nothing asks it
    for chunk in engine.per_record_gradients(vector, clients((6,))[0]):
        assert chunk.rows[:, :-head].any()
        assert not chunk.rows[:, -head:].any()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_record_gradients_of_many_clients_at_their_own_adapters(name):
    model, spec, task = build(name)
    vector, cohort = start(model, spec), clients(SIZES)
    oracle = SequentialEngine(fresh(model), spec, task, precision="fp64")
    engine = CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=60)
    vectors = vector_candidates(engine, vector, each=1)[:, 0]
    expected = {}
    for chunk in oracle.cohort_record_gradients(vector, cohort, vectors):
        expected[int(chunk.clients[0]), int(chunk.records[0])] = chunk.rows[0]
    found = {}
    for chunk in engine.cohort_record_gradients(vector, cohort, vectors):
        for client, record, row in zip(chunk.clients, chunk.records, chunk.rows, strict=True):
            found[int(client), int(record)] = row
    assert found.keys() == expected.keys()
    assert len(found) == sum(SIZES)
    for key, row in found.items():
        assert distance(row, expected[key]) < 1e-10


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_losses_and_metrics_equal_the_oracle(name):
    model, spec, task = build(name)
    vector, cohort = start(model, spec), clients(SIZES)
    oracle = SequentialEngine(fresh(model), spec, task, precision="fp64")
    engine = CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=70)
    candidates = vector_candidates(engine, vector, each=3)
    found = engine.candidate_losses(vector, candidates, cohort)
    assert found.shape == (len(SIZES), 3)
    torch.testing.assert_close(found, oracle.candidate_losses(vector, candidates, cohort), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(engine.losses(vector, cohort), oracle.losses(vector, cohort), rtol=1e-6, atol=1e-7)
    assert found[1].tolist() == [0.0, 0.0, 0.0]
    metrics, reference = engine.evaluate(vector, cohort[4]), oracle.evaluate(vector, cohort[4])
    assert metrics.loss == pytest.approx(reference.loss, rel=1e-6)
    assert metrics.accuracy == reference.accuracy


def vector_candidates(engine, vector, *, each):
    generator = torch.Generator().manual_seed(8)
    noise = torch.randn(len(SIZES), each, engine.layout.dim, generator=generator)
    return engine.layout.trainable_values(vector) + 0.1 * noise


def test_evaluating_between_two_chunks_of_updates_disturbs_nothing():
    model, spec, task = build("bert")
    vector, cohort, local = start(model, spec), clients(SIZES), OPTIMIZERS["adamw"]
    engine = CohortEngine(model, spec, task, precision="fp64", slots=2)
    expected = engine.train_all(vector, cohort, local, SEEDS)
    for updates in engine.train(vector, cohort, local, SEEDS):
        engine.evaluate(vector, cohort[0])
        assert distance(updates.deltas, expected[updates.clients]) < 1e-12 or not updates.deltas.any()


def test_updates_are_handed_over_in_pieces_that_fit(monkeypatch):
    model, spec, task = build("bert")
    vector, cohort, local = start(model, spec), clients((4,) * 5), OPTIMIZERS["sgd"]
    engine = CohortEngine(model, spec, task, precision="fp64", slots=5)
    expected = engine.train_all(vector, cohort, local, SEEDS[:5])
    monkeypatch.setattr(slots, "TOGETHER", 2 * 8 * engine.layout.dim)
    pieces = list(engine.train(vector, cohort, local, SEEDS[:5]))
    assert [len(piece.clients) for piece in pieces] == [2, 2, 1]
    order = np.concatenate([piece.clients for piece in pieces])
    assert torch.equal(torch.cat([piece.deltas for piece in pieces]), expected[torch.from_numpy(order)])


def test_alternating_factors_on_one_engine():
    model, spec, task = build("bert")
    vector, cohort, local = start(model, spec), clients(SIZES), OPTIMIZERS["sgd"]
    engine = CohortEngine(fresh(model), spec, task, precision="fp64")
    for train in ("a", "b", "both"):
        engine.train_factors(train)
        oracle = SequentialEngine(fresh(model), replace(spec, train=train), task, precision="fp64")
        found = engine.train_all(vector, cohort, local, SEEDS)
        assert distance(found, oracle.train_all(vector, cohort, local, SEEDS)) < 1e-10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"targets": ("word_embeddings",)}, "Embedding"),
    ],
)
def test_what_cannot_be_stacked_is_refused_with_the_reason(change, reason):
    model, spec, task = build("bert")
    with pytest.raises(UnsupportedAdapter, match=reason):
        CohortEngine(model, replace(spec, **change), task)


def test_bad_settings_name_the_argument():
    model, spec, task = build("bert")
    with pytest.raises(ValueError, match=r"token_budget .*>= 1"):
        CohortEngine(model, spec, task, token_budget=0)
    with pytest.raises(ValueError, match="precision must be one of"):
        CohortEngine(model, spec, task, precision="int8")
    with pytest.raises(ValueError, match=r"targets \['wq'\] name no module"):
        CohortEngine(model, replace(spec, targets=("wq",)), task)
    engine = CohortEngine(model, spec, task)
    with pytest.raises(ValueError, match=r"clients and seeds .*length"):
        list(engine.train(torch.zeros(engine.layout.size), clients((2,)), LocalTraining(), ()))
    with pytest.raises(ValueError, match="full adapter vector must have"):
        engine.evaluate(torch.zeros(3), clients((2,))[0])


def test_batches_cover_each_epoch_once_in_a_new_order():
    steps = local_steps(LocalTraining(batch_size=4, epochs=2), 10, seed=3)
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    first, second = np.concatenate(steps[:3]), np.concatenate(steps[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert len(local_steps(LocalTraining(batch_size=4, epochs=9, max_steps=5), 10, seed=3)) == 5


def test_work_is_bounded_unless_it_is_asked_for_without():
    """One client with very many records must not hold up its worker, and with it the clients of its shard."""
    bounded, whole = LocalTraining(batch_size=1), LocalTraining(batch_size=1, max_steps=0)
    assert len(local_steps(bounded, 20_000, seed=3)) == bounded.max_steps < len(local_steps(whole, 20_000, seed=3))


@pytest.mark.parametrize("change", [{"dora": True}, {"bias": "lora_only"}, {"targets": ("query", "word_embeddings")}])
def test_adapters_that_cannot_be_stacked_train_sequentially_with_one_notice(change, caplog):
    model, spec, task = build("bert")
    engine = build_engine(model, replace(spec, **change), task)
    assert isinstance(engine, SequentialEngine)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    vector = torch.cat([t.detach().reshape(-1) for t in engine._tensors.values()])
    cohort, local = clients((4, 6)), OPTIMIZERS["sgd"]
    before = engine.losses(vector, cohort)
    updates = engine.train_all(vector, cohort, local.replace(epochs=8), (1, 2))
    assert updates.shape == (2, engine.layout.dim)
    for client in range(2):
        trained = engine.layout.with_trainable(vector, engine.layout.trainable_values(vector) + updates[client])
        assert engine.losses(trained, cohort)[client] < before[client]
