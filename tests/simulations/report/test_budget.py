"""Epsilon over runs: those of one data set add up, others do not, and composing is tighter than adding."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from privacy.accountants import composition
from privacy.commitment import FloorStep
from privacy.events import Poisson
from server.config.load import parse
from simulations.cli.app import app
from simulations.report.budget import Cost, Spending, spendings, together_text
from simulations.report.notation import delta_text
from simulations.report.page import render
from simulations.report.read_run import read_run
from tests.cases.recorded_runs import CONFIG, record_run_in

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
    assert both.added == pytest.approx((2 * single, 2e-5), rel=1e-4)  # each is rounded up
    epsilon, delta = both.bound
    assert delta == 1e-5
    assert epsilon == pytest.approx(composition.epsilon([*FLOOR, *FLOOR], 1e-5), rel=1e-3)
    assert single < epsilon < both.added[0]


def test_what_cannot_be_composed_is_added_to_what_can() -> None:
    one, two = (Cost(Path(), 8.0, 1e-5, FLOOR, population, None) for population in (1000, 500))
    other = Cost(Path(), 3.0, 1e-6, None, None, None)
    joint, single = (composition.tightest_bound(FLOOR * times, 1e-5)[0] for times in (2, 1))
    spending = Spending("one", "client", "csv:own.csv", [one, one, two, other])
    assert spending.bound == pytest.approx((joint + single + 3.0, 2.1e-5))
    assert spending.how(spending.bound).endswith("where they can be, the others added up")


def test_a_run_without_a_guarantee_leaves_none(tmp_path: Path) -> None:
    folders = [recorded(tmp_path, "a", "one"), recorded(tmp_path, "b", "one", not_private="noise is off")]
    (both,) = spendings(folders)
    assert both.composed is None
    assert math.isinf(both.bound[0])


def test_a_run_without_a_ledger_has_spent_nothing_and_one_without_a_digest_is_unknown(tmp_path: Path) -> None:
    started = recorded(tmp_path, "a", "one", state="failed", done=0, ledger=False)
    assert spendings([started]) == []
    (found,) = spendings([started, recorded(tmp_path, "b", None)])
    assert "source.digest is missing" in found.runs[0].damage
    assert math.isinf(found.bound[0])


def test_a_damaged_ledger_guarantees_nothing_and_is_named(tmp_path: Path) -> None:
    folder = recorded(tmp_path, "a", "one")
    ledger = folder / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noise_std":1.5', '"noise_std":2.5', 1))
    (found,) = spendings([folder])
    assert f"{ledger} line" in found.runs[0].damage
    shown = CliRunner().invoke(app, ["budget", str(tmp_path)])
    assert shown.exit_code == 2
    assert shown.stderr == f"{found.runs[0].damage}\n"
    assert "together: no guarantee" in shown.stdout


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


def on_records(folder: Path) -> Path:
    """The run as one on somebody's records; the invented ones are nobody's."""
    (folder / "config.toml").write_text(parse({**CONFIG.to_table(), "data": {"source": "csv:own.csv"}}).to_toml())
    return folder


def beside_one_another(place: Path, *digests: str, **options: object) -> list[Path]:
    """Runs in one output folder."""
    folders = []
    for number, digest in enumerate(digests):
        folders.append(on_records(recorded(place, f"made-{number}", digest, **options)).rename(place / f"run-{number}"))
    return folders


def test_the_report_says_what_runs_on_the_same_data_guarantee_together(tmp_path: Path) -> None:
    first, _, third, alone = beside_one_another(tmp_path, "one", "one", "one", "two")
    (found, _) = spendings(sorted(tmp_path.glob("run-*")))
    epsilon, delta = found.bound
    assert epsilon < found.added[0]
    page = render(read_run(third))
    assert f"<p>2 runs beside this one used the same data. All 3 together have ε ≤ {epsilon:.2f}" in page
    assert f"at δ = {delta_text(delta)} (add-remove; composed by privacy loss distributions), as of" in page
    assert together_text(read_run(first)) == together_text(read_run(third))
    assert together_text(read_run(alone)) == ""
    assert "used the same data" not in render(read_run(alone))


def test_beside_a_run_without_a_guarantee_there_is_none_together(tmp_path: Path) -> None:
    (first,) = beside_one_another(tmp_path, "one")
    on_records(recorded(tmp_path, "made", "one", not_private="noise is off")).rename(tmp_path / "other")
    assert "1 run beside this one" in together_text(read_run(first))
    assert together_text(read_run(first)).endswith("so together they have none.")
    assert together_text(read_run(tmp_path / "other")) == ""


def test_invented_records_are_not_added_up_in_a_report(tmp_path: Path) -> None:
    folders = [recorded(tmp_path, f"made-{n}", "one").rename(tmp_path / f"run-{n}") for n in range(2)]
    assert [together_text(read_run(folder)) for folder in folders] == ["", ""]
