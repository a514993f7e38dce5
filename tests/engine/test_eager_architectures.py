"""Architectures without fused attention, and with unusual layers: independent of company; what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, MambaConfig, T5Config

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.base import UnsupportedModel, load_base, load_skeleton
from client.models.lora import LoraSpec
from client.models.targets import targets_of
from client.models.tasks import make_task
from tests.cases.cohorts import start

CASES = [
    ("gemma2", "causal-lm", ("q_proj", "v_proj")),
    ("bloom", "causal-lm", ("query_key_value",)),
    ("gpt-neo", "causal-lm", ("q_proj", "v_proj")),
    ("deepseek-v3", "causal-lm", ("q_b_proj", "kv_b_proj")),
    ("deberta-v2", "classification", ("value_proj",)),
    ("mpnet", "classification", ("q", "v")),
    ("gemma2", "classification", ("q_proj", "v_proj")),
]
LOCAL = LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=2, epochs=1)


def made(name, task):
    labels = 3 if task == "classification" else None
    model, _ = load_base(f"random:{name}", task, labels)
    spec = LoraSpec(2, 4.0, targets_of(model, "auto"), heads=("classifier",) if labels else ())
    return model, spec, make_task(task, labels or 0)


def records(count, seed, longest=14):
    draws = np.random.default_rng(seed)
    rows = [draws.integers(3, 200, draws.integers(2, longest)) for _ in range(count)]
    return Records.from_lists(rows, draws.integers(0, 3, count))


@pytest.mark.parametrize(("name", "task", "targets"), CASES)
def test_an_update_is_the_same_bit_by_bit_in_any_company(name, task, targets):
    model, spec, task = made(name, task)
    assert spec.targets == targets
    vector = start(model, spec)
    engine = CohortEngine(model, spec, task, token_budget=64)
    own, others = records(4, seed=1), [records(5, seed=2, longest=40), records(1, seed=3, longest=4)]
    (alone,) = engine.train_all(vector, [own], LOCAL, [7])
    for place, company in ((0, [own, *others]), (1, [others[0], own]), (2, [*others, own])):
        seeds = [7 if client is own else 9 for client in company]
        assert torch.equal(engine.train_all(vector, company, LOCAL, seeds)[place], alone)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(vocab_size=99, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2), r"encoder-decoder \(t5\)"),
        (MambaConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1, state_size=2), r"\(mamba\) carries a state"),
    ],
)
def test_what_is_not_trained_here_is_refused_by_its_configuration_alone(config: AutoConfig, reason, tmp_path: Path):
    config.save_pretrained(tmp_path)
    task = "causal-lm" if config.model_type == "mamba" else "classification"
    with pytest.raises(UnsupportedModel, match=reason):
        load_skeleton(str(tmp_path), task, 2)


def test_an_adapter_on_what_all_records_share_is_refused():
    """DeBERTa makes queries of its positions too: rows of one client would be those of another."""
    model, _ = load_base("random:deberta-v2", "classification", 3)
    spec = LoraSpec(2, 4.0, ("query_proj", "value_proj"), heads=("classifier",))
    vector = start(model, spec)
    engine = CohortEngine(model, spec, make_task("classification", 3))
    with pytest.raises(ValueError, match=r"model\.targets names a layer that this model also uses on"):
        engine.evaluate(vector, records(4, seed=1))
