"""The attention that a run names is the one its engine computes with."""

import pytest
import torch

from client.engine.local_training import LocalTraining
from client.models.frozen_base import FrozenBase
from client.models.lora import LoraSpec
from client.worker import Job, make_engine
from tests.cases.cohorts import clients, distance, start

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


def attention_of(engine):
    return engine._stacked.model.config._attn_implementation


def test_eager_attention_gives_what_the_fused_one_gives():
    jobs = [JOB.but(base=JOB.base.but(attention=attention)) for attention in ("sdpa", "eager")]
    fused, eager = (make_engine(job) for job in jobs)
    assert (attention_of(fused), attention_of(eager)) == ("lacquer_short", "eager")
    vector = start(JOB.base.load(JOB.model, JOB.task)[0], JOB.spec)
    cohort = clients((5, 9))
    expected, found = (one.train_all(vector, cohort, JOB.local, (1, 2)) for one in (fused, eager))
    assert distance(found, expected) < 1e-4


def test_a_worker_has_what_its_job_says():
    asked = FrozenBase(device="cpu", precision="bf16-model", quantisation="nf4", checkpoint_blocks=True)
    engine = make_engine(JOB.but(base=asked))
    assert (str(engine.device), engine.precision) == ("cpu", "bf16-model")
    layer = engine._stacked.model.model.layers[0]
    assert layer.mlp.down_proj.weight_.stored.four
    assert layer.forward.func.__name__ == "_computed_again"
    vector = start(JOB.base.load(JOB.model, JOB.task)[0], JOB.spec)
    assert torch.isfinite(engine.train_all(vector, clients((5,)), JOB.local, (1,))).all()


def test_a_gpu_that_is_not_there_is_refused_by_the_worker(monkeypatch):
    from client.models import devices

    monkeypatch.setattr(devices, "find_cuda", lambda: devices.Cuda(0, "nothing here"))
    with pytest.raises(ValueError, match="nothing here"):
        make_engine(JOB.but(base=FrozenBase(device="cuda")))


def test_flash_attention_is_switched_on_after_loading(monkeypatch):
    model, _ = FrozenBase(precision="bf16-model", attention="flash_attention_2").load("random:llama", "causal-lm")
    assert model.config._attn_implementation == "flash_attention_2"
    assert model.head_is_last, "what is found out on the CPU while loading"
