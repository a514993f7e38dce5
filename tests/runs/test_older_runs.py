"""Runs of earlier versions are read, verified and used as before: no file of theirs is rewritten, no number changes.

`tests/cases/older_run` is a run of commit ed441b1: one site, four steps, settings with older names (`[silo]`).
Its checkpoint, log and places of a machine are left out.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from peft import PeftConfig
from typer.testing import CliRunner

from server.evaluation.finished import read_finished
from server.run_folder.verify import verify_run
from simulations.cli.app import app

OLDER = Path(__file__).parents[1] / "cases" / "older_run"
KEPT = ("ledger.jsonl", "privacy.json", "commitment.json", "config.toml", "metrics.jsonl", "results.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLDER, tmp_path / "run"))


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in KEPT}


def test_its_ledger_is_verified_and_its_settings_have_their_new_names(run: Path) -> None:
    said = json.loads((run / "privacy.json").read_text())
    finished = read_finished(run)
    assert "[silo]" in (run / "config.toml").read_text()
    assert finished.config.site.batch_size == 10
    assert finished.statement["epsilon"] == said["epsilon"]
    assert finished.statement["ledger"] == said["ledger"]
    verified = verify_run(run).statement()
    assert verified is not None
    assert {name: verified[name] for name in said} == said
    assert PeftConfig.from_pretrained(str(finished.adapter)).r == 4


@pytest.mark.parametrize("command", ["report", "statement", "budget", "runs"])
def test_commands_read_it_and_change_nothing(run: Path, command: str) -> None:
    before = digests(run)
    done = CliRunner().invoke(app, [command, str(run if command != "runs" else run.parent)])
    assert done.exit_code == 0, done.output
    assert digests(run) == before
