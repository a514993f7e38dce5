"""Architectures without fused attention, from a folder, on the default engine; what they export is for plain PEFT."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from client.data.prepare import prepare
from client.models.base import load_base
from client.models.lora import adapter_layout, load_peft, merge_adapter, read_spec
from server.runs.assembly import data_spec
from simulations import run
from tests.cases.model_folders import model_folder

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {
    "rounds": 2,
    "clients": 60,
    "sampling-rate": 0.2,
    "privacy": {"delta": 1e-3},
    "data": {"partition": "iid", "validation-records": 40, "test-records": 40, "records-per-client": 4},
}


@pytest.mark.parametrize("kind", ["gemma2", "bloom", "gpt-neo", "deepseek-v3", "deberta-v2", "mpnet"])
def test_a_run_on_flower_exports_what_plain_peft_loads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = model_folder(kind, tmp_path / "model")
    model = {"name": str(tmp_path / "model"), "task": task, "targets": "auto"}
    result = run(SMALL, {f"model.{key}": value for key, value in model.items()} | {"data.cache": "cache"})
    assert result.config is not None
    assert (result.state, result.config.engine.kind) == ("completed", "flower")
    assert result.adapter is not None
    labels = len(result.results["label_names"]) if task == "classification" else None
    base, _ = load_base(model["name"], task, labels)
    spec = read_spec(result.adapter)
    ours = merge_adapter(base, spec, load_peft(result.adapter, adapter_layout(base, spec)))
    loaded = PeftModel.from_pretrained(base, result.adapter).eval()
    losses = []
    for row in _test_records(result.config):
        ids = torch.from_numpy(row[0].astype(np.int64))[None]
        with torch.no_grad():
            logits, same = (getattr(given, "logits", given) for given in (loaded(input_ids=ids), ours(input_ids=ids)))
        torch.testing.assert_close(logits, same, rtol=0, atol=1e-5)
        scores, right = (logits, torch.tensor([row[1]])) if labels else (logits[0, :-1], ids[0, 1:])
        losses.append(torch.nn.functional.cross_entropy(scores.float(), right.long(), reduction="none"))
    # bfloat16 products on some machines
    assert result.results["test_loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=2e-3)
    assert math.isfinite(result.results["test_loss"])


def _test_records(config: Any) -> list[tuple[np.ndarray, int | None]]:
    records = prepare(data_spec(config)).test
    labels = [None] * len(records) if records.labels is None else records.labels.tolist()
    return [(np.asarray(records.select([n]).tokens), label) for n, label in enumerate(labels)]
