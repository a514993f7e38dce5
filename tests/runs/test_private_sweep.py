"""A private sweep on a tiny model: charged once, killed and resumed with the same candidates, one run released."""

import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from privacy.commitment import POISSON, Tries
from privacy.ledger.ledger import Ledger
from privacy.ledger.tuning import TuningLedger
from simulations.cli.app import app
from simulations.report.budget import spendings
from simulations.report.read_run import read_run
from simulations.sweep import candidates
from simulations.sweep.candidates import PrivateSweep
from tests.cases.sweeps import BROKEN, HELD, RunSweep
from tests.runs.test_record_level_sweep import BASE as SITE
from tests.runs.test_record_level_sweep import SWEEP as SITES

SWEEP = """
name = "tiny"
[variants.fixed]
[variants.held]
strategy.optimizer = "own_held:Mine"
[variants.broken]
strategy.optimizer = "own_broken:Mine"
[variants.floor]
kind = "public-only"
public.warm-start-epochs = 1
[[grids]]
name = "g"
base = "base.toml"
variants = ["fixed", "held", "broken"]
seeds = [0]
"""
FIXED_DRAW = """
import sys
import simulations.sweep.candidates as candidates
from simulations.cli.app import app
candidates.draw = lambda tries, cells: [0, 1, 2]
app()
"""


@pytest.fixture
def sweep(tmp_path: Path, run_sweep: RunSweep) -> RunSweep:
    (tmp_path / "tiny.toml").write_text(SWEEP)
    (tmp_path / "own_held.py").write_text(BROKEN.replace(*HELD))
    return partial(run_sweep, "--private")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly  # three minutes
