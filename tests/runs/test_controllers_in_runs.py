"""Three shapes of controllers from configuration to artefacts: the real apps on a tiny model, in one process.

One that releases updates alone, one with a histogram before its rounds, and one that learns what to spend of a filter.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from server.config.load import parse
from server.run_folder.telemetry import read_metrics
from simulations.engines.inprocess import run_inprocess
from strategies.controllers.loss_following import GRID

TABLE: dict[str, Any] = {
    "rounds": 2,
    "clients": 40,
    "sampling-rate": 0.5,
    "privacy": {"epsilon": 8.0, "delta": 1e-3},
    "model": {"name": "random:bert", "rank": 2, "max-length": 16},
    "data": {"source": "notes", "validation-records": 40, "test-records": 40, "records-per-client": 3},
    "engine": {"kind": "inprocess", "workers": 2},
}


@pytest.mark.parametrize(("name", "mode"), [("fixed", "floor"), ("dp-lac", "floor"), ("rl", "filter")])
def test_a_run_spends_its_budget_and_reports_released_values(
    name: str, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    cache = str(tmp_path_factory.getbasetemp() / "prepared")
    strategy = {"controller": name, "optimizer-options": {"decay": 0.9}}
    config = parse(
        {
            **TABLE,
            "privacy": TABLE["privacy"] | {"mode": mode},
            "data": TABLE["data"] | {"cache": cache},
            "strategy": strategy,
        }
    )
    run_inprocess(config, tmp_path)
    *before, first, last = read_metrics(tmp_path)
    assert [record.phase for record in before] == (["start", "histogram"] if name == "dp-lac" else ["start"])
    if name == "dp-lac":  # the noisy histogram itself, whose mode is C_0
        votes = [before[1].extra[f"vote-{place}"] for place in range(1, len(GRID) + 1)]
        assert GRID[votes.index(max(votes))] == before[1].extra["clip-bound"]
        assert any(vote != round(vote) for vote in votes), "votes without noise"
        assert "vote-1" not in first.extra
    assert [(record.phase, record.round) for record in (first, last)] == [("round", 1), ("round", 2)]
    assert 0.9 * 8.0 < last.epsilon_spent <= 8.0
    assert last.not_private is None
    assert last.extra["clip-bound"] > 0
    assert all(math.isfinite(value) for value in last.extra.values())
    statement = json.loads((tmp_path / "privacy.json").read_text())
    assert statement["epsilon"] <= 8.0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_a_published_rule_over_clients_marks_every_artefact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    strategy = {"controller": "strategies.published.client_adam_ac:ClientAdamAc"}
    data = TABLE["data"] | {"cache": str(tmp_path / "prepared")}
    run_inprocess(
        parse({**TABLE, "privacy": TABLE["privacy"] | {"non-private": True}, "strategy": strategy, "data": data}),
        tmp_path,
    )
    why = "reads the norms of the clients' updates"
    *_, last = read_metrics(tmp_path)
    assert why in (last.not_private or "")
    assert math.isinf(last.epsilon_spent)
    assert 0.0 <= last.extra["clip-rate"] <= 1.0
    assert why in json.loads((tmp_path / "privacy.json").read_text())["not_private"]
    assert why in (tmp_path / "ledger.jsonl").read_text()
    assert "NOT PRIVATE" in (tmp_path / "adapter" / "README.md").read_text()
