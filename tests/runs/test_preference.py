"""Whole runs over pairs of answers: of clients, of one site's records; their files, report and commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from click.testing import CliRunner

from server.config.load import ConfigError
from server.evaluation.finished import read_finished
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from simulations.preflight import check_run
from simulations.presets.asked import Asked
from tests.cases.finished_runs import settings

COMMAND = typer.main.get_command(app)
CLIENTS = {
    "privacy.unit": "client", "privacy.delta": 0.01, "clients": 6, "sampling-rate": 1.0, "rounds": 6,
    "local.learning-rate": 1.0, "privacy.noise": "insecure-zero", "privacy.non-private": True,
    "strategy.controller-options.clip-norm": 100.0, "strategy.optimizer-options.learning-rate": 1.0,
}  # fmt: skip


def run_on_pairs(place: Path, **changed: Any) -> Path:
    config = settings(place, "preference", "random:llama", **{"model.targets": "q_proj,v_proj", **changed})
    check_run(Asked(config))
    (place / "run").mkdir()
    run_inprocess(config, place / "run")
    return place / "run"


def called(*arguments: str) -> str:
    done = CliRunner().invoke(COMMAND, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_clients_teach_a_preference_and_every_page_calls_it_one(loss: str, tmp_path: Path) -> None:
    run = run_on_pairs(tmp_path, **CLIENTS, **{"local.preference.loss": loss, "local.preference.beta": 1.0})
    results = json.loads((run / "results.json").read_text())
    assert results["missing"] == {}
    assert results["test_accuracy"] == 1.0
    assert results["test_records"] == 6
    assert "test_perplexity" not in results
    assert results["validation_loss"] < results["start_validation_loss"]
    if loss == "dpo":
        assert results["start_validation_accuracy"] == 0.5
    called("report", str(run))
    assert "Test preference accuracy" in (run / "report.html").read_text()
    assert "preference accuracy 1.0000 on 6 records" in (run / "adapter" / "README.md").read_text()
    found = json.loads(called("evaluate", str(run), "--json"))
    assert found["adapter"]["accuracy"] == 1.0
    assert found["adapter"]["loss"] == pytest.approx(results["test_loss"], rel=1e-5)
    assert loss == "simpo" or found["base"]["accuracy"] == 0.5
    assert called("generate", str(run), "--prompt", "aaaa number 1?", "--tokens", "4")


def test_one_site_protects_every_pair(tmp_path: Path) -> None:
    run = run_on_pairs(tmp_path)
    statement = read_finished(run).statement
    assert (statement["unit"], statement["not_private"]) == ("record", None)
    assert 0 <= json.loads((run / "results.json").read_text())["test_accuracy"] <= 1


def test_hooks_that_know_no_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"site.gradients = 'opacus' must be 'stacked' with model.task = 'preference'"
    ):
        settings(tmp_path, "preference", "random:llama", **{"site.gradients": "opacus"})
