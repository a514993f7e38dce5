"""What people do: start several runs at once on one host, and press Ctrl-C again because the first shows nothing."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from privacy.ledger.ledger import Ledger
from server.run_folder.names import LEDGER_FILE
from server.run_folder.telemetry import read_metrics, read_status
from tests.end_to_end.lacquer_process import TINY, Lacquer

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]


@pytest.mark.nightly  # nine processes of Ray, and a minute or two
def test_three_simulations_at_once_share_a_host_a_cache_and_an_output_folder(tmp_path: Path) -> None:
    """They start in one second, so that their folders would have one name."""
    settings = TINY.replace('"runs"', f'"{tmp_path / "runs"}"').replace('"cache"', f'"{tmp_path / "cache"}"')
    started = []
    try:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "tiny.toml").write_text(settings)
            started.append(Lacquer(folder, "tiny.toml", "--set", f"seed={number}", "--workers", "1", "--quiet"))
        for run in started:
            assert run.finish() == 0, run.stderr()
            assert run.living() == []
    finally:
        for run in started:
            run.end()
    folders = {Path(run.stdout().strip()) for run in started}
    assert folders == set((tmp_path / "runs").iterdir())
    assert len(folders) == 3
    secrets = set()
    for folder in folders:
        assert [record.round for record in read_metrics(folder) if record.phase == "round"] == [1, 2]
        with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
            assert [event.round for event in ledger.events] == [0, 1, 2]
            assert ledger.epsilon_spent() <= 4.0
        secrets.add((folder / "sampling.key").read_text())
    assert len(secrets) == 3, "no two runs draw the same cohorts"


def interrupt_twice(run: Lacquer, gap: float) -> None:
    """As a terminal does: everything in the foreground hears it."""
    for _ in range(2):
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(gap)
    assert run.finish() == 130, run.stderr()
    assert "Traceback" not in run.stderr()
    assert run.living() == []


@pytest.mark.parametrize("engine", ["inprocess", pytest.param("flower", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("gap", [0.01, pytest.param(2.0, marks=pytest.mark.nightly)])
def test_ctrl_c_twice_stops_everything_and_the_run_resumes(tmp_path: Path, engine: str, gap: float) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.replace("rounds = 2", "rounds = 1000"))
    run = Lacquer(tmp_path, "tiny.toml", "--quiet", "--engine", engine)
    try:
        run.wait_for_round(1)
        interrupt_twice(run, gap)
        folder = run.run_folder
        assert f"Resume with: lacquer resume {folder}" in run.stderr()
        status = read_status(folder)
        assert status is not None
        assert (status.state, status.message) == ("failed", "interrupted")
        with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
            charged = len(ledger.charges)
        done = read_metrics(folder)[-1].round
        run = Lacquer(tmp_path, str(folder), "--quiet", command="resume")
        run.wait_for_round(done + 1)
        interrupt_twice(run, gap)
        (resumed,) = (json.loads(line) for line in (folder / "resumed.jsonl").read_text().splitlines())
        assert resumed["lost"] == charged - resumed["round"] - 1 <= 1, "the round in the air, and no other"
    finally:
        run.end()
