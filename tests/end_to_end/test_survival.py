"""kill -9 of a worker, of the server, of everything: a replaced worker, a resumed run, the sums of an unbroken one."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from privacy.ledger.ledger import Ledger
from simulations import run as run_preset
from simulations.engines import launcher
from tests.end_to_end.lacquer_process import TINY, Lacquer
from tests.end_to_end.test_lacquer_run import ARTEFACTS, SAME_COHORTS_NO_NOISE

# Five minutes; that a run is interrupted, its launcher killed or its server fails is in test_lacquer_run.py.
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]

ROUNDS = 80


def last_round(run):
    return run.metrics()[-1]["round"]


def test_a_host_that_is_too_busy_for_ray_at_first_trains_when_it_is_not(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "PAUSE", 0.0)
    ended, look = [], launcher.RayDaemons.check

    def check(daemons):
        if not ended and list(tmp_path.glob("runs/*/origin.json")):  # the ServerApp is at work already
            ended.append(daemons)
            raise launcher.RayTooSlow("too busy")
        look(daemons)

    monkeypatch.setattr(launcher.RayDaemons, "check", check)
    result = run_preset("tiny.toml")
    assert (len(ended), result.state) == (1, "completed")
    with Ledger.open(result.folder / "ledger.jsonl", read_only=True) as ledger:
        assert [charge.event.round for charge in ledger.charges] == [0, 1, 2]


def test_a_run_survives_the_death_of_a_worker_of_the_server_and_of_everything(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY.replace("rounds = 2", f"rounds = {ROUNDS}"))
    started = []

    def lacquer(*arguments, command="run"):
        started.append(Lacquer(tmp_path, *arguments, "--quiet", command=command))
        return started[-1]

    try:
        run = lacquer("tiny.toml", *SAME_COHORTS_NO_NOISE[:-1])
        run.wait_for_round(2)
        run.actors()[0].kill()
        run.wait_for_round(4)
        run.server().kill()
        assert run.finish() == 1
        folder = run.run_folder
        assert f"Resume with: lacquer resume {folder}" in run.stderr()
        assert "another is started in its place" in (folder / "flower.log").read_text()
        assert run.living() == []

        run = lacquer(str(folder), command="resume")
        run.wait_for_round(last_round(run) + 1)
        (raylet,) = [process for process in run.living() if process.name() == "raylet"]
        raylet.kill()
        assert run.finish() == 1, "Flower alone would wait for it until the round's timeout"
        assert f"Ray's raylet (process {raylet.pid}) ended while the run went on" in run.stderr()
        assert f"Resume with: lacquer resume {folder}" in run.stderr()
        assert run.living() == []

        run = lacquer(str(folder), command="resume")
        run.wait_for_round(last_round(run) + 1)
        private = {path.split("/ray/")[0] for path in run.private_folders()}
        for process in run.living():
            process.kill()
        run.finish()
        for left in private:  # nobody was left to remove them
            shutil.rmtree(left, ignore_errors=True)

        run = lacquer(str(folder), "--engine", "inprocess", command="resume")
        assert run.finish() == 0, run.stderr()
        again = lacquer(str(folder), command="resume")
        assert again.finish() == 2
        assert "has ended" in again.stderr()
    finally:
        for run in started:
            run.end()

    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "tiny.toml").write_text((tmp_path / "tiny.toml").read_text().replace('"cache"', f'"{tmp_path / "cache"}"'))
    unbroken = Lacquer(whole, "tiny.toml", *SAME_COHORTS_NO_NOISE, "--engine", "inprocess")
    assert unbroken.finish() == 0, unbroken.stderr()

    resumed = [json.loads(line) for line in (folder / "resumed.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        charged = [charge.event.round for charge in ledger.charges]
    lost = resumed[-1]["lost"]
    assert len(resumed) == 3
    assert 4 <= resumed[0]["round"] < resumed[1]["round"] < resumed[2]["round"]
    assert [line["phase"] for line in lines[:2]] == ["start", "round"]
    lines = lines[1:]
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1 - lost))
    assert len(charged) == ROUNDS, "the ledger pays for so many, whatever became of them"
    assert set(charged) == {line["round"] for line in lines}
    for name in set(ARTEFACTS) - {"flower.log"}:
        assert (folder / name).stat().st_size > 0, name
    assert "Resumed." in (folder / "report.html").read_text()
    if lost == 0:  # a release that died with its process is made again from another cohort
        files = [path / "checkpoint" / "state.safetensors" for path in (folder, unbroken.run_folder)]
        adapters = [load_file(file)["adapter"] for file in files]
        assert_close(*adapters, rtol=0, atol=1e-5)
        assert float(adapters[0].abs().sum()) > 0
