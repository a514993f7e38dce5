"""Language models of every architecture: adapters on the right modules, gradients and updates those of autograd."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.models.base import load_base
from client.models.frozen.bitnet import TernaryWeight
from client.models.lm_head import Predictions, run
from client.models.lora import LoraSpec, adapter_layout
from client.models.tasks import make_task
from tests.cases.cohorts import distance, start

_GPT2, _LLAMA, _MLP = "transformer.h.{}.attn.", "model.layers.{}.self_attn.{}_proj", "model.layers.{}.mlp."
# Name, targets, and in the adapter of one layer: module, values of A, values of B (width 32, four heads, two groups).
CASES = [
    ("gpt2", ("c_attn", "attn.c_proj"), [(_GPT2 + "c_attn", 32, 96), (_GPT2 + "c_proj", 32, 32)]),
    ("llama", ("q_proj", "v_proj"), [(_LLAMA.format("{}", "q"), 32, 32), (_LLAMA.format("{}", "v"), 32, 16)]),
    ("llama-tied", ("k_proj", "down_proj"), [(_LLAMA.format("{}", "k"), 32, 16), (_MLP + "down_proj", 64, 32)]),
    ("qwen2", ("q_proj", "v_proj"), [(_LLAMA.format("{}", "q"), 32, 32), (_LLAMA.format("{}", "v"), 32, 16)]),
    ("mistral", ("o_proj", "v_proj"), [(_LLAMA.format("{}", "v"), 32, 16), (_LLAMA.format("{}", "o"), 32, 32)]),
    ("bitnet", ("q_proj", "v_proj"), [(_LLAMA.format("{}", "q"), 32, 32), (_LLAMA.format("{}", "v"), 32, 16)]),
    ("bitnet-ternary", ("q_proj", "o_proj"), [(_LLAMA.format("{}", "q"), 32, 32), (_LLAMA.format("{}", "o"), 32, 32)]),
]  # fmt: skip

ALSO_IN_TEST_COHORT = ("gpt2", "llama", "qwen2", "mistral")


def _case(name, targets):
    model, _ = load_base(f"random:{name}", "causal-lm")
    spec = LoraSpec(2, 4.0, targets)
    return model, spec, start(model, spec)


def _records(count, seed=0):
    draws = np.random.default_rng(seed)
    rows = [draws.integers(3, 200, draws.integers(2, 14)) for _ in range(count)]
    weights = [draws.uniform(0.1, 2.0, len(row)) * (draws.random(len(row)) > 0.2) for row in rows]
    return Records.from_lists(rows, None, weights)


@pytest.mark.parametrize(("name", "targets", "modules"), CASES)
def test_adapters_land_on_the_modules_named(name, targets, modules):
    model, spec, _ = _case(name, targets)
    layout = adapter_layout(model, spec)
    expected = [(path.format(layer), 2 * a + 2 * b) for layer in range(2) for path, a, b in modules]
    pairs = dict.fromkeys(entry.pair for entry in layout.entries if entry.trainable)
    assert list(zip(pairs, layout.blocks(), strict=True)) == expected


@pytest.mark.parametrize(
    ("name", "targets", "task"),
    [*((*case[:2], "causal-lm") for case in CASES), *((*case[:2], "summarisation") for case in CASES[:2])],
)
def test_record_gradients_and_metrics_equal_autograd_one_by_one(name, targets, task):
    model, spec, vector = _case(name, targets)
    records, task = _records(7), make_task(task)
    oracle = SequentialEngine(copy.deepcopy(model), spec, task, precision="fp64")
    expected = torch.cat([chunk.rows for chunk in oracle.per_record_gradients(vector, records)])
    assert (expected.norm(dim=1) > 0).sum() >= 6
    engine = CohortEngine(model, spec, task, precision="fp64", token_budget=40)
    for chunk in engine.per_record_gradients(vector, records):
        assert distance(chunk.rows, expected[chunk.records]) < 1e-11
    assert isinstance(run(model, torch.tensor([[5, 6]]), None), Predictions)
    found, reference = engine.evaluate(vector, records), oracle.evaluate(vector, records)
    assert (found.count, found.accuracy) == (reference.count, reference.accuracy)
    assert found.perplexity == pytest.approx(reference.perplexity, rel=1e-12)


@pytest.mark.parametrize(("name", "targets"), [case[:2] for case in CASES[:-1]])
def test_a_record_gradient_is_that_of_the_plain_model(name, targets):
    """Independent of both engines: one record, adapters added to the weights by hand.

    Not of ternary weights: an adapter beside a rounded weight is no change of that weight.
    """
    model, spec, vector = _case(name, targets)
    model, row = model.double(), np.array([7, 9, 11, 7, 30])
    layout = adapter_layout(model, spec)
    flat = vector.double().requires_grad_()
    weights = {}
    for first, second in zip(layout.entries[::2], layout.entries[1::2], strict=True):
        change = spec.scale * second.of(flat) @ first.of(flat)
        module = model.get_submodule(first.pair)
        weights[first.pair + ".weight"] = module.weight + (change if isinstance(module, torch.nn.Linear) else change.T)
    ids = torch.from_numpy(row)[None]
    logits = torch.func.functional_call(model, weights, kwargs={"input_ids": ids}).logits
    loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    (expected,) = torch.autograd.grad(loss, flat)
    engine = CohortEngine(model, spec, make_task("causal-lm"), precision="fp64")
    (chunk,) = engine.per_record_gradients(vector, Records.from_lists([row]))
    assert distance(chunk.rows[0], expected) < 1e-11
    assert float(chunk.losses[0]) == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize(("name", "targets"), [case[:2] for case in CASES if case[0] not in ALSO_IN_TEST_COHORT])
def test_cohort_updates_equal_sequential_peft(name, targets):
    model, spec, vector = _case(name, targets)
    local = LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=2, epochs=1)
    clients = [_records(size, seed=size) for size in (3, 0, 5)]
    oracle = SequentialEngine(copy.deepcopy(model), spec, make_task("causal-lm"), precision="fp64")
    engine = CohortEngine(model, spec, make_task("causal-lm"), precision="fp64", token_budget=40)
    assert engine.layout == oracle.layout
    found, expected = (one.train_all(vector, clients, local, [1, 2, 3]) for one in (engine, oracle))
    assert distance(found, expected) < 1e-11


def test_ternary_weights_are_rounded_once_and_for_all():
    model, _ = load_base("random:bitnet-ternary", "causal-lm")
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    weight = TernaryWeight(layer)
    assert len(weight.backward(torch.eye(64)).unique()) == 3
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(weight.forward(x), layer(x))
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(layer(x).sum(), x)[0], weight.backward(torch.ones(5, 64)))
