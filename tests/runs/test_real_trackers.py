"""Runs in the real trackers, each keeping its things in a folder of its own; read back without Lacquer.

They need the extra [tracking], which the nightly job installs; a tracker that is not installed is left out.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from server.run_folder.telemetry import Telemetry
from simulations.history.trackers import track
from tests.cases.recorded_runs import recorded_metrics

pytestmark = pytest.mark.nightly
Held = tuple[str, Mapping[int, float], str]
"""The setting privacy.epsilon, validation accuracy by round, and what is said of the whole run."""


def mlflow_holds(folder: Path, project: str) -> Held:
    client = pytest.importorskip("mlflow").MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    curve = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "validation/accuracy")}
    return run.data.params["privacy.epsilon"], curve, f"{run.data.metrics} {run.data.tags} {run.info.status}"


def trackio_holds(folder: Path, project: str) -> Held:
    trackio = pytest.importorskip("trackio")
    (run,) = trackio.Api().runs(project)
    rows = trackio.SQLiteStorage.get_logs(project, run.name)
    curve = {row["step"]: row["validation/accuracy"] for row in rows if "validation/accuracy" in row}
    return str(run.config["privacy.epsilon"]), curve, str(rows[-1])


def wandb_holds(folder: Path, project: str) -> Held:
    """Its one file has a head of 7 bytes, then records with theirs (4 of a checksum, 2 of a length, 1 of a kind)."""
    (left,) = (file.read_bytes()[7:] for file in folder.rglob("*.wandb"))
    assert len(left) < 32_000, "records of longer files are in pieces"
    curve, whole = {}, left.decode("latin-1")
    while left:
        size = 7 + int.from_bytes(left[4:6], "little")
        record, left = left[7:size].decode("latin-1"), left[size:]
        step, value = (re.search(rf"{name}\W{{1,4}}([\d.]+)", record) for name in ("round", "validation/accuracy"))
        if step and value:
            curve.setdefault(int(step[1]), float(value[1]))
    return re.findall(r"privacy\.epsilon\W{1,4}([\d.]+)", whole)[0], curve, whole


HELD = {"mlflow": mlflow_holds, "trackio": trackio_holds, "wandb": wandb_holds}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the trackers keep what they are told; Trackio in the first of these, for it reads its variable once."""
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.chdir(kept)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{kept}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(kept))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(kept))
    return kept


@pytest.mark.parametrize("name", HELD)
def test_a_tracker_holds_every_round_once_and_the_guarantee(
    name: str, record_run: Callable[..., Path], folder: Path
) -> None:
    pytest.importorskip(name)
    assert track(record_run(), f"{name}:whole") == 7
    epsilon, curve, said = HELD[name](folder, "whole")
    assert float(epsilon) == 2.0
    assert curve == pytest.approx({0: 0.5, **{step: 0.5 + 0.01 * step for step in range(1, 6)}})
    assert re.search(r"privacy\.guaranteed_epsilon\W{1,5}0\.6064", said)
    assert re.search(r"test_accuracy\W{1,5}0\.8125", said)


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_resumed_run_goes_on_in_its_place(name: str, record_run: Callable[..., Path], folder: Path) -> None:
    pytest.importorskip(name)
    run = record_run(done=2, state="running")
    assert track(run, f"{name}:resumed", lambda: False) == 4
    with Telemetry(run, tensorboard=False) as telemetry:
        telemetry.round(recorded_metrics(5, 5)[3])
    assert track(run, f"{name}:resumed", lambda: False) == 1
    _, curve, _ = HELD[name](folder, "resumed")
    assert curve == pytest.approx({step: 0.5 + 0.01 * step for step in range(4)})
