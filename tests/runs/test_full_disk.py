"""A disk that fills up while a run writes: it is named, nothing is lost, and with room made the run goes on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from privacy import durable
from privacy.ledger.ledger import Ledger
from server.run_folder.errors import CannotResume
from server.run_folder.names import LEDGER_FILE, RESULTS_FILE
from server.run_folder.telemetry import Telemetry, read_metrics, read_status
from simulations.cli.app import app
from simulations.engines import launcher
from simulations.engines.inprocess import run_inprocess
from tests.cases.disk import AS_ROOT, Disk, fill
from tests.cases.runs import tiny

pytestmark = AS_ROOT


def charges(folder: Path) -> int:
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        return len(ledger.charges)


def fails(run: Any, folder: Path) -> str:
    """Run it; what its status says in the end."""
    with pytest.raises(Exception, match=r"os error 28|Errno 28") as failure:
        run_inprocess(run, folder)
    assert durable.full_disk(failure.value, folder)
    said = read_status(folder)
    assert said is not None
    assert (said.state, durable.FULL in said.message, str(folder) in said.message) == ("failed", True, True)
    return said.message


@pytest.mark.parametrize("kilobytes", [12, 20, 44, 52, 70, 300, 1100])
def test_a_disk_that_is_full_from_the_start_costs_nothing(kilobytes: int, disk: Disk, tmp_path: Path) -> None:
    run, folder = tiny(tmp_path / "cache"), disk(kilobytes) / "run"
    folder.mkdir()
    fails(run, folder)
    begun = (folder / LEDGER_FILE).is_file()
    assert not begun or charges(folder) == 0
    disk(8000)
    if begun:
        run_inprocess(run, folder, keys={"resume": str(folder)})
        assert json.loads((folder / RESULTS_FILE).read_text())["rounds_done"] == 3
        assert charges(folder) == 4
    else:
        with pytest.raises(CannotResume, match="before it could spend anything; start it anew"):
            run_inprocess(run, folder, keys={"resume": str(folder)})


@pytest.mark.parametrize(("moment", "lost"), [("between rounds", 0), ("behind the charge", 1), ("at the end", 0)])
def test_a_disk_that_fills_up_loses_what_was_in_the_air_and_no_more(
    moment: str, lost: int, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between rounds nothing is charged any more: the run looks for room first."""
    run, place = tiny(tmp_path / "cache"), disk(4000)
    folder = place / "run"
    folder.mkdir()
    owner, name, wanted = {
        "between rounds": (Telemetry, "round", 3),  # of the start, of the histogram, of round 1
        "behind the charge": (Ledger, "charge", 2),
        "at the end": (Telemetry, "round", 5),
    }[moment]
    real, calls = getattr(owner, name), []

    def filling(self: Any, *given: Any) -> Any:
        made = real(self, *given)
        calls.append(name)
        if len(calls) == wanted:
            fill(place)
        return made

    monkeypatch.setattr(owner, name, filling)
    fails(run, folder)
    spent = charges(folder)
    assert spent == {"between rounds": 2, "behind the charge": 2, "at the end": 4}[moment]
    rounds = [record.round for record in read_metrics(folder)]
    (place / "filler").unlink()
    run_inprocess(run, folder, keys={"resume": str(folder)})
    assert charges(folder) == 4, "what was committed to, and no more"
    assert json.loads((folder / RESULTS_FILE).read_text())["rounds_done"] == 3 - lost
    assert [record.round for record in read_metrics(folder)][: len(rounds)] == rounds


@pytest.fixture
def place(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of run.toml go."""
    (tmp_path / "run.toml").write_text(tiny(tmp_path / "cache", output=str(tmp_path / "disk")).to_toml())
    monkeypatch.chdir(tmp_path)
    return disk(4000)


COMMAND = ["run", "run.toml", "--engine", "inprocess", "--quiet"]


def test_a_full_disk_is_refused_before_anything_starts(disk: Disk, place: Path) -> None:
    disk(1)
    done = CliRunner().invoke(app, COMMAND)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"{place}/run-" in done.stderr
    assert f"could not be written: {durable.FULL}; make room there" in done.stderr


def test_a_run_that_fails_of_it_says_so_once(disk: Disk, place: Path) -> None:
    disk(300)
    command = [str(Path(sys.executable).with_name("lacquer")), *COMMAND]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count(durable.FULL), "Traceback" in done.stderr) == (1, 1, False), done.stderr
    assert f"\nResume with: lacquer resume {place}/run-" in done.stderr
    assert len(done.stderr.splitlines()) == 4
    (folder,) = place.glob("run-*")
    fill(place)
    again = CliRunner().invoke(app, ["resume", str(folder), "--quiet"])
    assert (again.exit_code, len(again.stderr.splitlines())) == (2, 1), again.stderr
    assert durable.FULL in again.stderr


def test_a_done_run_whose_report_finds_no_room_is_done(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its budget is spent and its adapter there: an exit code of failure would have it run again."""

    def run(config: Any, folder: Path, **others: Any) -> None:
        run_inprocess(config, folder)
        fill(place)

    monkeypatch.setattr(launcher, "run_child", run)
    done = CliRunner().invoke(app, COMMAND)
    (folder,) = place.glob("run-*")
    assert (done.exit_code, done.stdout) == (0, f"{folder}\n")
    assert f"report.html could not be written: {durable.FULL}" in done.stderr
    assert f"lacquer report {folder}" in done.stderr
    (place / "filler").unlink()
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    for command in ("report", "resume"):
        done = CliRunner().invoke(app, [command, str(folder)])
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert "read-only file system; give yourself the right to it" in done.stderr
    assert CliRunner().invoke(app, ["runs", str(place)]).exit_code == 0


def test_what_no_full_disk_caused_is_not_called_so(tmp_path: Path) -> None:
    for error in (OSError(5, "Input/output error"), ValueError("No space"), PermissionError(13, "Permission denied")):
        assert durable.full_disk(error, tmp_path) == ""
