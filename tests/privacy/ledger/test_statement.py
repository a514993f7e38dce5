"""privacy.json says what was committed, spent and not covered, rounds up, and refuses approximations."""

import functools
import json
import math
from pathlib import Path

import pytest

from privacy.accountants.calibration import filter_commitment, floor_commitment
from privacy.accountants.composition import epsilon
from privacy.commitment import Commitment, FloorStep, check_delta
from privacy.events import Component, ExampleLevelPoisson, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import NOT_COVERED, privacy_statement, rounded_up, sentence

N, DELTA = 1000, 1e-5
SAMPLING, EVERYONE = Poisson(0.1, N), Poisson(1.0, N)


def event(label: str, sampling: Poisson, round: int = 0, **multipliers: float) -> ReleaseEvent:
    return ReleaseEvent(label, round, sampling, tuple(Component(name, 1.0, z, 3) for name, z in multipliers.items()))


@functools.cache
def calibrated() -> tuple[Commitment, float]:
    return floor_commitment(2.0, DELTA, SAMPLING, 5, extra=[FloorStep("histogram", EVERYONE, 10.0)], queries=(10.0,))


@pytest.fixture
def floor_ledger(tmp_path: Path) -> Ledger:
    commitment, z = calibrated()
    ledger = Ledger.create(tmp_path / "ledger.jsonl", commitment, "run-1")
    ledger.note_release(ledger.charge(event("histogram", EVERYONE, votes=10.0)))
    for t in range(3):
        ledger.note_release(ledger.charge(event("round", SAMPLING, t, update=z, bit=10.0)))
    ledger.charge(event("round", SAMPLING, 3, update=z, bit=10.0))
    return ledger


def test_a_floor_run_in_full(floor_ledger: Ledger) -> None:
    found = privacy_statement(floor_ledger)
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "plain JSON"
    floor = floor_ledger.commitment.floor
    assert found["private"] is True
    assert found["not_private"] is None
    assert (found["unit"], found["adjacency"], found["population"]) == ("client", "add_remove", N)
    assert (found["delta"], found["epsilon_target"], found["mode"]) == (DELTA, 2.0, "floor")
    assert epsilon(floor, DELTA) <= found["epsilon"] < epsilon(floor, DELTA) + 1e-4
    assert floor_ledger.epsilon_spent() <= found["epsilon_spent"] <= found["epsilon"]
    assert found["cross_checks"] == {"rdp": rounded_up(epsilon(floor, DELTA, "rdp"), 4)}
    assert found["accountant"].startswith("dp_accounting 0.6")
    assert found["rounds"] == {"committed": 6, "charged": 5, "released": 4}
    assert found["sampling"] == {"histogram": "all 1,000 clients", "round": "Poisson with rate 0.1 from 1,000 clients"}
    assert found["noise_multipliers"] == [charge.noise_multiplier for charge in floor_ledger.charges]
    assert [(row["label"], row["count"], row["last_round"]) for row in found["releases"]] == [
        ("histogram", 1, 0),
        ("round", 4, 3),
    ]
    assert found["releases"][1]["components"][1] == {"name": "bit", "sensitivity": 1.0, "noise_std": 10.0, "dim": 3}
    assert found["covered"] == ["histogram: votes (1 charged)", "round: update, bit (4 charged)"]
    assert found["not_covered"] == list(NOT_COVERED)
    assert found["ledger"] == {"run_id": "run-1", "head": floor_ledger.head}
    pairs = {point["delta"]: point["epsilon"] for point in found["curve"]}
    assert pairs[DELTA] == pytest.approx(found["epsilon"], rel=2e-3)
    assert list(pairs.values()) == sorted(pairs.values(), reverse=True)


def test_the_sentence_is_plain_and_rounded_up(floor_ledger: Ledger) -> None:
    found = privacy_statement(floor_ledger)
    assert found["sentence"] == (
        "With respect to adding or removing one client of a population of 1,000, everything this run releases is "
        f"differentially private with epsilon at most {rounded_up(found['epsilon'], 2):.2f} at delta 1e-5, against "
        "anyone but the trusted server; other runs on the same data are not included and add to it."
    )
    replaced = sentence({**found, "adjacency": "replace_one", "unit": "group:household", "trust_model": "secure sums"})
    assert "replacing any one household of" in replaced
    assert "against anyone;" in replaced


def test_a_filter_run_reports_its_filter_and_nothing_else(tmp_path: Path) -> None:
    commitment, even = filter_commitment(4.0, DELTA, SAMPLING, 10)
    ledger = Ledger.create(tmp_path / "ledger.jsonl", commitment)
    for t in range(3):
        ledger.note_release(ledger.charge(event("round", SAMPLING, t, update=even + t)))
    found = privacy_statement(ledger)
    assert found["epsilon"] == 4.0
    assert found["cross_checks"] == {}, "the loss distribution of the realised path is no bound"
    assert found["epsilon_spent"] == rounded_up(ledger.epsilon_spent(), 4)
    assert f"order {commitment.order}" in found["accountant"]
    assert found["rounds"] == {"charged": 3, "released": 3}
    assert {point["delta"]: point["epsilon"] for point in found["curve"]}[DELTA] == 4.0


