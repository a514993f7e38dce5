"""A federated run of a language model with the real command: what it reports is what its adapter does under PEFT."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

from client.data.prepare import prepare
from client.models.base import load_base
from server.config.load import load
from server.runs.assembly import data_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (
    "engine.kind=inprocess",
    "engine.workers=1",
    "model.name=random:llama",
    "model.task=causal-lm",
    "model.targets=q_proj,v_proj",
    "data.partition=iid",
    "data.canaries=3",
    "public.warm-start-epochs=3",
    "public.warm-start-learning-rate=0.01",
    # A histogram of 12 votes finds a bound of 22 now and then, whose noise undoes the warm start.
    "strategy.controller=fixed",
    "strategy.controller-options.clip-norm=0.03",
)


@pytest.mark.nightly
def test_the_reported_perplexity_is_that_of_the_saved_adapter(lacquer, tmp_path):
    run = lacquer(*(part for setting in SETTINGS for part in ("--set", setting)))
    assert run.finish() == 0, run.stderr()
    results = json.loads((run.run_folder / "results.json").read_text())
    assert "Test perplexity" in run.stdout()
    assert results["majority_accuracy"] is None
    config = load(run.run_folder / "config.toml")
    data = prepare(data_spec(config).replace(cache=str(tmp_path / "cache")))
    assert data.meta["records"]["train"] == 60 * 4 + 30
    base, _ = load_base(config.model.name, "causal-lm")
    before, count = _loss(base, data.test)
    after, _ = _loss(PeftModel.from_pretrained(base, run.run_folder / "adapter"), data.test)  # changes the base
    assert results["test_records"] == count
    assert results["test_loss"] == pytest.approx(after, rel=2e-3)  # bfloat16 products on some machines
    assert results["test_perplexity"] == pytest.approx(math.exp(results["test_loss"]))
    assert after < before


@torch.no_grad()
def _loss(model, records):
    total, count = 0.0, 0
    for index in range(len(records)):
        ids = torch.from_numpy(np.asarray(records.select([index]).tokens, dtype=np.int64))[None]
        total += float(F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count, count


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_preset_chat_learns_to_answer_as_the_clinic_does(lacquer):
    run = lacquer("--set", "rounds=16", settings="chat")
    assert run.finish() == 0, run.stderr()
    results = json.loads((run.run_folder / "results.json").read_text())
    assert results["test_accuracy"] > 0.65, "half of that before the first round"
    assert results["test_perplexity"] < 4
