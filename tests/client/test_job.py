"""What nodes know of a run survives its trip as text, and equal runs have equal text."""

import dataclasses
import json

import pytest

from client.data.local import ReadSettings
from client.engine.local_training import LocalTraining
from client.models.lora import LoraSpec
from client.worker import Job

JOB = Job(
    model="random:bert",
    task="classification",
    num_labels=3,
    balance="prior",
    spec=LoraSpec(2, 3.0, ("query", "value"), (0, 1), "b", ("classifier",)),
    local=LocalTraining("adamw", 1 / 3, 5, 2, 0.1, 0.5, (0.8, 0.99), 1e-7, 4),
    data="/some/where",
    seed=2**61 + 1,
    sequential=True,
    precision="fp32",
    token_budget=64,
    prefix_cache_mb=1,
    reading=ReadSettings("classification", 48, "note", "", "kind", "patient", 3, ("a", "b", "c")),
    fingerprint="0f",
)


@pytest.mark.parametrize(
    "job", [JOB, dataclasses.replace(JOB, spec=LoraSpec(1, 1.0, ("query",)), local=LocalTraining())]
)
def test_a_job_comes_back_as_it_went(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job


def test_no_field_has_its_default_in_the_job_above() -> None:
    for thing in (JOB, JOB.local):
        for field in dataclasses.fields(thing):
            if field.default is not dataclasses.MISSING:
                assert getattr(thing, field.name) != field.default, field.name


def test_equal_jobs_have_equal_text_and_others_do_not() -> None:
    shuffled = dict(reversed(json.loads(JOB.to_json()).items()))
    assert Job.from_json(json.dumps(shuffled)).to_json() == JOB.to_json()
    assert dataclasses.replace(JOB, seed=1).to_json() != JOB.to_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[]",
        "{}",
        '{"spec": {}, "local": {}}',
        json.dumps({**json.loads(JOB.to_json()), "colour": "red"}),
        json.dumps({key: value for key, value in json.loads(JOB.to_json()).items() if key != "model"}),
        json.dumps({**json.loads(JOB.to_json()), "local": {"betas": [0.9, 0.99], "optimizer": "lbfgs"}}),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Job.from_json(text)
