"""Epsilon over runs: those of one data set add up, others do not, and composing is tighter than adding."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from privacy.accountants import composition
from privacy.commitment import FloorStep
from privacy.events import Poisson
from simulations.cli.app import app
from simulations.history.budget import spendings
from tests.cases.recorded_runs import record_run_in

EVERYONE, COHORT = Poisson(1.0, 1000), Poisson(0.05, 1000)
FLOOR = (FloorStep("histogram", EVERYONE, 10.0), FloorStep("round", COHORT, 1.5, 5))


def recorded(place: Path, name: str, digest: str | None, **options: object) -> Path:
    (place / name).mkdir()
    folder = record_run_in(place / name, **options)  # type: ignore[arg-type]
    if digest is not None:
        (folder / "source.digest").write_text(f"{digest}\n")
    return folder


def test_runs_on_the_same_data_are_composed(tmp_path: Path) -> None:
    folders = [recorded(tmp_path, "a", "one"), recorded(tmp_path, "b", "one"), recorded(tmp_path, "c", "two")]
    both, alone = spendings(folders)
    assert ([run.folder for run in both.runs], both.unit) == (folders[:2], "client")
    single, _ = alone.bound
    assert both.added == pytest.approx((2 * single, 2e-5))
    epsilon, delta = both.bound
    assert delta == 1e-5
    assert epsilon == pytest.approx(composition.epsilon([*FLOOR, *FLOOR], 1e-5), rel=1e-3)
    assert single < epsilon < both.added[0]


def test_a_run_without_a_guarantee_leaves_none(tmp_path: Path) -> None:
    folders = [recorded(tmp_path, "a", "one"), recorded(tmp_path, "b", "one", not_private="noise is off")]
    (both,) = spendings(folders)
    assert both.composed is None
    assert math.isinf(both.bound[0])


def test_a_run_without_a_ledger_has_spent_nothing_and_one_without_a_digest_is_unknown(tmp_path: Path) -> None:
    started = recorded(tmp_path, "a", "one", state="failed", done=0, ledger=False)
    assert spendings([started, recorded(tmp_path, "b", None)]) == []


def test_a_damaged_ledger_guarantees_nothing(tmp_path: Path) -> None:
    folder = recorded(tmp_path, "a", "one")
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noise_std":1.5', '"noise_std":2.5', 1))
    (found,) = spendings([folder])
    assert found.runs[0].not_private == "its ledger cannot be read"


def test_the_command_states_the_sum_and_its_terms(tmp_path: Path) -> None:
    recorded(tmp_path, "a", "one")
    recorded(tmp_path, "b", "one")
    shown = CliRunner().invoke(app, ["budget", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.stdout.split())
    assert "(one), client: 2 runs" in text
    assert "(composed by privacy loss distributions)" in text
    assert "Neighbouring data sets differ by one unit more or less." in text
    (found,) = json.loads(CliRunner().invoke(app, ["budget", str(tmp_path), "--json"]).stdout)
    assert found["epsilon"] < found["epsilon_added"]
    assert found["adjacency"] == "add_remove"
