"""What nodes know of a run survives its trip as text, and equal runs have equal text."""

import json
import math

import pytest

from client.data.local import ReadSettings
from client.engine.local_training import LocalTraining, PreferenceLoss
from client.models.frozen.base import FrozenBase
from client.models.lora import LoraSpec
from client.worker import Job

JOB = Job(
    model="random:bert",
    task="classification",
    num_labels=3,
    spec=LoraSpec(2, 3.0, ("query", "value"), (0, 1), "b", ("classifier",)),
    local=LocalTraining(
        optimizer="adamw",
        learning_rate=1 / 3,
        batch_size=5,
        epochs=2,
        max_steps=4,
        momentum=0.5,
        weight_decay=0.1,
        balance="prior",
        preference=PreferenceLoss(loss="simpo", beta=2.0, gamma=0.5),
    ),
    data="/some/where",
    seed=2**61 + 1,
    sequential=True,
    base=FrozenBase(
        device="cuda", precision="bf16-model", quantisation="nf4", checkpoint_blocks=True, attention="flash_attention_2"
    ),
    token_budget=64,
    prefix_cache_mb=1,
    reading=ReadSettings(
        task="classification",
        max_length=48,
        chat_template="{{ messages }}",
        separator=";",
        columns="note,pair,kind,patient,who",
        encoding="latin-1",
        text_column="note",
        text_pair_column="pair",
        label_column="kind",
        unit_column="patient",
        client_column="who",
        least_words=3,
        labels=("a", "b", "c"),
    ),
    fingerprint="0f",
    canaries=2,
    first_canary=5,
    canary_key="audit/canaries.key",
    asks=True,
)


@pytest.mark.parametrize("job", [JOB, JOB.replace(spec=LoraSpec(1, 1.0, ("query",)), local=LocalTraining())])
def test_a_job_comes_back_as_it_went(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job


def test_no_field_has_its_default_in_the_job_above() -> None:
    for thing in (JOB, JOB.local, JOB.reading, JOB.base):
        for name, field in type(thing).model_fields.items():
            if not field.is_required():
                assert getattr(thing, name) != field.default, name


def test_equal_jobs_have_equal_text_and_others_do_not() -> None:
    shuffled = dict(reversed(json.loads(JOB.to_json()).items()))
    assert Job.from_json(json.dumps(shuffled)).to_json() == JOB.to_json()
    assert JOB.replace(seed=1).to_json() != JOB.to_json()


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
        json.dumps({**json.loads(JOB.to_json()), "local": {"optimizer": "lbfgs"}}),
        json.dumps({**json.loads(JOB.to_json()), "local": {"learning-rate": 0.1}}),
        json.dumps({**json.loads(JOB.to_json()), "seed": True}),
        json.dumps({**json.loads(JOB.to_json()), "spec": {**json.loads(JOB.to_json())["spec"], "alpha": math.nan}}),
        *(
            json.dumps({**json.loads(JOB.to_json()), "reading": {**json.loads(JOB.to_json())["reading"], **wrong}})
            for wrong in (
                {"client_column": 3},
                {"text_column": ""},
                {"label_column": ""},
                {"max_length": 10**9},
                {"least_words": -1},
                {"source": "csv:/etc/passwd"},
            )
        ),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Job.from_json(text)