def test_what_a_cross_check_cannot_account_is_said(tmp_path: Path) -> None:
    step = FloorStep("round", Poisson(0.1, N), 5.0, 3)
    ledger = Ledger.create(tmp_path / "ledger.jsonl", Commitment("client", "replace_one", N, 2.0, DELTA, floor=(step,)))
    found = privacy_statement(ledger)
    assert "has no bound for Poisson" in found["cross_checks"]["rdp"]
    assert found["accountant"].endswith("(PLD)")
    assert found["sampling"]["round"] == "Poisson with rate 0.1 from 1,000 clients"
    assert "replacing any one client" in found["sentence"]


def test_a_delta_below_the_reach_of_pld_is_stated_by_rdp(tmp_path: Path) -> None:
    step = FloorStep("round", Poisson(1.0, N), 20.0, 2)
    commitment = Commitment("client", "add_remove", N, 2.0, 1e-14, floor=(step,))
    found = privacy_statement(Ledger.create(tmp_path / "ledger.jsonl", commitment))
    assert found["accountant"].endswith("(RDP)")
    assert found["epsilon"] == rounded_up(epsilon([step], 1e-14, "rdp"), 4)
    assert found["sampling"] == {"round": "all 1,000 clients"}


def test_a_run_that_is_not_private_states_no_epsilon(floor_ledger: Ledger) -> None:
    floor_ledger.stamp_not_private("InsecureZeroNoise in place of noise that protects")
    found = privacy_statement(floor_ledger)
    assert found["private"] is False
    assert not [key for key in found if "epsilon" in key or key in ("curve", "accountant", "cross_checks")]
    assert found["sentence"] == "This run is NOT PRIVATE: InsecureZeroNoise in place of noise that protects."


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (3.99991, 4, 4.0),
        (3.9999, 4, 3.9999),
        (1.23451, 2, 1.24),
        (0.0, 4, 0.0),
        (1e-9, 2, 0.01),
        (math.inf, 2, math.inf),
    ],
)
def test_epsilon_is_rounded_up(value: float, digits: int, expected: float) -> None:
    assert rounded_up(value, digits) == expected


def test_delta_must_protect() -> None:
    check_delta(1e-5, 1000)
    with pytest.raises(ValueError, match=r"delta .*0\.001, got 0\.001; .*5\.0e-04"):
        check_delta(1e-3, 1000)
    with pytest.raises(ValueError, match="delta must be > 0"):
        check_delta(0.0, 1000)
    with pytest.raises(ValueError, match="population must be an integer"):
        check_delta(1e-5, 0)
    with pytest.warns(UserWarning, match="smaller is the custom"):
        check_delta(9e-4, 1000)


def test_nodes_with_many_clients_are_trusted_with_their_own(floor_ledger: Ledger) -> None:
    nodes = {"clients": [300, 700], "one_node_moves_a_mean_by": 2.31}
    found = privacy_statement(floor_ledger, nodes=nodes)
    assert found["nodes"] == nodes
    assert "but the trusted server and the node that holds the client's records;" in found["sentence"]
    assert "draws its part of every cohort with a secret that it tells nobody" in found["trust_model"]
    (one, _) = [text for text in found["not_covered"] if text not in NOT_COVERED]
    assert "moves a mean by up to 2.31 clipping bounds" in one
    assert "takes nothing from the guarantee of other nodes' clients" in one
    assert found["epsilon"] == privacy_statement(floor_ledger)["epsilon"]


def test_sampled_records_are_said_wherever_the_unit_is(tmp_path: Path) -> None:
    sampling = ExampleLevelPoisson(0.02, N, "group:patient", 4, 2500)
    floor = (FloorStep("round", sampling, 2.5, 5),)
    with Ledger.create(
        tmp_path / "ledger.jsonl", Commitment("group:patient", "add_remove", N, 4.0, DELTA, floor=floor)
    ) as ledger:
        ledger.charge(event("round", sampling, update=2.5))
        found = privacy_statement(ledger)
    assert (found["unit"], found["population"]) == ("group:patient", N)
    assert "adding or removing one patient of a population of 1,000" in found["sentence"]
    assert found["sampling"] == {
        "round": "Poisson with rate 0.02 from 2,500 records of 1,000 patients, at most 4 of each"
    }
    assert "of one patient at most 4" in found["mechanism"]
    assert any(
        line.startswith("the number of records that are sampled, at most 4 of one patient")
        for line in found["not_covered"]
    )
    assert found["releases"][0]["sampling"]["kind"] == "example-level-poisson"
    assert found["epsilon"] == rounded_up(epsilon(floor, DELTA), 4)
    assert "cannot account sampling of records" in found["cross_checks"]["rdp"]
    assert any(point["delta"] == DELTA and point["epsilon"] <= found["epsilon"] for point in found["curve"])
