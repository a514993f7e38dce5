"""Tuning and training are one event: charged whole and once, sealed, and stated by every candidate's own ledger."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from privacy.accountants import composition, selection
from privacy.commitment import POISSON, Commitment, FloorStep, Tries, Tuning
from privacy.errors import BudgetExceeded, CorruptRun
from privacy.events import Component, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement, rounded_up, sentence
from privacy.ledger.tuning import TuningLedger

DELTA = 1e-5
COHORT = Poisson(0.05, 1000)
OWN, OTHER = (FloorStep("round", COHORT, 1.5, 20),), (FloorStep("round", COHORT, 1.3, 25),)
TUNING = Tuning("event-1", Tries(4.0, POISSON), (OWN, OTHER))
TOTAL, ORDER = selection.epsilon(TUNING.tries, TUNING.candidates, DELTA)
COMMITMENT = Commitment("client", "add_remove", 1000, TOTAL * 1.01, DELTA, floor=OWN, tuning=TUNING)
DRAW = {"salt": "secret", "candidates": [["a", "1"], ["b", "2"]]}


def release(round: int, z: float = 1.5) -> ReleaseEvent:
    return ReleaseEvent("round", round, COHORT, (Component("update", 1.0, z, 3),))


def test_a_candidate_s_ledger_states_the_price_of_the_whole(tmp_path: Path) -> None:
    alone = composition.epsilon(OWN, DELTA)
    with Ledger.create(tmp_path / "ledger.jsonl", COMMITMENT) as ledger:
        ledger.note_release(ledger.charge(release(1)))
        assert ledger.epsilon_spent() == ledger.epsilon_guaranteed() == TOTAL > 1.3 * alone
        found = privacy_statement(ledger)
    with Ledger.open(tmp_path / "ledger.jsonl", read_only=True) as ledger:
        assert ledger.commitment == COMMITMENT
        assert privacy_statement(ledger) == found
    assert json.loads(json.dumps(found)) == found
    assert found["epsilon"] == found["epsilon_spent"] == rounded_up(TOTAL, 4)
    assert found["tuning"]["epsilon_of_a_candidate"] == rounded_up(alone, 4)
    assert found["tuning"]["order"] == ORDER
    assert found["tuning"]["sentence"] == (
        f"tuning and training: epsilon at most {rounded_up(TOTAL, 2):.2f} at delta 1e-05 by repeat-and-select, RDP "
        f"order {ORDER:g}"
    )
    assert found["accountant"] == "dp_accounting 0.6.0 (RDP), repeat and select"
    assert {"delta": DELTA, "epsilon": rounded_up(TOTAL, 4)} in found["curve"]
    assert f"epsilon at most {rounded_up(TOTAL, 2):.2f}" in sentence(found)
    assert "and that it was chosen among the candidates of its sweep, is differentially private" in sentence(found)
    assert sum("looking at" in text for text in found["not_covered"]) == 1
    assert "how long it took" in found["not_covered"][1]


def test_a_candidate_may_release_its_own_steps_and_no_more(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.jsonl", COMMITMENT) as ledger:
        with pytest.raises(BudgetExceeded, match="below the committed floor"):
            ledger.charge(release(1, 1.3))
        for round in range(20):
            ledger.charge(release(round))
        with pytest.raises(BudgetExceeded, match="are used"):
            ledger.charge(release(20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": TOTAL * 0.999}, "more than the committed"),
        ({"floor": (FloorStep("round", COHORT, 1.2, 20),)}, "one of the candidates"),
        ({"adjacency": "replace_one"}, "add_remove"),
        ({"not_private": "a test"}, "a private run"),
        ({"mode": "filter", "floor": (), "order": 8, "rho": 1.0}, "tuning needs mode 'floor'"),
        ({"tuning": replace(TUNING, candidates=(OWN, (FloorStep("round", Poisson(0.05, 999), 2.0),)))}, "999"),
        ({"tuning": replace(TUNING, candidates=(OWN, (FloorStep("round", COHORT, 0.2),)))}, "protects no one"),
    ],
)
def test_what_the_event_does_not_pay_for_is_no_commitment(tmp_path: Path, change: dict, message: str) -> None:
    for make in (
        lambda commitment: Ledger.create(tmp_path / "ledger.jsonl", commitment),
        lambda commitment: TuningLedger.charge(tmp_path / "tuning.jsonl", commitment, "", DRAW),
    ):
        with pytest.raises(ValueError, match=message):
            make(replace(COMMITMENT, **change))
    assert list(tmp_path.iterdir()) == []


def test_the_sweep_is_charged_once_and_released_once(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    ledger = TuningLedger.charge(path, COMMITMENT, "the statement", DRAW)
    with pytest.raises(BlockingIOError):
        TuningLedger.open(path)
    ledger.close()
    with pytest.raises(FileExistsError):
        TuningLedger.charge(path, COMMITMENT, "the statement", DRAW)
    ledger = TuningLedger.open(path)
    assert (ledger.commitment, ledger.tuning, ledger.statement) == (COMMITMENT, TUNING, "the statement")
    assert ledger.released is None
    ledger.end("a", "7:abc")
    with pytest.raises(ValueError, match="has ended"):
        ledger.end("b", "7:abc")
    ledger.close()
    assert TuningLedger.open(path, read_only=True).released == {"cell": "a", "ledger": "7:abc"}


def test_the_ledger_tells_neither_the_draw_nor_any_time_and_takes_no_other_draw(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    ledger = TuningLedger.charge(path, COMMITMENT, "", DRAW)
    ledger.check_draw(json.loads(json.dumps(DRAW)))
    for other in ({**DRAW, "candidates": DRAW["candidates"][:1]}, {**DRAW, "salt": "guess"}):
        with pytest.raises(CorruptRun, match="other candidates"):
            ledger.check_draw(other)
    ledger.end(None, None)
    written = path.read_text()
    assert "salt" not in written
    lines = [set(json.loads(line)["body"]) for line in written.splitlines()]
    assert lines == [{"commitment", "statement", "draw"}, {"cell", "ledger"}]


def test_a_torn_line_is_noted_and_the_charge_stands(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    TuningLedger.charge(path, COMMITMENT, "", DRAW).close()
    with path.open("ab") as file:
        file.write(b'{"kind": "rel')
    TuningLedger.open(path).close()
    assert b'"torn"' in path.read_bytes()
    assert TuningLedger.open(path, read_only=True).released is None


def test_a_ledger_of_something_else_is_refused(tmp_path: Path) -> None:
    plain = replace(COMMITMENT, tuning=None)
    Ledger.create(tmp_path / "ledger.jsonl", plain).close()
    with pytest.raises(CorruptRun, match="must hold the charge of a sweep"):
        TuningLedger.open(tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="must have a tuning"):
        TuningLedger.charge(tmp_path / "tuning.jsonl", plain, "", DRAW)
