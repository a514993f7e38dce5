"""Adapters go to PEFT and come back."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.lora import LoraSpec, adapter_layout, load_peft, save_peft
from tests.cases.cohorts import ARCHITECTURES, build, clients, fresh, start


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_adapter_gives_peft_the_same_logits(name, tmp_path):
    model, spec, task = build(name)
    vector, records = start(model, spec), clients((6,))[0]
    engine = CohortEngine(fresh(model), spec, task, precision="fp32")
    delta = engine.train_all(vector, [records], LocalTraining(learning_rate=0.1, batch_size=4), [3])[0]
    vector = engine.layout.with_trainable(vector, engine.layout.trainable_values(vector) + delta)
    save_peft(tmp_path, vector, engine.layout, spec)
    assert torch.equal(load_peft(tmp_path, engine.layout), vector)
    loaded = PeftModel.from_pretrained(fresh(model), str(tmp_path)).eval()
    totals = task.no_totals()
    for row in range(len(records)):
        ids = torch.from_numpy(records.select([row]).tokens.astype("int64"))[None]
        labels = torch.from_numpy(records.labels[row : row + 1])
        batch = _batch(ids, labels)
        with torch.no_grad():
            totals += task.totals(loaded(input_ids=ids).logits, batch)
    assert engine.evaluate(vector, records).loss == pytest.approx(task.metrics(totals).loss, rel=1e-5)


def _batch(ids, labels):
    from client.models.tasks import Batch

    return Batch(ids, torch.ones_like(ids), labels)


def test_upper_layers_only(tmp_path):
    model, spec, _ = build("bert")
    spec = replace(spec, layers=(2,))
    layout, vector = adapter_layout(model, spec), start(model, spec)
    save_peft(tmp_path, vector, layout, spec, base="some/model")
    loaded = PeftModel.from_pretrained(fresh(model), str(tmp_path))
    adapted = [name for name, _ in loaded.named_parameters() if "lora_A" in name]
    assert len(adapted) == 2
    assert all(".layer.2." in name for name in adapted)


def test_a_foreign_adapter_is_refused(tmp_path):
    model, spec, _ = build("bert")
    layout = adapter_layout(model, spec)
    save_peft(tmp_path, start(model, spec), layout, spec)
    other = adapter_layout(model, LoraSpec(4, 8.0, ("query",), heads=("classifier",)))
    with pytest.raises(ValueError, match="does not know"):
        load_peft(tmp_path, other)
    wider = adapter_layout(model, replace(spec, rank=5))
    with pytest.raises(ValueError, match="must have shape"):
        load_peft(tmp_path, wider)
    with pytest.raises(ValueError, match="holds no adapter_model"):
        load_peft(tmp_path / "nowhere", layout)
