"""Starting from cached hidden states changes nothing but the time."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.prefix import GROWTH, PrefixCache
from tests.cases.cohorts import build, clients, distance, fresh, start

SIZES = (5, 0, 9, 4)
SEEDS = (1, 2, 3, 4)
LOCAL = LocalTraining(optimizer="adamw", learning_rate=1e-3, batch_size=4, epochs=2)
TOKEN_BYTES = 32 * 8  # hidden size in float64


def engines(name, *, memory, folder=None, tokens=96, head_only=False):
    model, spec, task = build(name)
    top = model.config.num_hidden_layers - 1
    spec = replace(spec, targets=()) if head_only else replace(spec, layers=(top,))
    vector = start(model, spec)
    plain = CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=tokens)
    cached = CohortEngine(
        fresh(model),
        spec,
        task,
        precision="fp64",
        token_budget=tokens,
        prefix_memory=memory,
        prefix_folder=folder,
    )
    return plain, cached, vector


def count_layer_calls(engine, monkeypatch):
    """Of the lowest layer, and of the last if it comes before what is trained."""
    calls = []
    layers = engine._forward.prefix._model.bert.encoder.layer
    for wrapped in (layers[0], *(layers[-1:] if not engine.spec.targets else ())):
        layer, original = wrapped.layer, wrapped.layer.forward
        monkeypatch.setattr(layer, "forward", lambda *a, original=original, **k: calls.append(1) or original(*a, **k))
    return calls


HEADS = ["bert", "roberta", "gpt2-classifier"]


@pytest.mark.parametrize(
    ("name", "head_only"),
    [
        *((name, False) for name in ["bert", "roberta", "gpt2", "gpt2-classifier", "llama", "qwen2", "mistral"]),
        *((name, True) for name in HEADS),
    ],
)
@pytest.mark.nightly
def test_training_and_losses_are_the_same_with_the_cache(name, head_only):
    plain, cached, vector = engines(name, memory=2**20, head_only=head_only)
    assert head_only == all(entry.factor == "head" for entry in cached.layout.entries)
    assert cached._forward.prefix is not None
    cohort = clients(SIZES)
    expected = plain.train_all(vector, cohort, LOCAL, SEEDS)
    for _ in range(2):  # the second round finds everything in the cache
        assert distance(cached.train_all(vector, cohort, LOCAL, SEEDS), expected) < 1e-10
    torch.testing.assert_close(cached.losses(vector, cohort), plain.losses(vector, cohort))
    assert cached.evaluate(vector, cohort[2]).loss == pytest.approx(plain.evaluate(vector, cohort[2]).loss)


@pytest.mark.parametrize("head_only", [False, True])
def test_lower_layers_run_once_per_record(monkeypatch, head_only):
    _, cached, vector = engines("bert", memory=2**20, head_only=head_only)
    calls = count_layer_calls(cached, monkeypatch)
    cohort = clients(SIZES)
    cached.train_all(vector, cohort, LOCAL, SEEDS)
    assert calls
    calls.clear()
    cached.train_all(vector + 1.0, cohort[::-1], LOCAL, SEEDS)
    cached.evaluate(vector, cohort[2])
    assert not calls


@pytest.mark.parametrize("memory_tokens", [1, 40, 100])
@pytest.mark.parametrize("disk", [False, True])
def test_a_full_memory_goes_to_disk_or_is_computed(memory_tokens, disk, tmp_path):
    plain, cached, vector = engines(
        "bert", memory=memory_tokens * TOKEN_BYTES, folder=tmp_path / "cache" if disk else None
    )
    cohort = clients(SIZES)
    expected = plain.train_all(vector, cohort, LOCAL, SEEDS)
    for _ in range(2):
        assert distance(cached.train_all(vector, cohort, LOCAL, SEEDS), expected) < 1e-10
    kept = len(cached._forward.prefix._cache)
    total = sum(SIZES)
    assert kept == total if disk else kept < total
    assert not disk or not list((tmp_path / "cache").iterdir())  # nothing is left behind


def test_nothing_to_cache_when_the_first_layer_is_adapted():
    model, spec, task = build("bert")
    engine = CohortEngine(model, spec, task, prefix_memory=2**20)
    assert engine._forward.prefix is None


def test_gather_returns_what_was_put(tmp_path):
    cache = PrefixCache(4, torch.float32, 6 * 16, tmp_path, disk=8 * 16)
    states = [torch.randn(n, 4) for n in (3, 2, 4, 3)]
    places = [cache.put(bytes([i]), state) for i, state in enumerate(states)]
    assert [store for store, _ in places] == [0, 0, 1, 1]
    assert cache.put(b"more", torch.randn(2, 4)) == (-1, -1)
    assert cache.find(b"more") == (-1, -1)
    lengths = np.array([3, 2, 4, 3])
    padded = cache.gather(np.array(places), lengths, int(lengths.max()))
    assert padded.shape == (4, 4, 4)
    for row, state in zip(padded, states, strict=True):
        assert torch.equal(row[: len(state)], state)
        assert row.isfinite().all()


def test_a_full_disk_ends_the_cache_and_not_the_run(tmp_path, monkeypatch, caplog):
    cache = PrefixCache(4, torch.float32, 0, tmp_path)
    first, second = torch.randn(3, 4), torch.randn(2, 4)
    assert cache.put(b"first", first) == (1, 0)
    monkeypatch.setattr("client.engine.prefix.GROWTH", 32)
    cache._allocated = 3 * 16

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    assert cache.put(b"second", second) == (-1, -1)
    assert "No space left on device" in caplog.text
    assert cache.put(b"third", second[:1]) == (-1, -1)
    assert len(caplog.records) == 1
    assert torch.equal(cache.gather(np.array([[1, 0]]), np.array([3]), 3)[0], first)


def test_the_file_takes_the_space_it_needs_and_no_more(tmp_path):
    cache = PrefixCache(4, torch.float32, 0, tmp_path, disk=2**30)
    assert os.fstat(cache._file).st_blocks == 0
    cache.put(b"first", torch.randn(3, 4))
    assert 0 < os.fstat(cache._file).st_blocks * 512 <= 2 * GROWTH
