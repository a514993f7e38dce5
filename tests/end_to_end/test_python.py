"""A run started from Python as its users start one: on Flower and Ray, the default, with a callback."""

from pathlib import Path
from typing import Any

import pytest

from server.run_folder.round_record import RoundRecord
from simulations import run

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]

SMALL: dict[str, Any] = {
    "name": "from-python",
    "rounds": 2,
    "clients": 60,
    "sampling-rate": 0.2,
    "privacy": {"delta": 1e-3},
    "model": {"name": "random:bert", "rank": 2, "max-length": 32},
    "data": {"validation-records": 40, "test-records": 40, "records-per-client": 4},
    "engine": {"workers": 2},
}


@pytest.mark.nightly  # the notebooks run the API on Flower, too
def test_a_run_on_flower_and_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[RoundRecord] = []
    result = run(SMALL, {"data.cache": str(tmp_path / "cache")}, callbacks=seen.append)
    assert result.config is not None
    assert result.config.engine.kind == "flower"
    assert (result.state, result.results["rounds_done"]) == ("completed", 2)
    assert tuple(seen) == result.records
    table = result.metrics
    assert type(table).__name__ == "DataFrame"
    assert list(table["phase"]) == [record.phase for record in seen]
    assert list(table["phase"]).count("round") == 2
    rounds = table[table["phase"] == "round"]
    assert list(rounds["round"]) == [1, 2]
    assert rounds["validation_accuracy"].between(0, 1).all()
    assert rounds["epsilon_spent"].is_monotonic_increasing
    assert result.epsilon is not None
    assert 0 < rounds["epsilon_spent"].iloc[-1] <= result.epsilon + 1e-6 <= 4.0 + 1e-5
    assert result.adapter is not None
    assert (result.adapter / "adapter_model.safetensors").is_file()
    assert (result.folder / "flower.log").stat().st_size
