"""Blocks computed again in the backward pass give the same numbers, bit by bit, and keep less."""

from dataclasses import replace

import pytest
import torch

from client.engine.cohort import CohortEngine
from client.engine.engine import build_engine
from client.engine.local_training import LocalTraining
from client.engine.stacked import Rows
from client.models.base import load_base
from client.models.lora import LoraSpec
from client.models.tasks import make_task
from server.config.load import ConfigError, parse
from tests.cases.cohorts import ARCHITECTURES, build, clients, fresh, start


def engines(model, spec, task, **options):
    return [CohortEngine(fresh(model), spec, task, checkpoint_blocks=again, **options) for again in (False, True)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_updates_and_record_gradients_are_the_same(name):
    model, spec, task = build(name)
    vector, cohort = start(model, spec), clients((5, 9, 3))
    local = LocalTraining(optimizer="adamw", learning_rate=1e-3, batch_size=4, epochs=2)
    plain, again = engines(model, spec, task, precision="fp32", token_budget=60)
    expected = plain.train_all(vector, cohort, local, (1, 2, 3))
    assert torch.equal(again.train_all(vector, cohort, local, (1, 2, 3)), expected)
    assert expected.norm(dim=1).min() > 0
    for one, two in zip(
        *(engine.cohort_record_gradients(vector, cohort) for engine in (plain, again)),
        strict=True,
    ):
        assert torch.equal(one.rows, two.rows)
        assert torch.equal(one.losses, two.losses)
    assert again.evaluate(vector, cohort[0]) == plain.evaluate(vector, cohort[0])


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_it_goes_with_quantised_weights_and_a_prefix_cache(layers):
    model, _, task = build("llama")
    spec = LoraSpec(4, 8.0, ("q_proj", "down_proj"), layers)
    vector, cohort, local = start(model, spec), clients((5, 9)), LocalTraining(batch_size=4)
    plain, again = engines(model, spec, task, precision="fp32", quantisation="int8", prefix_memory=2**20)
    assert (again._forward.prefix is not None) == (layers == (1,))
    expected = plain.train_all(vector, cohort, local, (1, 2))
    assert torch.equal(again.train_all(vector, cohort, local, (1, 2)), expected)


def kept(engine, vector, cohort):
    """Bytes of tensors that a forward pass keeps for the backward pass."""
    pool, stores, held = engine._forward.pool(cohort), {}, []

    def keep(tensor):
        held.append(tensor)
        stores[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    count = len(pool.lengths)
    engine._stacked.bind(engine._stacked.inward(vector, full=True), None, engine._stacked.record_buffers(count))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine._forward.losses(pool, torch.arange(count).numpy(), Rows.per_record(count), None)
    return sum(stores.values())


def test_little_is_kept():
    model, _ = load_base("minilm", "classification", 3)
    spec, task = LoraSpec(4, 8.0, ("query", "value"), heads=("classifier",)), make_task("classification", 3)
    vector, cohort = start(model, spec), clients((8,), longest=60)
    plain, again = (kept(engine, vector, cohort) for engine in engines(model, spec, task, precision="fp32"))
    assert again < plain / 8


def test_plain_peft_which_keeps_every_activation_is_refused():
    alone = {"clients": 1, "sampling-rate": 1.0, "privacy": {"unit": "record"}, "site": {"gradients": "opacus"}}
    for other, words in (({"engine": {"sequential": True}}, "engine.sequential = false"), (alone, "'stacked'")):
        parse(other)
        with pytest.raises(ConfigError, match=f"checkpoint-blocks = true needs .*{words}"):
            parse({**other, "engine": {**other.get("engine", {}), "checkpoint-blocks": True}})
    model, spec, task = build("bert")
    with pytest.raises(ValueError, match=r"checkpoint-blocks = true: .*DoRA.*keeps every activation"):
        build_engine(model, replace(spec, dora=True), task, checkpoint_blocks=True)


def test_a_model_without_a_list_of_layers_is_refused():
    from client.engine.checkpointing import checkpoint_blocks

    with pytest.raises(ValueError, match="has no list of layers"):
        checkpoint_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2)))
