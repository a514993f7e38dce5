"""The attention that a run names is the one its engine computes with."""

import pytest
import torch

from client.engine.local_training import LocalTraining
from client.models.frozen.base import FrozenBase
from client.models.lora import LoraSpec
from client.worker import Job, make_engine
from tests.cases.cohorts import clients, start

JOB = Job(
    model="random:llama",
    task="causal-lm",
    num_labels=0,
    spec=LoraSpec(2, 4.0, ("q_proj", "v_proj")),
    local=LocalTraining(),
    data=".",
    seed=0,
    base=FrozenBase(device="cpu", precision="fp32"),
)


def test_a_worker_has_what_its_job_says():
    asked = FrozenBase(device="cpu", precision="bf16-model", quantisation="nf4", checkpoint_blocks=True)
    engine = make_engine(JOB.replace(base=asked))
    assert (str(engine.device), engine.precision) == ("cpu", "bf16-model")
    layer = engine._stacked.model.model.layers[0]
    assert layer.mlp.down_proj.weight_.stored.four
    assert layer.forward.func.__name__ == "_computed_again"
    assert make_engine(JOB)._stacked.model.config._attn_implementation == "lacquer_short"
    vector = start(JOB.base.load(JOB.model, JOB.task)[0], JOB.spec)
    assert torch.isfinite(engine.train_all(vector, clients((5,)), JOB.local, (1,))).all()


def test_a_gpu_that_is_not_there_is_refused_by_the_worker(monkeypatch):
    from client.models import devices

    monkeypatch.setattr(devices, "find_cuda", lambda: devices.Cuda(0, "nothing here"))
    with pytest.raises(ValueError, match="nothing here"):
        make_engine(JOB.replace(base=FrozenBase(device="cuda")))


def test_flash_attention_is_switched_on_after_loading(monkeypatch):
    model, _ = FrozenBase(precision="bf16-model", attention="flash_attention_2").load("random:llama", "causal-lm")
    assert model.config._attn_implementation == "flash_attention_2"
    assert model.head_is_last, "what is found out on the CPU while loading"
