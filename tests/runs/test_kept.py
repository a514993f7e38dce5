"""What a run has paid for is on the disk before anything is measured of it, and whatever fails then fails alone."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client.engine.cohort import CohortEngine
from client.models.lora import WEIGHTS
from server.evaluation.finished import read_finished
from server.run_folder.errors import CannotResume
from server.run_folder.names import ADAPTER_FOLDER, LEDGER_FILE, PRIVACY_FILE, RESULTS_FILE
from server.run_folder.resume import check_resumable
from server.run_folder.telemetry import read_status
from server.run_folder.verify import verify_run
from server.runs import artefacts
from server.runs.start import run_in_folder
from simulations.cli.app import app
from simulations.report.judgement import judgements
from simulations.report.page import write_report
from simulations.report.read_run import read_run
from tests.cases.finished_runs import base_model, settings
from tests.cases.kinds import KINDS, begin_or_resume
from tests.cases.moments import charges

LLAMA = {"model.targets": "q_proj,v_proj"}
PAID = (f"{ADAPTER_FOLDER}/{WEIGHTS}", f"{ADAPTER_FOLDER}/adapter_config.json", PRIVACY_FILE)


def paid(folder: Path) -> dict[str, str]:
    """Digests of what may not be lost, nor written a second time."""
    files = [folder / name for name in PAID] + sorted(folder.rglob(LEDGER_FILE))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def said(folder: Path) -> tuple[str, str]:
    status = read_status(folder)
    assert status is not None
    return status.state, status.message


def breaking(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[[], bool] = lambda: True) -> None:
    real = getattr(owner, name)

    def broken(*given: Any, **named: Any) -> Any:
        if when():
            raise IndexError("index out of range in self")
        return real(*given, **named)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("kind", ["clients", "records", "phases", "sites"])
def test_a_run_whose_test_fails_has_all_it_paid_for_and_is_tested_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = KINDS[kind](tmp_path / "cache"), tmp_path / "run"
    with monkeypatch.context() as patch:
        breaking(patch, artefacts, "class_results")
        breaking(patch, artefacts, "card")
        begin_or_resume(config, folder)
    before, spent = paid(folder), charges(folder)
    results = json.loads((folder / RESULTS_FILE).read_text())
    reason = "IndexError: index out of range in self"
    assert results["missing"] == {"test": reason, "card": reason}
    assert "test_accuracy" not in results
    assert said(folder)[0] == "completed"
    assert f"test is missing ({reason})" in said(folder)[1]
    assert any(f"Test: missing, it failed ({reason})" in text for text in judgements(read_run(folder)))
    assert reason in write_report(folder).read_text()
    begin_or_resume(config, folder)
    after = json.loads((folder / RESULTS_FILE).read_text())
    assert (paid(folder), charges(folder)) == (before, spent)
    assert after.pop("missing") == {}
    assert after.items() >= {key: value for key, value in results.items() if key != "missing"}.items()
    assert 0 <= after["test_accuracy"] <= 1
    assert "test accuracy" in (folder / ADAPTER_FOLDER / "README.md").read_text()
    assert verify_run(folder).ended
    with pytest.raises(CannotResume, match="has ended"):
        begin_or_resume(config, folder)


@pytest.mark.parametrize("kind", ["clients", "records", "phases", "sites"])
def test_a_run_that_dies_in_its_last_evaluation_has_all_it_paid_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the validation records too: nothing is measured before the adapter is kept."""
    config, folder = KINDS[kind](tmp_path / "cache"), tmp_path / "run"
    with monkeypatch.context() as patch:
        breaking(patch, CohortEngine, "evaluate", lambda: (folder / PRIVACY_FILE).is_file())
        with pytest.raises(Exception, match=r"index out of range in self|workers answered"):
            begin_or_resume(config, folder)
    before, spent = paid(folder), charges(folder)
    assert not (folder / RESULTS_FILE).exists()
    verify_run(folder)
    begin_or_resume(config, folder)
    assert (paid(folder), charges(folder)) == (before, spent)
    assert said(folder)[0] == "completed"
    assert json.loads((folder / RESULTS_FILE).read_text())["missing"] == {}


def test_answers_that_fail_are_written_by_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_model(tmp_path / "base", "llama", "instruction")
    config, folder = (
        settings(tmp_path, "instruction", str(base), **{"model.targets": "q_proj,v_proj"}),
        tmp_path / "run",
    )
    folder.mkdir()
    import client.generation

    with monkeypatch.context() as patch:
        breaking(patch, client.generation, "continuations")
        run_in_folder(config, folder)
    results, before = json.loads((folder / RESULTS_FILE).read_text()), paid(folder)
    assert list(results["missing"]) == ["answers"]
    assert results["test_perplexity"] > 0
    assert read_finished(folder).task == "instruction", "the adapter is as good as that of any run"
    assert check_resumable(folder) == config
    done = CliRunner().invoke(app, ["resume", str(folder), "--quiet"])
    assert done.exit_code == 0, done.stderr
    after = json.loads((folder / RESULTS_FILE).read_text())
    assert (after["missing"], paid(folder)) == ({}, before)
    assert len(after["examples"]) == 2
    assert after["test_loss"] == results["test_loss"]


def test_a_kill_while_a_run_ends_for_the_second_time_leaves_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = KINDS["records"](tmp_path / "cache"), tmp_path / "run"
    with monkeypatch.context() as patch:
        breaking(patch, artefacts, "class_results")
        begin_or_resume(config, folder)
    real, seals = artefacts.write_seal, list[int]()

    def killed(*given: Any) -> None:
        seals.append(0)
        real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(artefacts, "write_seal", killed)
        with pytest.raises(KeyboardInterrupt):
            begin_or_resume(config, folder)
    assert len(seals) == 1
    assert "test" in json.loads((folder / RESULTS_FILE).read_text())["missing"]
    begin_or_resume(config, folder)
    assert json.loads((folder / RESULTS_FILE).read_text())["missing"] == {}
    verify_run(folder)
