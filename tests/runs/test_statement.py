"""The statement for those who must sign: it says what the ledger says, with valid limits, or nothing at all."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from scipy.stats import norm
from typer.testing import CliRunner

from privacy.accountants.attack_rates import attack_bound, bound_of_pairs
from server.run_folder.verify import verify_run
from simulations.cli.app import app
from tests.cases.damage import make_run
from tests.runs.test_report import Page

AUDIT: dict[str, Any] = {
    "not_covered_by_the_guarantee": "Not covered by the guarantee.",
    "verdict": "Nothing refutes the ledger.",
    "membership": [
        {
            "level": "client",
            "attacks": [
                {"tpr": [{"fpr": 0.01, "estimate": reached, "lower": 0.0, "upper": 0.04}]} for reached in (0.013, 0.002)
            ],
        }
    ],
}


ALL_BUT_SETTINGS = (
    "ledger.jsonl",
    "privacy.json",
    "results.json",
    "metrics.jsonl",
    "adapter",
    "status.json",
    "times.jsonl",
)
"""Files without which a run has only been set up."""


def stated(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["statement", *map(str, arguments)])


def said_of(*arguments: object) -> dict[str, Any]:
    done = stated(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def page_of(folder: Path) -> Page:
    return Page((folder / "statement.html").read_text(encoding="utf-8"))


def test_a_run_states_its_guarantee_its_risks_and_what_is_left_open(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    done = stated(folder)
    assert (done.exit_code, done.stdout.strip()) == (0, str(folder / "statement.html"))
    text, said = page_of(folder).text, said_of(folder)
    ledger, guarantee = verify_run(folder).ledger, verify_run(folder).statement()
    assert ledger is not None
    assert guarantee is not None
    assert guarantee["sentence"] in text
    for item in (*guarantee["not_covered"], *said["layers"], *said["layers"].values(), *said["for_a_lawyer"]):
        assert item in text
    bound, risks = attack_bound(ledger.commitment), said["risks"]
    assert risks["tight"] is True
    assert [(row["true_positive_rate"], row["posterior"]) for row in risks["rates"]] == [
        (bound.true_positive_rate(fpr), bound.posterior(0.5, fpr)) for fpr in (0.01, 0.001)
    ]
    for share in (risks["advantage"], *(row["posterior"] for row in risks["rates"])):
        assert f"{math.ceil(10_000 * share) / 100:.2f}\u00a0%" in text.replace(" %", "\u00a0%")
    assert str(folder.parent) not in text
    assert "audit" not in said


def test_the_risks_are_those_of_the_releases_and_smaller_than_those_of_epsilon_alone(
    record_run: Callable[..., Path],
) -> None:
    folder = record_run()
    risks, guarantee = said_of(folder)["risks"], verify_run(folder).statement()
    assert guarantee is not None
    of_epsilon = bound_of_pairs([(guarantee["epsilon"], guarantee["delta"])])
    histogram_alone = norm.cdf(norm.ppf(0.01) + 1 / 10.0)
    assert histogram_alone < risks["rates"][0]["true_positive_rate"] < of_epsilon.true_positive_rate(0.01)
    assert 0 < risks["advantage"] < of_epsilon.advantage


def test_a_page_is_kept_as_pdf_too(record_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record_run()
    done = stated(folder, "--pdf")
    assert done.stdout.split() == [str(folder / "statement.html"), str(folder / "statement.pdf")]
    written = (folder / "statement.pdf").read_bytes()
    assert written.startswith(b"%PDF-")
    assert b"/Count 1" in written, "one page"
    assert b"000000Z" in written, "no time of day"
    monkeypatch.setitem(sys.modules, "fpdf", None)
    (folder / "statement.html").unlink()
    done = stated(folder, "--pdf")
    assert (done.exit_code, "pip install 'lacquer-dp[pdf]'" in done.stderr) == (2, True)
    assert not (folder / "statement.html").exists()


def test_a_prior_moves_the_posterior_alone(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    usual, rare = said_of(folder)["risks"], said_of(folder, "--prior", 0.01)["risks"]
    assert rare["advantage"] == usual["advantage"]
    assert 0.01 < rare["rates"][0]["posterior"] < 0.02 < 0.5 < usual["rates"][0]["posterior"]


@pytest.mark.parametrize("prior", ["0", "1", "nan", "-0.5"])
def test_a_prior_that_is_none_is_refused(prior: str, record_run: Callable[..., Path]) -> None:
    folder = record_run()
    done = stated(folder, "--prior", prior)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "--prior must lie between 0 and 1" in done.stderr
    assert not (folder / "statement.html").exists()


def test_a_run_without_a_guarantee_says_so_first_and_gives_no_numbers(record_run: Callable[..., Path]) -> None:
    folder = record_run(not_private="noise is off")
    said, text = said_of(folder), page_of(folder).text
    assert said["risks"] is None
    assert said["not_covered"] == []
    assert text.index("Not private.") < text.index("The guarantee")
    assert "noise is off" in text
    assert not [word for word in ("at most", "Membership advantage", "ε", "is protected") if word in text]


def test_what_an_audit_measured_stands_on_a_page_for_the_owner_alone(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    (folder / "audit").mkdir()
    (folder / "audit" / "audit.json").write_text(json.dumps(AUDIT))
    said = said_of(folder)
    assert said["pages"] == [str(folder / "statement.html"), str(folder / "audit" / "statement.html")]
    theirs, own = page_of(folder).text, page_of(folder / "audit").text
    assert "1.3" not in theirs
    assert AUDIT["verdict"] not in theirs
    assert "1.3 % (0.0 % to 4.0 %)" in own.replace("\u00a0", " ")
    assert "not measured" in own
    assert AUDIT["verdict"] in own
    assert (folder / "audit" / "statement.html").stat().st_mode & 0o777 == 0o600
    (folder / "audit" / "audit.json").write_text("{}")
    done = stated(folder)
    assert done.exit_code == 2
    assert "audit.json is not what an audit writes" in done.stderr


def test_a_damaged_run_and_no_run_are_refused_in_a_line(record_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = record_run()
    text = (folder / "privacy.json").read_text()
    (folder / "privacy.json").write_text(text.replace('"delta": 1e-05', '"delta": 1e-06'))
    (tmp_path / "empty").mkdir()
    nothing = shutil.copytree(folder, tmp_path / "begun", ignore=lambda *_: set(ALL_BUT_SETTINGS))
    for place, why in ((folder, "privacy.json"), (tmp_path / "empty", "no run folder"), (nothing, "no privacy budget")):
        done = stated(place)
        assert done.exit_code == 2, done.output
        assert why in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (place / "statement.html").exists()


@pytest.mark.parametrize(("kind", "stated_by"), [("client", True), ("sites", False), ("phases", None)])
def test_runs_of_every_kind(kind: str, stated_by: bool | None, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "place", kind, ended=True)
    said, text = said_of(folder), page_of(folder).text
    assert said["sentence"] in text
    if stated_by is None:  # redacted phases have no guarantee for a record
        assert said["risks"] is None
        assert "Not private." in text
        return
    assert said["risks"]["tight"] is stated_by
    assert all(
        fpr < row["true_positive_rate"] <= 1 for fpr, row in zip((0.01, 0.001), said["risks"]["rates"], strict=True)
    )
    assert ("sites keep" in text) is not stated_by
    assert ("2 sites, of" in said["layers"]["Data"]) is not stated_by
