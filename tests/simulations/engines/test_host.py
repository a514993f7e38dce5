"""What `lacquer doctor` says of a host, and what it recommends."""

import json

import pytest
from typer.testing import CliRunner

from client.models.devices import Cuda
from simulations.cli.app import app
from simulations.engines import host


def doctor(
    monkeypatch: pytest.MonkeyPatch, found: Cuda, gpus: list[dict[str, object]]
) -> tuple[int, dict[str, object]]:
    monkeypatch.setattr(host, "find_cuda", lambda: found)
    monkeypatch.setattr(host, "_gpus", lambda: gpus)
    monkeypatch.setattr(host, "available_cores", lambda: 4)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_a_host_without_a_gpu_is_told_to_use_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = doctor(monkeypatch, Cuda(0, "torch is built without CUDA"), [])
    assert said["advice"]["engine.device"] == "cpu"  # type: ignore[index]
    assert 1 <= said["advice"]["engine.workers"] <= 4  # type: ignore[index]
    assert "torch" in said["packages"]  # type: ignore[operator]
    assert said["models"]["lacquer-small"] is True  # type: ignore[index]


def test_gpus_get_a_worker_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "G", "memory_gib": 80.0, "driver": "580.65", "cuda": "13.0"}
    _, said = doctor(monkeypatch, Cuda(2), [gpu, gpu])
    assert said["advice"] == {
        "engine.device": "cuda",
        "engine.workers": 2,
        "engine.precision": "auto",
        "engine.token-budget": 0,
    }


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = doctor(monkeypatch, Cuda(0, "the driver is too old", "/dev/nvidia0"), [])
    assert code == 1
    assert "the driver is too old" in said["problems"][0]  # type: ignore[index]
