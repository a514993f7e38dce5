"""The real command, through Flower on Ray: exit codes, artefacts, and nothing left behind, whatever ends the run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from privacy.ledger.ledger import Ledger
from tests.end_to_end.lacquer_process import LACQUER

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]

ARTEFACTS = [
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "checkpoint/state.json",
    "config.toml",
    "flower.log",
    "ledger.jsonl",
    "metrics.jsonl",
    "privacy.json",
    "report.html",
    "results.json",
    "status.json",
]

OWN_METHOD = '''
import time
from dataclasses import dataclass
from pathlib import Path

from strategies.optimizers.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    """An optimizer of the user's own, beside their work; a run, not its rehearsal, waits while "hold" lies there."""

    def step(self, *arguments, **named):
        while Path("{folder}/hold").exists() and any(Path("{folder}").glob("**/metrics.jsonl")):
            time.sleep(0.05)
        return super().step(*arguments, **named)
'''

FAILING_METHOD = """
from dataclasses import dataclass
from pathlib import Path

from strategies.optimizers.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    def step(self, *arguments, **named):
        if any(Path("{folder}").glob("**/metrics.jsonl")):  # the run, and not its rehearsal
            raise RuntimeError("planted failure")
        return super().step(*arguments, **named)
"""


def test_a_run_completes_and_leaves_its_artefacts_and_no_process(lacquer, tmp_path):
    """Even where the user's folder has packages of the same names, and with a method of the user's own."""
    for name in ("client", "server", "privacy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a package that is not ours')")
    (tmp_path / "own.py").write_text(OWN_METHOD.format(folder=tmp_path))
    (tmp_path / "hold").touch()  # else the run may have ended before it is looked at
    run = lacquer("--set", "strategy.optimizer=own:Mine")
    run.wait_for_round(0)
    assert len(run.actors()) == 2
    private = {path.split("/ray/")[0] for path in run.private_folders()}
    (tmp_path / "hold").unlink()
    assert run.finish() == 0, run.stderr()
    assert run.living() == []
    assert not any(Path(folder).exists() for folder in private)
    for name in ARTEFACTS:
        assert (run.run_folder / name).stat().st_size > 0, name
    assert json.loads((run.run_folder / "status.json").read_text())["state"] == "completed"
    assert [line["round"] for line in run.metrics()] == [0, 1, 2]
    assert run.run_folder.name in run.stdout()
    assert "\x1b" not in run.stdout(), "no colours and no redrawing where there is no terminal"
    with Ledger.open(run.run_folder / "ledger.jsonl", read_only=True) as ledger:
        assert len(ledger.events) == 3
        assert ledger.epsilon_spent() <= 4.0


@pytest.mark.nightly  # two runs of Flower; one process does the same in tests/runs/test_from_adapter.py
def test_a_run_goes_on_from_another_and_says_what_both_guarantee(lacquer, tmp_path):
    """An export, and its adapter as PEFT alone would have saved it, are rehearsed."""
    text = ["model.name=random:llama", "model.task=causal-lm", "model.targets=q_proj,v_proj", "data.partition=iid"]
    settings = [word for setting in text for word in ("--set", setting)]
    first = lacquer("--engine", "inprocess", "--quiet", *settings)
    assert first.finish() == 0, first.stderr()
    before = Path(first.stdout().strip())
    later = lacquer("--from", str(before), "--set", "name=later", "--quiet", *settings)
    assert later.finish() == 0, later.stderr()
    after = Path(later.stdout().strip())
    assert (after / "flower.log").exists()
    told = json.loads((after / "privacy.json").read_text())
    (group,) = told["together"]
    assert group["runs"] == ["tiny", "this run's"]
    assert told["epsilon"] < group["epsilon"] < 2 * told["epsilon"]
    begun, _, _ = (after / "metrics.jsonl").read_text().partition("\n")
    ended = json.loads((before / "results.json").read_text())["validation_loss"]
    assert json.loads(begun)["validation_loss"] == pytest.approx(ended, rel=1e-5)

    done = subprocess.run([LACQUER, "export", before, tmp_path / "export"], check=False)
    assert done.returncode == 0
    (tmp_path / "peft").mkdir()
    shutil.copyfile(tmp_path / "export/adapter_config.json", tmp_path / "peft/adapter_config.json")
    save_file(load_file(tmp_path / "export/adapter_model.safetensors"), tmp_path / "peft/adapter_model.safetensors")
    for name in ("export", "peft"):
        last = lacquer("--from", str(tmp_path / name), "--dry-run", *settings)
        assert last.finish() == 0, last.stderr()
        assert f'model.adapter="{tmp_path / name}"' in "".join(last.stdout().split())


def test_a_server_that_fails_ends_the_run_with_its_reason(lacquer, tmp_path):
    (tmp_path / "own.py").write_text(FAILING_METHOD.format(folder=tmp_path))
    run = lacquer("--set", "strategy.optimizer=own:Mine", "--set", "strategy.controller=fixed", "--quiet")
    assert run.finish() == 1
    assert "RuntimeError: planted failure" in run.stderr()
    assert "Traceback" not in run.stderr()
    assert run.run_folder.name in run.stderr()
    assert run.living() == []
    assert json.loads((run.run_folder / "status.json").read_text())["state"] == "failed"


@pytest.mark.nightly  # two minutes and a half; that a worker which dies once is replaced is in test_survival.py
def test_workers_that_die_again_and_again_end_the_run(lacquer):
    """A worker that dies is replaced once for each message; work that kills whoever does it fails the round."""
    run = lacquer("--set", "rounds=1000", "--quiet")
    run.wait_for_round(1)
    while run.process.poll() is None:
        for actor in run.actors():
            with contextlib.suppress(psutil.NoSuchProcess):
                actor.kill()
    assert run.finish() == 1
    assert "RoundFailed" in run.stderr()
    assert "its replacement died at the same work" in (run.run_folder / "flower.log").read_text()
    assert "Resume with: lacquer resume" in run.stderr()
    assert run.living() == []


def test_an_interrupt_stops_everything(lacquer):
    """Ctrl-C, and a second one for good measure; the ledger stays sound."""
    run = lacquer("--set", "rounds=1000")
    run.wait_for_round(1)
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(0.5)
    if run.process.poll() is None:
        os.kill(run.process.pid, signal.SIGINT)
    assert run.finish() == 130
    assert run.living() == []
    assert "Stopping what was started" in run.stderr()
    assert "Interrupted" in run.stderr()
    assert "Traceback" not in run.stderr()
    status = json.loads((run.run_folder / "status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "interrupted")
    with Ledger.open(run.run_folder / "ledger.jsonl", read_only=True) as ledger:
        assert len(ledger.events) >= 2


@pytest.mark.parametrize("engine", ["flower", pytest.param("inprocess", marks=pytest.mark.nightly)])
def test_a_killed_launcher_leaves_no_process(lacquer, engine):
    run = lacquer("--set", "rounds=1000", "--engine", engine)
    run.wait_for_round(1)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 120
    while run.living() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert run.living() == []


@pytest.mark.nightly
def test_sigterm_stops_a_run_in_process(lacquer):
    run = lacquer("--set", "rounds=1000", "--engine", "inprocess")
    run.wait_for_round(1)
    run.process.terminate()
    assert run.finish() == 130
    assert run.living() == []


SAME_COHORTS_NO_NOISE = [
    *("--set", "strategy.controller=fixed"),
    *("--set", "privacy.non-private=true"),
    *("--set", "privacy.noise=insecure-zero"),
    *("--set", "privacy.seeded-cohorts=true"),
    "--quiet",
]


@pytest.mark.nightly  # three runs of Flower
def test_both_engines_and_one_client_per_node_give_the_same_sums(tmp_path):
    """Two un-noised rounds end in the same adapter, whoever trains whom."""
    from tests.end_to_end.lacquer_process import TINY, Lacquer

    adapters = {}
    for name, arguments in {
        "ray": ["--engine", "flower"],
        "one client per node": ["--engine", "flower", "--set", "simulation.clients-per-node=1"],
        "in process": ["--engine", "inprocess"],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tiny.toml").write_text(TINY.replace('"cache"', f'"{tmp_path / "cache"}"'))
        run = Lacquer(folder, "tiny.toml", *SAME_COHORTS_NO_NOISE, *arguments)
        try:
            assert run.finish() == 0, run.stderr()
        finally:
            run.end()
        adapters[name] = load_file(run.run_folder / "checkpoint" / "state.safetensors")["adapter"]
    for name, adapter in adapters.items():
        assert_close(adapter, adapters["in process"], rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert adapters["ray"].abs().sum() > 0
