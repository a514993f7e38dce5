"""`lacquer audit`: training without privacy is caught, private training is not, unlike records: no conclusion."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from client.data.prepare import prepare
from client.engine.local_training import LocalTraining
from client.worker import make_engine
from privacy.errors import CorruptRun
from server.config.load import load
from server.config.methods import methods
from server.evaluation.finished import read_finished
from server.run_folder import names
from server.runs.artefacts import Final, save_adapter
from server.runs.assembly import data_spec, make_assembly
from server.runs.public_data import train_without_noise
from server.runs.start import run_in_folder
from simulations.audit.losses import adapter_losses, reference_losses
from simulations.cli.app import app
from tests.cases import finished_runs

MEMBERS, HELD_OUT = 60, 120


def audit(run: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["audit", str(run), *words])


def found(run: Path) -> dict[str, Any]:
    result = audit(run, "--json")
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def write_records(path: Path, alphabet: str = "abcdefgh", count: int = MEMBERS + HELD_OUT + 20) -> None:
    draws = np.random.default_rng(len(alphabet))
    rows = [{"prompt": "".join(draws.choice(list(alphabet), 16)), "person": number // 4} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short private run over the records of one site, on random texts."""
    place = tmp_path_factory.mktemp("audit")
    base = finished_runs.base_model(place / "base", "llama", "causal-lm")
    config = finished_runs.settings(
        place, "causal-lm", str(base),
        **{
            "model.targets": "q_proj,v_proj,up_proj,down_proj", "model.rank": 16,
            "privacy.epsilon": 0.3, "privacy.delta": 1e-5,
            "data.validation-records": 20, "data.test-records": HELD_OUT, "evaluation.examples": 0,
        },
    )  # fmt: skip
    write_records(place / "records.jsonl")  # in the place of the cases' own
    folder = place / "run"
    folder.mkdir()
    run_in_folder(config, folder)
    return folder


@pytest.fixture(scope="module")
def overfitted(private: Path) -> Path:
    """The same run, with an adapter that was trained on its records without noise."""
    folder = private.with_name("overfitted")
    shutil.copytree(private, folder)
    (folder / names.SEAL_FILE).unlink()  # as whoever changes the adapter would
    config = load(folder / names.CONFIG_FILE)
    data = prepare(data_spec(config))
    assembly = make_assembly(config, methods(config), data)
    local = LocalTraining(optimizer="adamw", learning_rate=0.02, batch_size=MEMBERS, epochs=300)
    adapter = train_without_noise(make_engine(assembly.job), assembly.start, data.train, local, 0)
    save_adapter(folder / names.ADAPTER_FOLDER, config, Final(adapter, assembly.layout, assembly.spec))
    return folder


def test_a_private_run_is_consistent_with_its_ledger(private: Path) -> None:
    values = found(private)
    (level,) = values["membership"]
    assert (level["level"], level["members"], level["held_out"]) == ("record", MEMBERS, HELD_OUT)
    assert level["exchangeable"]["holds"]
    assert level["bound"]["epsilon_lower"] <= values["upper_bound"]["epsilon"] == pytest.approx(0.3, abs=0.01)
    assert values["verdict"].startswith("Consistent with the ledger")


def test_training_without_noise_is_caught_and_refutes_the_ledger_that_lies_beside_it(overfitted: Path) -> None:
    values = found(overfitted)
    (level,) = values["membership"]
    assert all(attack["auc"]["lower"] > 0.8 for attack in level["attacks"])
    assert level["bound"]["epsilon_lower"] > values["upper_bound"]["epsilon"]
    assert values["verdict"].startswith("REFUTED")
    assert "REFUTED" in audit(overfitted).stdout


