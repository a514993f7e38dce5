"""Which runs there are, and which of them is alive."""

import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.run_folder.telemetry import Telemetry
from simulations.cli.app import app
from simulations.history.folders import run_folders, true_state
from simulations.report.notation import epsilon_text
from simulations.report.read_run import NoRunFolder, read_run


def says(folder: Path, state: str, age: float = 0.0) -> str:
    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.status(state, "at it")  # type: ignore[arg-type]
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "time": time.time() - age}))
    return true_state(read_run(folder))


def test_a_run_is_alive_while_a_process_holds_its_lock(record_run: Callable[..., Path]) -> None:
    folder = record_run(done=2, state="running")
    (folder / "run.lock").touch()
    assert says(folder, "running") == "interrupted"
    with (folder / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert says(folder, "running") == "running"


def test_a_run_that_has_just_begun_has_no_lock_yet(record_run: Callable[..., Path]) -> None:
    folder = record_run(done=0, state="preparing", ledger=False)
    assert says(folder, "preparing") == "preparing"
    assert says(folder, "preparing", age=3600.0) == "interrupted"


def test_runs_are_found_below_folders(record_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = record_run()
    assert run_folders([tmp_path]) == run_folders([folder]) == [folder]
    (folder / "status.json").unlink()  # a damaged run does not drop out of what is listed and added up
    assert run_folders([tmp_path]) == [folder]
    (folder / "results.json").unlink()
    assert run_folders([tmp_path], finished=True) == []
    with pytest.raises(NoRunFolder, match="there is no run in it"):
        run_folders([tmp_path / "none"])


def test_the_command_lists_them(record_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = record_run()
    (row,) = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout)
    assert (row["folder"], row["state"], row["rounds"], row["test_accuracy"]) == (str(folder), "completed", 5, 0.8125)
    assert row["added"] == pytest.approx(0.05)
    shown = CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout
    assert "+5.0 points" in shown
    assert CliRunner().invoke(app, ["runs", str(tmp_path / "none")]).exit_code == 2


def test_what_was_spent_is_not_what_was_committed_to(record_run: Callable[..., Path], tmp_path: Path) -> None:
    record_run(done=2, state="failed")
    (row,) = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout)
    assert 0 < row["epsilon_spent"] < row["epsilon"]
    shown = CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout
    assert f"{epsilon_text(row['epsilon_spent'])} of {epsilon_text(row['epsilon'])}" in shown
