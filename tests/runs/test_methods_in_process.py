"""Every aggregation and every server optimizer once, from a configuration to a saved adapter, on a very small model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from privacy.ledger.ledger import Ledger
from server.config.load import parse
from simulations.engines.inprocess import run_inprocess
from strategies import AGGREGATIONS, OPTIMIZERS

SUMS = [name for name in AGGREGATIONS if name not in ("flora", "fedex", "fedgsa")]
PAIRS = [(name, "fedavg") for name in SUMS] + [("ffa", name) for name in OPTIMIZERS if name != "fedavg"]
# Values of two layers of width 32 at rank 4, query and value, and a head of 2 x 32 + 2.
HEAD, BOTH, ONE = 66, 1024, 512


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(folder: Path, cache: Path, **strategy: Any) -> dict[str, Any]:
    table = {
        "rounds": 2,
        "clients": 30,
        "sampling-rate": 0.2,
        "privacy": {"delta": 1e-3},
        "strategy": {"controller": "fixed", "served-average": 0.5, **strategy},
        "model": {"name": "random:bert", "rank": 4, "max-length": 32},
        "data": {"validation-records": 20, "test-records": 20, "records-per-client": 3, "cache": str(cache)},
        "public": {"warm-start-epochs": int(strategy["aggregation"] == "local-heads")},
        "engine": {"kind": "inprocess", "workers": 2},
    }
    run_inprocess(parse(table), folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(("aggregation", "optimizer"), PAIRS)
def test_a_run_of_every_method_leaves_an_adapter(cache: Path, tmp_path: Path, aggregation: str, optimizer: str) -> None:
    results = run(tmp_path, cache, aggregation=aggregation, optimizer=optimizer)
    assert results["rounds_done"] == 2
    with Ledger.open(tmp_path / "ledger.jsonl", read_only=True) as ledger:
        sizes = [event.components[0].dim for event in ledger.events]
        assert [event.label for event in ledger.events] == ["round", "round"]
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in adapter.values())
    if aggregation == "dp-dylora":
        assert all((size - HEAD) % (BOTH // 4) == 0 for size in sizes)
        assert results["dimension"] == max(sizes)
    elif aggregation == "local-heads":
        assert sizes == [BOTH] * 2
        start = load_file(tmp_path / "public-start.safetensors")["adapter"]
        released = torch.cat([adapter[name].flatten() for name in sorted(adapter) if "classifier" in name])
        assert sorted(released.tolist()) == sorted(start[-HEAD:].tolist()), "public records alone made the head"
        told = json.loads((tmp_path / "privacy.json").read_text())["not_covered"]
        assert any(text.startswith("the head that each client trains and keeps") for text in told)
    else:
        assert sizes == [HEAD + (BOTH if aggregation in ("plain", "zero-pad") else ONE)] * 2
    if aggregation == "fedsvd":
        for name, tensor in adapter.items():
            if "lora_A" in name:
                torch.testing.assert_close(tensor @ tensor.T, torch.eye(4), rtol=0, atol=1e-5)