def test_the_public_start_that_a_run_keeps_is_the_one_an_audit_would_make(tmp_path: Path) -> None:
    config = finished_runs.settings(
        tmp_path, "causal-lm", str(finished_runs.base_model(tmp_path / "base", "llama", "causal-lm")),
        **{
            "model.targets": "q_proj,v_proj", "public.warm-start-epochs": 2, "public.training-fraction": 0.5,
            "evaluation.examples": 0,
        },
    )  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    run_in_folder(config, folder)
    run, data = read_finished(folder), prepare(data_spec(config))
    kept = reference_losses(run, data, [data.test])
    before = adapter_losses(run, [data.test])
    engine, _ = run.engine()
    alone = engine.evaluate(load_file(folder / names.PUBLIC_START_FILE)["adapter"], data.test)
    assert run.results["public_test_loss"] == pytest.approx(alone.loss, rel=1e-5)
    assert run.results["public_test_perplexity"] == pytest.approx(alone.perplexity, rel=1e-5)
    assert run.results["public_test_loss"] != run.results["test_loss"]
    start = folder / names.PUBLIC_START_FILE
    start.rename(tmp_path / "start")
    assert np.array_equal(kept, reference_losses(run, data, [data.test]))
    assert not np.array_equal(kept, before)
    start.write_bytes((tmp_path / "start").read_bytes()[:-1])
    with pytest.raises(CorruptRun, match="restore or delete it"):
        reference_losses(run, data, [data.test])


def test_findings_stay_with_the_auditor(private: Path) -> None:
    shared = (private / names.REPORT_FILE).read_text() if (private / names.REPORT_FILE).exists() else None
    result = audit(private)
    assert "Not covered by the guarantee" in result.stderr
    folder = private / names.AUDIT_FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in (names.AUDIT_FILE, names.REPORT_FILE):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
        assert "Not covered by the guarantee" in (folder / name).read_text()
    page = (folder / names.REPORT_FILE).read_text()
    assert "Membership of one record" in page
    assert 'id="roc-' in page
    assert CliRunner().invoke(app, ["report", str(private)]).exit_code == 0
    now = (private / names.REPORT_FILE).read_text()
    assert "Membership of one record" not in now
    assert shared is None or "Membership of one record" not in shared


def test_units_are_whole_where_the_source_names_them(tmp_path: Path, private: Path) -> None:
    base = private.parent / "base"
    changes = {
        "model.targets": "q_proj,v_proj", "privacy.unit": "group", "data.unit-column": "person", "privacy.epsilon": 1.0,
        "data.validation-records": 20, "data.test-records": 80, "evaluation.examples": 0,
    }  # fmt: skip
    config = finished_runs.settings(tmp_path, "causal-lm", str(base), **changes)
    write_records(tmp_path / "records.jsonl")
    (tmp_path / "run").mkdir()
    run_in_folder(config, tmp_path / "run")
    persons, records = found(tmp_path / "run")["membership"]
    assert (persons["level"], persons["members"], persons["held_out"]) == ("person", 25, 20)
    assert (records["level"], records["members"], records["held_out"]) == ("record", 100, 80)
    assert persons["bound"] is None  # too few slots, and it says so by its absence
    assert records["bound"] is None  # a record is not what is protected


def test_unlike_records_end_in_no_conclusion(tmp_path: Path, private: Path) -> None:
    base = private.parent / "base"
    other = tmp_path / "other.jsonl"
    write_records(other, "ab")
    changes = {
        "data.test-source": f"jsonl:{other}",
        "privacy.epsilon": 1.0,
        "evaluation.examples": 0,
        "data.validation-records": 20,
    }
    config = finished_runs.settings(tmp_path, "causal-lm", str(base), **{"model.targets": "q_proj,v_proj", **changes})
    write_records(tmp_path / "records.jsonl")
    (tmp_path / "run").mkdir()
    run_in_folder(config, tmp_path / "run")
    values = found(tmp_path / "run")
    (level,) = values["membership"]
    assert not level["exchangeable"]["holds"]
    assert level["conclusion"].startswith("No conclusion")
    assert level["bound"] is None
    assert values["verdict"].startswith("No bound")


def test_other_records_than_the_runs_are_refused(tmp_path: Path, private: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(private, folder)
    (folder / names.SOURCE_FILE).write_text("0" * 64)
    (folder / names.SEAL_FILE).unlink()  # else the file is named as changed
    result = audit(folder)
    assert result.exit_code == 2
    assert "other records than the run was trained on" in result.stderr
