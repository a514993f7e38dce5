"""Models of every architecture, from a folder: they train as PEFT trains them, and PEFT loads what was trained."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.engine import build_engine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout, load_peft, merge_adapter, save_peft
from client.models.targets import targets_of
from client.models.tasks import make_task
from tests.cases.cohorts import distance, start
from tests.cases.finished_runs import base_model
from tests.cases.model_folders import ENCODERS, LANGUAGE_MODELS, model_folder

LOCAL = LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=2, epochs=1)


def records(count: int, seed: int) -> Records:
    draws = np.random.default_rng(seed)
    rows = [draws.integers(3, 200, draws.integers(2, 14)) for _ in range(count)]
    return Records.from_lists(rows, draws.integers(0, 3, count))


@pytest.mark.parametrize("kind", [*LANGUAGE_MODELS, *ENCODERS])
def test_gradients_updates_and_logits_are_those_of_plain_peft(kind: str, tmp_path: Path) -> None:
    labels = 3 if (task_name := model_folder(kind, tmp_path)) == "classification" else None
    model, _ = load_base(str(tmp_path), task_name, labels)
    spec = LoraSpec(2, 4.0, targets_of(model, "auto"), heads=("classifier",) if labels else ())
    task, vector, clients = make_task(task_name, labels or 0), start(model, spec), [records(n, n) for n in (3, 0, 5)]
    plain, oracle = copy.deepcopy(model), SequentialEngine(copy.deepcopy(model), spec, task)
    engine = build_engine(copy.deepcopy(model), spec, task, token_budget=40)
    assert isinstance(engine, CohortEngine) == (kind != "falcon")  # which changes in place what a layer gives
    one_by_one = torch.cat([chunk.rows for chunk in oracle.per_record_gradients(vector, clients[2])])
    assert one_by_one.abs().max() > 1e-4
    for chunk in engine.per_record_gradients(vector, clients[2]):
        assert distance(chunk.rows, one_by_one[chunk.records]) < 1e-5
    found, expected = (one.train_all(vector, clients, LOCAL, [1, 2, 3]) for one in (engine, oracle))
    assert distance(found, expected) < 1e-5

    trained = engine.layout.with_trainable(vector, engine.layout.trainable_values(vector) + found[2])
    save_peft(tmp_path / "adapter", trained, engine.layout, spec, base=str(tmp_path))
    ours = merge_adapter(model, spec, load_peft(tmp_path / "adapter", adapter_layout(model, spec)))
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    losses = []
    with torch.no_grad():
        for row, label in zip(np.split(clients[0].tokens, clients[0].offsets[1:-1]), clients[0].labels, strict=True):
            ids = torch.from_numpy(row).long()[None]
            logits, same = (getattr(given, "logits", given) for given in (loaded(input_ids=ids), ours(input_ids=ids)))
            torch.testing.assert_close(logits, same, rtol=0, atol=1e-5)
            scores, right = (logits, torch.tensor([label])) if labels else (logits[0, :-1], ids[0, 1:])
            losses.append(torch.nn.functional.cross_entropy(scores.float(), right.long(), reduction="none"))
    assert engine.evaluate(trained, clients[0]).loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_weights_that_are_quantised_already_are_refused_by_name(tmp_path: Path) -> None:
    base_model(tmp_path, "llama", "causal-lm")
    file = tmp_path / "config.json"
    method = {"quant_method": "gptq", "bits": 4}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": method}))
    with pytest.raises(ValueError, match=r"quantised already \(gptq\).*engine\.quantisation"):
        load_base(str(tmp_path), "causal-lm")
