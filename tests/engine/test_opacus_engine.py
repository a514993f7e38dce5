"""Opacus' hooks and the stacked engine give the same gradients of single records."""

import pytest
import torch

from client.engine.cohort import CohortEngine
from client.engine.sequential import OpacusEngine
from client.engine.stacked_model import UnsupportedAdapter
from client.models.lora import LoraSpec
from client.models.tasks import CausalLM
from client.models.toy import build as random_model
from tests.cases.cohorts import build, distance, fresh
from tests.cases.record_level import EXACT, records, run, site_training, vector


def rows(engine, adapter, data):
    found = torch.zeros(len(data), engine.layout.dim, dtype=torch.float64)
    for chunk in engine.per_record_gradients(adapter, data):
        found[torch.from_numpy(chunk.records)] = chunk.rows
    return found


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral"])
def test_both_ways_give_the_same_gradients(name):
    model, spec, task = build(name)
    data, adapter = records(7), vector(name)
    stacked = CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=60)
    hooks = OpacusEngine(fresh(model), spec, task, precision="fp64", token_budget=100)
    for factors in ("both", "b"):
        for engine in (stacked, hooks):
            engine.train_factors(factors)
        expected = rows(stacked, adapter, data)
        assert distance(rows(hooks, adapter, data), expected) < 1e-10
        assert bool((expected.norm(dim=1) > 0).all())


def test_a_site_trains_by_hooks(tmp_path):
    model, spec, task = build("llama")
    folders = [tmp_path / name for name in ("stacked", "hooks")]
    moved = []
    for folder, engine in zip(folders, (None, OpacusEngine(fresh(model), spec, task, precision="fp64")), strict=True):
        folder.mkdir()
        moved.append(run(site_training(folder, records(), made=engine, **EXACT), 2) - vector())
    assert distance(moved[1], moved[0]) < 1e-5


def test_what_has_no_rule_is_refused():
    model = random_model("random:gpt2", causal=True)
    with pytest.raises(UnsupportedAdapter, match="Opacus"):
        OpacusEngine(model, LoraSpec(4, 8.0, ("wte",)), CausalLM())