def test_a_killed_sweep_goes_on_with_the_same_candidates_and_releases_one(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs/sweeps/tiny-private"
    (tmp_path / "hold").touch()  # the second candidate waits in round 1, charged, while this file is there
    command = [sys.executable, "-c", FIXED_DRAW, "sweep", "tiny.toml", "--private"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    second = folder / "candidates/1/ledger.jsonl"
    try:
        while not (second.is_file() and '"kind":"charge"' in second.read_text()):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        assert (folder / "draw.json").stat().st_mode & 0o777 == 0o600
        assert not (folder / "candidates/2/ledger.jsonl").exists()
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # the candidate's process watches for the end of the one that started it; held, it cannot end its run before
        assert started
        assert not psutil.wait_procs(started, timeout=60)[1]
    finally:
        if process.poll() is None:
            process.kill()
    (tmp_path / "hold").unlink()
    charged = (folder / "tuning.jsonl").read_text()

    # nothing may be drawn again, nor the sweep be changed under its charge
    monkeypatch.setattr(candidates, "draw", lambda *_: pytest.fail("drawn again"))
    drawn = (folder / "draw.json").read_text()
    (folder / "draw.json").write_text(drawn.replace("g/broken", "g/fixed"))
    code, output = sweep()
    assert (code, "other candidates than are named" in output) == (2, True), output
    (folder / "draw.json").write_text(drawn)
    code, output = sweep("--tries", "5")
    assert (code, "was charged for other candidates, tries" in output) == (2, True), output
    assert (folder / "tuning.jsonl").read_text() == charged

    seen: dict[str, object] = {}
    release = PrivateSweep.release

    def look_first(self: PrivateSweep):
        seen["resumed"] = (folder / "candidates/1/resumed.jsonl").is_file()
        seen["failed"] = (folder / "candidates/2/failed.txt").read_text()
        with Ledger.open(folder / "candidates/2/ledger.jsonl", read_only=True) as ledger:
            seen["spent"] = len(ledger.events)
        return release(self)

    monkeypatch.setattr(PrivateSweep, "release", look_first)
    code, output = sweep()
    assert code == 0, output
    assert seen["resumed"]
    assert "planted failure" in str(seen["failed"])
    assert seen["spent"] == 1
    assert "planted failure" not in output
    assert {entry.name for entry in folder.iterdir()} == {"tuning.jsonl", "chosen", "results.json"}

    ledger = TuningLedger.open(folder / "tuning.jsonl", read_only=True)
    assert ledger.tuning.tries == Tries(3.0, POISSON)
    cell = ledger.released["cell"]
    assert cell in ("g/fixed/seed=0", "g/held/seed=0")
    assert re.search(r"tuning and training: \(epsilon 3\.9\d+, delta 0\.001\) by repeat-and-select", ledger.statement)
    stated = json.loads((folder / "chosen/privacy.json").read_text())
    assert 3.9 < stated["epsilon"] <= 4.0
    assert stated["epsilon"] == stated["epsilon_spent"]
    assert stated["tuning"]["epsilon_of_a_candidate"] < 3.5
    assert "chosen among the candidates of its sweep" in stated["sentence"]
    assert any("how many candidates this sweep ran" in text for text in stated["not_covered"])
    assert (read_run(folder / "chosen").guarantee or {})["epsilon"] == stated["epsilon"]
    (row,) = json.loads((folder / "results.json").read_text())["cells"]
    assert (row["cell"], row["epsilon_stated"]) == (cell, stated["epsilon"])
    (spent,) = spendings([folder / "chosen"])
    assert spent.bound[0] == pytest.approx(stated["epsilon"], abs=1e-4)

    # the end is the end: nothing runs, nothing is charged, the same is said
    before = (folder / "tuning.jsonl").read_text()
    monkeypatch.setattr(PrivateSweep, "release", release)
    code, again = sweep()
    assert (code, f"chosen: {cell}" in again) == (0, True), again
    assert (folder / "tuning.jsonl").read_text() == before
    assert not (folder / "candidates").exists()


@pytest.mark.nightly
def test_a_draw_of_no_candidate_ends_the_sweep_and_is_spent(sweep, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "runs/sweeps/tiny-private"
    monkeypatch.setattr(candidates, "draw", lambda tries, cells: [])
    code, output = sweep("--only", "g/fixed", "--tries", "2")
    assert code == 1, output
    assert "nothing is released, and the budget is spent" in output
    assert TuningLedger.open(folder / "tuning.jsonl", read_only=True).released == {"cell": None, "ledger": None}
    assert {entry.name for entry in folder.iterdir()} == {"tuning.jsonl"}


@pytest.mark.nightly  # most of a minute
def test_a_candidate_never_calibrates_as_a_run_by_itself(sweep, tmp_path: Path, monkeypatch) -> None:
    """Its noise was taken away: it cannot begin, which settles nothing, and then fails, which does."""
    folder = tmp_path / "runs/sweeps/tiny-private"
    monkeypatch.setattr(candidates, "draw", lambda tries, cells: [0])
    with monkeypatch.context() as patch:
        patch.setattr(candidates.handed_on, "write_noise", lambda *_: None)
        code, output = sweep("--only", "g/broken", "--tries", "2")
    assert (code, "never calibrated anew" in output) == (2, True), output
    assert not list(folder.glob("candidates/*/ledger.jsonl"))
    assert TuningLedger.open(folder / "tuning.jsonl", read_only=True).released is None
    code, output = sweep("--only", "g/broken", "--tries", "2")
    assert (code, "Every candidate failed; nothing is released" in output) == (1, True), output
    assert TuningLedger.open(folder / "tuning.jsonl", read_only=True).released == {"cell": None, "ledger": None}
    (spent,) = spendings([folder / "candidates/0"])
    assert 3.9 < spent.bound[0] <= 4.0, "what failed is spent"


@pytest.mark.nightly
def test_an_interruption_says_that_the_charge_stays(sweep, tmp_path: Path, monkeypatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(candidates, "run_cells", stop)
    code, output = sweep("--only", "g/fixed", "--tries", "2")
    assert (code, "The budget stays charged, once" in output) == (130, True), output
    TuningLedger.open(tmp_path / "runs/sweeps/tiny-private/tuning.jsonl").close()


@pytest.mark.nightly  # most of a minute
def test_one_site_chooses_for_its_patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.toml").write_text(SITE.replace("CACHE", str(tmp_path / "cache")))
    (tmp_path / "tiny.toml").write_text(SITES)
    visits = [{"text": f"Visit {i} of patient {i % 20}, code {i % 7}.", "patient": str(i % 20)} for i in range(60)]
    (tmp_path / "visits.jsonl").write_text("\n".join(map(json.dumps, visits)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(candidates, "draw", lambda tries, cells: [1, 0])
    done = CliRunner().invoke(app, ["sweep", "tiny.toml", "--private", "--draw", "logarithmic"])
    assert done.exit_code == 0, done.output
    chosen = tmp_path / "runs/sweeps/tiny-private/chosen"
    stated = json.loads((chosen / "privacy.json").read_text())
    assert (stated["unit"], stated["tuning"]["tries"]["law"]) == ("group:patient", "logarithmic")
    assert 1.9 < stated["epsilon"] <= 2.0
    assert stated["tuning"]["epsilon_of_a_candidate"] < 1.9
    assert "perplexity" in done.output
    results = json.loads((chosen / "results.json").read_text())
    assert results["validation_loss"] > 0


def test_a_dry_run_says_what_trying_costs_and_charges_nothing(sweep, tmp_path: Path) -> None:
    code, output = sweep("--dry-run", "--only", "g/fixed", "--tries", "6", "--draw", "geometric")
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0] == "Private sweep, 1 cell: tuning and training together cost epsilon at most 4.00 at delta 1e-3."
    assert lines[1].startswith("Tries: 6 expected (geometric law); at most one with a chance of 16.7\xa0%")
    row = next(line for line in lines if line.startswith("g/fixed")).split()
    single, candidate = map(float, row[1:3])
    assert 1.2 * single < candidate < 3 * single
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "change", "message"),
    [
        ([], ("seeds = [0]", "seeds = [0, 1]"), "seed = 1, and g/fixed/seed=0 has 0"),
        ([], ("[variants.held]", "[variants.held]\nclients = 80"), "clients = 80"),
        ([], ("[variants.held]", "[variants.held]\ndata.records-per-client = 5"), "data.records-per-client = 5"),
        ([], ("[variants.held]", "[variants.held]\nprivacy.epsilon = 2.0"), "privacy.epsilon = 2.0"),
        ([], ("[variants.held]", '[variants.held]\nprivacy.unit = "record"'), "g/held/seed=0"),
        ([], ("[variants.held]", "[variants.held]\nprivacy.non-private = true"), "privacy.non-private = true"),
        ([], ("[variants.held]", '[variants.held]\nprivacy.mode = "filter"'), "must be 'floor'"),
        ([], ('"broken"]', '"floor"]'), "takes no part in a private sweep"),
        (["--tries", "0.5"], ("", ""), "mean_tries must be"),
        (["--draw", "binomial"], ("", ""), "--draw binomial: must be one of poisson, geometric, logarithmic"),
        (["--draw", "-1"], ("", ""), "shape must be >= 0"),
        (["--limit", "2"], ("", ""), "--private goes with none of"),
        (["--tries", "1e6"], ("", ""), "mean_tries must be"),
    ],
)
def test_what_cannot_be_candidates_is_refused_before_anything_is_drawn(
    sweep, tmp_path: Path, arguments: list[str], change: tuple[str, str], message: str
) -> None:
    (tmp_path / "tiny.toml").write_text(SWEEP.replace(*change, 1) if change[0] else SWEEP)
    code, output = sweep(*arguments)
    assert code == 2, output
    assert message in output
    assert not (tmp_path / "runs").exists()


def test_a_draw_without_the_private_flag_is_refused(sweep, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["sweep", "tiny.toml", "--tries", "3"])
    assert (done.exit_code, "need --private" in done.output) == (2, True)


def test_a_lost_ledger_is_not_replaced_by_a_new_one(sweep, tmp_path: Path) -> None:
    folder = tmp_path / "runs/sweeps/tiny-private"
    (folder / "candidates/0").mkdir(parents=True)
    code, output = sweep("--only", "g/fixed", "--tries", "2")
    assert (code, "is gone, and candidates were run by it" in output) == (2, True), output
    assert not (folder / "tuning.jsonl").exists()
