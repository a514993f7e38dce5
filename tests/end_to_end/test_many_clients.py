"""Nodes with many clients as processes: interrupted, started again, resumed, and the adapter is the simulation's."""

import json
from pathlib import Path

import pytest
import torch

from server.config.load import load
from server.run_folder.names import ROSTER_FILE
from server.run_folder.telemetry import read_metrics
from tests.cases.many_clients import adapter, deployed, kept, of_clients, simulated, state, write
from tests.end_to_end.deployment import BIN, Deployment

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]

NUMBERS = {"a": 6, "b": 9}


def test_a_run_over_nodes_with_many_clients_is_the_simulation_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [of_clients(name, number) for name, number in NUMBERS.items()]
    records = {name: tmp_path / f"{name}.jsonl" for name in NUMBERS}
    for path, rows in zip(records.values(), nodes, strict=True):
        write(path, rows)
    told = [f'clients={number} clients-state="{state(tmp_path, name)}"' for name, number in NUMBERS.items()]
    made = Deployment(tmp_path, deployed(tmp_path, list(NUMBERS.values()), rounds=3), records)
    try:
        made.begin(told)
        made.start("deploy", str(BIN / "lacquer"), "deploy", "run.toml")
        made.until(lambda: (tmp_path / "runs").is_dir() and len(read_metrics(made.run)) > 1)
        assert made.lacquer("stop", str(made.run)).returncode == 0
        assert made.processes["deploy"].wait(timeout=300) == 1
        made.processes["b"].terminate()
        made.until(lambda: made.online("a"))
        made.node("b", told[1])
        made.start("resume", str(BIN / "lacquer"), "deploy", "--resume", str(made.run))
        assert made.processes["resume"].wait(timeout=900) == 0, made.log("resume")
        assert made.charges() == 3
        run = made.run
    finally:
        made.end()
    assert sorted(json.loads((run / ROSTER_FILE).read_text())["clients"]) == sorted(NUMBERS.values())
    same = simulated(tmp_path, load(run / "config.toml"), nodes, kept(tmp_path, NUMBERS), monkeypatch)
    ours, theirs = adapter(run), adapter(same)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(float(values.abs().max()) > 0 for name, values in ours.items() if "lora_B" in name)
