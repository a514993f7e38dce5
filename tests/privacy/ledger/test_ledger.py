"""The ledger keeps its commitment: floor and filter refuse in time, replay equals memory, forgeries are named."""

import hashlib
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.accountants import renyi
from privacy.accountants.calibration import filter_commitment
from privacy.accountants.composition import epsilon
from privacy.commitment import Commitment, FloorStep
from privacy.errors import BudgetExceeded, CorruptRun, UnsupportedEvent
from privacy.events import Component, ExampleLevelPoisson, Poisson, ReleaseEvent
from privacy.ledger.budget import FilterBudget, FloorBudget, FloorOdometer, budget_of
from privacy.ledger.journal import canonical
from privacy.ledger.ledger import Ledger, Receipt

N, DELTA = 1000, 1e-5
SAMPLING = Poisson(0.1, N)
EVERYONE = Poisson(1.0, N)


def event(z: float, label: str = "round", round: int = 0, sampling: Poisson = SAMPLING) -> ReleaseEvent:
    return ReleaseEvent(label, round, sampling, (Component("update", 1.0, z, 10),))


def floor(*steps: FloorStep, target: float = 4.0, adjacency: str = "add_remove", **other: object) -> Commitment:
    return Commitment("client", adjacency, N, target, DELTA, floor=steps, **other)  # type: ignore[arg-type]


RUN = floor(FloorStep("histogram", EVERYONE, 10.0), FloorStep("round", SAMPLING, 2.0, 5))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def spend(ledger: Ledger, *events: ReleaseEvent) -> None:
    for one in events:
        ledger.note_release(ledger.charge(one))


# -- floor mode ------------------------------------------------------------------------------------------------------


def test_a_floor_run_to_its_end(path: Path) -> None:
    ledger = Ledger.create(path, RUN)
    assert ledger.epsilon_spent() == 0.0
    spent = []
    for one in (event(10.0, "histogram", sampling=EVERYONE), *(event(2.0, round=t) for t in range(5))):
        assert ledger.would_exceed(one) is None
        spend(ledger, one)
        spent.append(ledger.epsilon_spent())
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(epsilon(RUN.floor, DELTA), rel=1e-6)
    assert spent[-1] <= ledger.epsilon_guaranteed() <= RUN.epsilon
    assert spent[2] == pytest.approx(epsilon([(EVERYONE, 10.0, 1), (SAMPLING, 2.0, 2)], DELTA), rel=2e-3)
    before = path.read_bytes()
    assert "are used" in str(ledger.would_exceed(event(2.0)))
    with pytest.raises(BudgetExceeded, match="'round' are used"):
        ledger.charge(event(2.0))
    assert path.read_bytes() == before, "a refusal writes nothing"


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (event(1.99), "below the committed floor 2"),
        (event(5.0, "encore"), "labelled 'encore' are used"),
        (event(2.0, sampling=Poisson(0.11, N)), "more than the committed"),
        (event(2.0, sampling=Poisson(0.1, N, "record")), "charge it to the ledger of that unit"),
        (event(2.0, sampling=Poisson(0.1, N - 1)), "protects 1000 of unit 'client'"),
    ],
)
def test_what_the_floor_does_not_dominate_is_refused(path: Path, refused: ReleaseEvent, reason: str) -> None:
    ledger = Ledger.create(path, RUN)
    assert reason in str(ledger.would_exceed(refused))
    with pytest.raises(BudgetExceeded, match=reason):
        ledger.charge(refused)
    assert ledger.events == ()


def test_more_noise_and_smaller_rates_are_dominated(path: Path) -> None:
    ledger = Ledger.create(path, RUN)
    spend(ledger, event(7.0, sampling=Poisson(0.02, N)), event(2.0 * (1 - 1e-10)))
    assert ledger.steps_left("round") == 3
    assert ledger.epsilon_spent() == pytest.approx(epsilon([(SAMPLING, 2.0, 2)], DELTA), rel=2e-3), (
        "noise is not re-spent"
    )


RECORDS = ExampleLevelPoisson(0.02, N, "client", 4, 2500)


@pytest.mark.parametrize(
    ("sampling", "z", "reason"),
    [
        (Poisson(0.02, N), 2.5, "not ExampleLevelPoisson"),
        (replace(RECORDS, records_per_unit=5), 2.5, "as committed"),
        (replace(RECORDS, records=2400), 2.5, "as committed"),
        (replace(RECORDS, rate=0.021), 2.5, "more than the committed"),
        (RECORDS, 2.4, "below the committed floor"),
    ],
)
def test_a_floor_of_sampled_records_pays_for_nothing_else(path: Path, sampling: Poisson, z: float, reason: str) -> None:
    ledger = Ledger.create(path, floor(FloorStep("round", RECORDS, 2.5, 5)))
    with pytest.raises(BudgetExceeded, match=reason):
        ledger.charge(event(z, sampling=sampling))
    for t in range(5):
        spend(ledger, event(2.5, round=t, sampling=RECORDS))
    assert ledger.epsilon_spent() == pytest.approx(epsilon([(RECORDS, 2.5, 5)], DELTA), rel=1e-9)
    assert epsilon([(Poisson(0.02, N), 2.5, 5)], DELTA) < 0.5 * ledger.epsilon_spent()
    ledger.close()
    with Ledger.open(path, read_only=True) as again:
        assert again.events[0].sampling == RECORDS
        assert again.epsilon_spent() == ledger.epsilon_spent()


def test_a_floor_of_units_does_not_pay_for_sampled_records(path: Path) -> None:
    ledger = Ledger.create(path, floor(FloorStep("round", Poisson(0.02, N), 2.5, 5)))
    with pytest.raises(BudgetExceeded, match="as committed"):
        ledger.charge(event(2.5, sampling=RECORDS))


def test_a_filter_accounts_no_sampled_records(path: Path) -> None:
    commitment, z = filter_commitment(4.0, DELTA, SAMPLING, 5)
    with Ledger.create(path, commitment) as ledger, pytest.raises(UnsupportedEvent, match="floor instead of a filter"):
        ledger.charge(event(z, sampling=RECORDS))
    assert not ledger.charges


def test_joint_components_count_together(path: Path) -> None:
    parts = (Component("update", 1.0, 2.0, 10), Component("bit", 0.5, 5.0, 1))
    ledger = Ledger.create(path, RUN)
    assert "1.96116" in str(ledger.would_exceed(ReleaseEvent("round", 0, SAMPLING, parts)))


def test_steps_of_a_label_are_consumed_in_order(path: Path) -> None:
    ledger = Ledger.create(path, floor(FloorStep("round", SAMPLING, 5.0), FloorStep("round", SAMPLING, 2.0, 2)))
    assert "below the committed floor 5" in str(ledger.would_exceed(event(2.0)))
    spend(ledger, event(5.0), event(2.0), event(2.0))
    assert [charge.step for charge in ledger.charges] == [0, 1, 1]


def test_labels_may_interleave(path: Path) -> None:
    ledger = Ledger.create(path, RUN)
    spend(ledger, event(2.0), event(10.0, "histogram", sampling=EVERYONE), event(2.0))
    assert ledger.epsilon_spent() == pytest.approx(epsilon([(EVERYONE, 10.0, 1), (SAMPLING, 2.0, 2)], DELTA), rel=2e-3)


def test_a_floor_that_costs_too_much_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"epsilon .*committed 4"):
        Ledger.create(path, floor(FloorStep("round", SAMPLING, 1.0, 200)))
    assert not path.exists()


def test_a_tiny_delta_is_accounted_by_rdp(path: Path) -> None:
    commitment = Commitment("client", "add_remove", N, 9.0, 1e-14, floor=(FloorStep("round", SAMPLING, 2.0, 5),))
    ledger = Ledger.create(path, commitment)
    spend(ledger, event(2.0))
    assert ledger.epsilon_spent() == pytest.approx(epsilon([(SAMPLING, 2.0, 1)], 1e-14, "rdp"))


steps = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0.05, 0.1]), st.floats(1.0, 6.0), st.integers(1, 3)),
    min_size=1,
    max_size=3,
)


@pytest.mark.run
@settings(derandomize=True, max_examples=8, deadline=None)
@given(steps, st.data())
def test_whatever_is_accepted_costs_at_most_the_floor(
    made: list[tuple[str, float, float, int]], data: st.DataObject
) -> None:
    """A controller that tries what it likes, in any order: the releases it got cost no more than the commitment."""
    committed = tuple(FloorStep(label, Poisson(rate, N), z, count) for label, rate, z, count in made)
    budget = budget_of(Commitment("client", "add_remove", N, 100.0, DELTA, floor=committed))
    accepted = []
    for _ in range(12):
        label, rate = data.draw(st.sampled_from(["a", "b"])), data.draw(st.sampled_from([0.02, 0.05, 0.1]))
        tried = event(data.draw(st.floats(0.5, 8.0)), label, sampling=Poisson(rate, N))
        try:
            budget.take(budget.price(tried))
        except BudgetExceeded:
            continue
        accepted.append(tried)
    if accepted:
        true = epsilon(accepted, DELTA, interval=1e-3)
        assert true <= budget.epsilon_spent() * (1 + 2e-3) + 1e-6
        assert budget.epsilon_spent() <= budget.worst_case()


# -- filter mode -----------------------------------------------------------------------------------------------------


def test_a_filter_run_stops_in_time(path: Path) -> None:
    commitment, even = filter_commitment(4.0, DELTA, SAMPLING, 20)
    ledger = Ledger.create(path, commitment)
    spend(ledger, *(event(even, round=t) for t in range(20)))
    assert ledger.epsilon_spent() <= 4.0 <= ledger.epsilon_spent() + 0.01
    assert ledger.epsilon_guaranteed() == pytest.approx(4.0, rel=1e-9)
    assert "add noise or stop" in str(ledger.would_exceed(event(even)))
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match="exceeds the"):
        ledger.charge(event(even))
    assert path.read_bytes() == before
    assert ledger.steps_left("round") == 0


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.4, 8.0), st.floats(0.01, 1.0)), min_size=1, max_size=60))
def test_t7_no_controller_gets_past_the_filter(tried: list[tuple[float, float]]) -> None:
    """Random noise and rates, chosen as badly as hypothesis can: the divergences taken never exceed the budget."""
    commitment, _ = filter_commitment(4.0, DELTA, SAMPLING, 20)
    budget = budget_of(commitment)
    assert isinstance(budget, FilterBudget)
    assert commitment.order is not None
    assert commitment.rho is not None
    true = 0.0
    for z, rate in tried:
        one = event(z, sampling=Poisson(rate, N))
        rho = renyi.subsampled_gaussian_rdp(rate, z, commitment.order)
        try:
            budget.take(budget.price(one))
        except BudgetExceeded:
            assert true + rho > commitment.rho * (1 - 1e-6), "nothing affordable is refused"
        else:
            true += rho
        assert true <= budget.rho_spent <= commitment.rho
        assert renyi.epsilon_of(true, commitment.order, DELTA) <= 4.0 + 1e-9


def test_a_filter_pays_for_exactly_what_it_holds_and_by_its_own_adjacency() -> None:
    """A filter of one release of everybody, priced as a replaced unit costs: four times one that is added."""
    everybody = Poisson(1.0, N)
    added, replaced = (renyi.rho_of(everybody, 2.0, 6, adjacency) for adjacency in ("add_remove", "replace_one"))
    assert replaced == pytest.approx(4 * added)
    budget = budget_of(Commitment("client", "replace_one", N, 100.0, DELTA, "filter", order=6, rho=replaced))
    budget.take(budget.price(event(2.0, sampling=everybody)))
    assert isinstance(budget, FilterBudget)
    assert budget.rho_spent == replaced
    with pytest.raises(BudgetExceeded, match="exceeds the 0 left"):
        budget.price(event(50.0, sampling=everybody))


def test_every_charge_of_one_release_is_an_attempt_of_its_own(path: Path) -> None:
    with Ledger.create(path, floor(FloorStep("round", SAMPLING, 1.0, 5))) as ledger:
        for attempt in range(4):
            assert ledger.attempts("round", 7) == attempt
            ledger.charge(event(1.0, round=7))
        assert ledger.attempts("round", 8) == 0
    with Ledger.open(path, read_only=True) as ledger:
        assert ledger.attempts("round", 7) == 4


def test_a_filter_refuses_no_noise_at_all(path: Path) -> None:
    commitment, _ = filter_commitment(4.0, DELTA, SAMPLING, 20)
    ledger = Ledger.create(path, commitment)
    assert ledger.would_exceed(event(0.0)) is not None


def test_a_filter_that_converts_to_more_than_promised_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="more than the committed 4"):
        Ledger.create(path, Commitment("client", "add_remove", N, 4.0, DELTA, "filter", order=6, rho=2.3))


def test_a_stated_epsilon_is_kept_to_the_last_bit_by_a_floor_and_up_to_rounding_by_a_filter(tmp_path: Path) -> None:
    """A filter's rho is computed from epsilon, and epsilon again from rho."""
    exact = budget_of(RUN).worst_case()
    Ledger.create(tmp_path / "exact.jsonl", replace(RUN, epsilon=exact)).close()
    with pytest.raises(ValueError, match="more than the committed"):
        Ledger.create(tmp_path / "floor.jsonl", replace(RUN, epsilon=exact * (1 - 5e-13)))
    commitment, _ = filter_commitment(4.0, DELTA, SAMPLING, 20)
    cost = budget_of(commitment).worst_case()
    Ledger.create(tmp_path / "filter.jsonl", replace(commitment, epsilon=cost * (1 - 5e-13))).close()
    with pytest.raises(ValueError, match="more than the committed"):
        Ledger.create(tmp_path / "more.jsonl", replace(commitment, epsilon=cost * (1 - 5e-12)))


def test_a_floor_is_priced_by_its_own_adjacency(path: Path) -> None:
    step = FloorStep("round", EVERYONE, 10.0, 5)
    with Ledger.create(path, floor(step, adjacency="replace_one")) as ledger:
        added, replaced = (epsilon([step], DELTA, adjacency=one) for one in ("add_remove", "replace_one"))
        assert ledger.epsilon_guaranteed() == replaced > 1.9 * added


def test_a_ledger_in_use_can_be_read(path: Path) -> None:
    with Ledger.create(path, RUN) as ledger:
        ledger.charge(event(2.0))
        with Ledger.open(path, read_only=True) as seen:
            assert seen.events == ledger.events


# -- durability, replay, forgeries -----------------------------------------------------------------------------------


def test_replay_equals_memory(path: Path) -> None:
    ledger = Ledger.create(path, RUN, run_id="run-7")
    spend(ledger, event(10.0, "histogram", sampling=EVERYONE), event(2.0), event(3.0, round=1))
    ledger.charge(event(2.5, round=2))
    ledger.stamp_not_private("a test double made the noise")
    memory = (ledger.charges, ledger.events, ledger.not_private, ledger.head, ledger.steps_left("round"))
    head = ledger.head
    ledger.close()
    with Ledger.open(path, head) as again:
        found = (again.charges, again.events, again.not_private, again.head, again.steps_left("round"))
        assert found == memory
        assert again.commitment == RUN
        assert again.run_id == "run-7"
        assert [charge.released_at is None for charge in again.charges] == [False, False, False, True]
        spend(again, event(2.0, round=3))


def test_what_another_process_charged_is_spent_in_this_one(path: Path) -> None:
    """As after a restart: nothing of the ledger is remembered but what its file says."""
    child = f"""
from pathlib import Path
from tests.privacy.ledger.test_ledger import RUN, Ledger, event, spend
with Ledger.create(Path({str(path)!r}), RUN) as ledger:
    spend(ledger, event(2.0), event(2.0, round=1))
    ledger.charge(event(2.0, round=2))
    ledger.stamp_not_private("a test double made the noise")
"""
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", child], cwd=root, check=True, env={**os.environ, "PYTHONPATH": str(root)})
    with Ledger.open(path) as ledger:
        assert [one.round for one in ledger.events] == [0, 1, 2]
        assert [charge.released_at is None for charge in ledger.charges] == [False, False, True]
        assert (ledger.steps_left("round"), ledger.attempts("round", 2)) == (2, 1)
        assert ledger.not_private == "a test double made the noise"


def test_a_charge_tells_its_price_and_its_day(path: Path) -> None:
    begun = datetime.now(UTC).date()
    commitment, even = filter_commitment(4.0, DELTA, SAMPLING, 20)
    with Ledger.create(path, commitment) as ledger:
        ledger.charge(event(even))
        (charge,) = ledger.charges
        assert charge.rho == ledger.rho_spent > 0.0
        assert begun <= date.fromisoformat(charge.debited_at) <= datetime.now(UTC).date()


def test_a_torn_line_is_noted_and_the_ledger_goes_on(path: Path) -> None:
    with Ledger.create(path, RUN) as ledger:
        ledger.charge(event(2.0))
    with path.open("ab") as file:
        file.write(b'{"kind": "charge", "bo')
    with Ledger.open(path) as ledger:  # which notes it in a line of its own
        ledger.charge(event(2.0, round=1))
    assert b'"torn"' in path.read_bytes()
    with Ledger.open(path) as ledger:
        assert len(ledger.charges) == 2


def test_replay_equals_memory_in_filter_mode(path: Path) -> None:
    commitment, even = filter_commitment(4.0, DELTA, SAMPLING, 20)
    ledger = Ledger.create(path, commitment)
    spend(ledger, event(even), event(2 * even), event(3 * even))
    memory = (ledger.rho_spent, ledger.epsilon_spent(), ledger.charges)
    ledger.close()
    again = Ledger.open(path)
    assert (again.rho_spent, again.epsilon_spent(), again.charges) == memory
    assert again.commitment == commitment


def test_a_charge_without_release_stays_spent(path: Path) -> None:
    ledger = Ledger.create(path, RUN)
    ledger.charge(event(2.0))
    spent = ledger.epsilon_spent()
    ledger.close()
    again = Ledger.open(path)
    assert again.epsilon_spent() == pytest.approx(spent)
    assert again.steps_left("round") == 4


def test_a_failing_disk_counts_as_spent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.create(path, RUN)

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            ledger.charge(event(2.0))
    with pytest.raises(RuntimeError, match="failed to write before"):
        ledger.charge(event(2.0))
    ledger.close()
    assert Ledger.open(path).steps_left("round") == 4


def test_receipts_work_once_and_at_home(path: Path, tmp_path: Path) -> None:
    ledger = Ledger.create(path, RUN)
    receipt = ledger.charge(event(2.0))
    ledger.note_release(receipt)
    with pytest.raises(ValueError, match="released already"):
        ledger.note_release(receipt)
    for foreign in (Receipt(1, event(2.0)), Receipt(-1, event(2.0)), Receipt(0, event(2.1))):
        with pytest.raises(ValueError, match="is not of"):
            ledger.note_release(foreign)


def test_stamps_are_durable_and_final(path: Path) -> None:
    ledger = Ledger.create(path, RUN)
    ledger.stamp_not_private("no noise")
    ledger.stamp_not_private("no noise")
    ledger.stamp_not_private("known cohorts")
    with pytest.raises(ValueError, match="reason must not be empty"):
        ledger.stamp_not_private("")
    assert (ledger.epsilon_spent(), ledger.epsilon_guaranteed()) == (math.inf, math.inf)
    ledger.close()
    assert Ledger.open(path).not_private == "no noise; known cohorts"
    assert path.read_text().count("no noise") == 1


def test_a_run_without_noise_is_committed_as_such(path: Path) -> None:
    baseline = floor(FloorStep("round", SAMPLING, 0.0, 2), target=math.inf, not_private="a baseline without noise")
    ledger = Ledger.create(path, baseline)
    spend(ledger, event(0.0), event(1e-6))
    assert ledger.would_exceed(event(0.0)) is not None
    assert (ledger.epsilon_spent(), ledger.not_private) == (math.inf, "a baseline without noise")
    ledger.close()
    assert Ledger.open(path).commitment == baseline


def rewritten(path: Path, change: Callable[[list[dict]], None]) -> None:  # type: ignore[type-arg]
    """A forger who knows the format: change the bodies, then make the chain fit again."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    previous = "0" * 64
    lines = []
    for number, record in enumerate(records, 1):
        record.pop("hash", None)
        record |= {"line": number, "previous": previous}
        previous = hashlib.sha256(canonical(record).encode()).hexdigest()
        lines.append(canonical({**record, "hash": previous}))
    path.write_text("\n".join(lines) + "\n")


def less_noise(records: list[dict]) -> None:  # type: ignore[type-arg]
    records[1]["body"]["event"]["components"][0]["noise_std"] = 0.5


def twice(records: list[dict]) -> None:  # type: ignore[type-arg]
    records.insert(2, records[1])


def other_step(records: list[dict]) -> None:  # type: ignore[type-arg]
    records[1]["body"]["step"] = 0


def early_release(records: list[dict]) -> None:  # type: ignore[type-arg]
    records[1], records[2] = records[2], records[1]


def second_release(records: list[dict]) -> None:  # type: ignore[type-arg]
    records.append(records[2])


def gibberish(records: list[dict]) -> None:  # type: ignore[type-arg]
    records[1]["body"] = {"charge": "many"}


def unknown_kind(records: list[dict]) -> None:  # type: ignore[type-arg]
    records[2]["kind"] = "refund"


@pytest.mark.parametrize(
    ("forgery", "line"),
    [
        (less_noise, 2),
        (twice, 3),
        (other_step, 2),
        (early_release, 2),
        (second_release, 4),
        (gibberish, 2),
        (unknown_kind, 3),
    ],
)
def test_a_chain_that_fits_but_breaks_the_rules_is_named(
    path: Path,
    forgery: Callable[[list[dict[str, object]]], None],
    line: int,
) -> None:
    ledger = Ledger.create(path, RUN)
    spend(ledger, event(2.0))
    head = ledger.head
    ledger.close()
    rewritten(path, forgery)
    with pytest.raises(CorruptRun, match=rf"line {line} is not allowed here"):
        Ledger.open(path)
    with pytest.raises(CorruptRun):
        Ledger.open(path, head)


@pytest.mark.parametrize(("factor", "line"), [(0.9, 2), (1.1, 2), (1 + 1e-7, 2), (None, 2), (1 + 1e-12, None)])
def test_another_rho_than_is_due_is_named(path: Path, factor: float | None, line: int | None) -> None:
    """Up to a rounding that another machine may do otherwise."""
    commitment, even = filter_commitment(4.0, DELTA, SAMPLING, 20)
    with Ledger.create(path, commitment) as ledger:
        spend(ledger, event(even))

    def restated(records: list[dict]) -> None:  # type: ignore[type-arg]
        body = records[1]["body"]
        body["rho"] = None if factor is None else body["rho"] * factor

    rewritten(path, restated)
    if line is None:
        Ledger.open(path, read_only=True).close()
    else:
        with pytest.raises(CorruptRun, match=r"line 2 .*charge 0"):
            Ledger.open(path)


def test_a_charge_is_written_with_all_that_a_reader_needs(path: Path) -> None:
    with Ledger.create(path, RUN) as ledger:
        spend(ledger, event(2.0))
    body = json.loads(path.read_text().splitlines()[1])["body"]
    assert body.keys() == {"charge", "event", "noise_multiplier", "step", "rho", "debited_at"}
    assert (body["charge"], body["noise_multiplier"], body["step"], body["rho"]) == (0, 2.0, 1, None)
    assert date.fromisoformat(body["debited_at"]).isoformat() == body["debited_at"], "a ledger has no time of day"


def test_an_odometer_that_is_asked_about_less_starts_again() -> None:
    steps = (FloorStep("histogram", EVERYONE, 10.0), FloorStep("round", SAMPLING, 2.0, 5))
    asked = FloorOdometer(steps, DELTA, "add_remove")
    for used in ([1, 5], [0, 3], [1, 0], [1, 5], [0, 0]):
        assert asked.epsilon(used) == pytest.approx(FloorOdometer(steps, DELTA, "add_remove").epsilon(used), rel=1e-6)
    assert asked.epsilon([1, 5]) == asked.total > asked.epsilon([1, 4]) > asked.epsilon([0, 4]) > 0


@pytest.mark.parametrize("content", ["", '{"line":1}\n', "not json\n"])
def test_a_file_without_commitment_is_no_ledger(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(CorruptRun, match="line 1"):
        Ledger.open(path)


def test_a_commitment_that_is_none_is_named(path: Path) -> None:
    with Ledger.create(path, RUN):
        pass

    def endless(records: list[dict]) -> None:  # type: ignore[type-arg]
        records[0]["body"]["commitment"]["delta"] = 2.0

    rewritten(path, endless)
    with pytest.raises(CorruptRun, match="line 1 holds no valid commitment"):
        Ledger.open(path)


# -- commitments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: floor(), "at least one FloorStep"),
        (lambda: floor(FloorStep("round", SAMPLING, 0.2)), r"noise_multiplier of floor step 'round' must be >= 0\.3"),
        (lambda: floor(FloorStep("round", Poisson(0.1, N, "record"), 2.0)), "keep one ledger per unit"),
        (lambda: floor(FloorStep("round", Poisson(0.1, 10), 2.0)), "keep one ledger per unit"),
        (lambda: floor(FloorStep("round", SAMPLING, 2.0), target=0.0), "epsilon must be > 0"),
        (lambda: floor(FloorStep("round", SAMPLING, 2.0), target=math.inf), "epsilon must be > 0 and finite"),
        (lambda: floor(FloorStep("round", SAMPLING, 2.0), not_private=""), "say why"),
        (lambda: floor(FloorStep("round", SAMPLING, 2.0), order=3), "neither order nor rho"),
        (lambda: FloorStep("round", SAMPLING, -1.0), "noise_multiplier must be >= 0"),
        (lambda: FloorStep("round", SAMPLING, 1.0, 0), "count must be an integer >= 1"),
        (lambda: FloorStep("", SAMPLING, 1.0), "label must not be empty"),
        (lambda: Commitment("client", "swap", N, 4.0, DELTA), "adjacency must be one of"),
        (lambda: Commitment("client", "add_remove", N, 4.0, DELTA, "odometer"), "mode must be one of"),
        (lambda: Commitment("client", "add_remove", N, 4.0, DELTA, "filter", order=6), "needs order and rho"),
        (lambda: Commitment("client", "add_remove", N, 4.0, DELTA, "filter", order=1, rho=1.0), "order must be an int"),
        (lambda: Commitment("client", "add_remove", N, 4.0, DELTA, "filter", order=6, rho=0.0), "rho must be > 0"),
        (lambda: Commitment("client", "add_remove", N, 4.0, 1e-3, floor=RUN.floor), "delta must be < 1/population"),
    ],
)
def test_impossible_commitments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_least_order_of_a_filter_is_two() -> None:
    assert Commitment("client", "add_remove", N, 30.0, DELTA, "filter", order=2, rho=1.0).order == 2


def test_a_generous_delta_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"delta = 0\.0006 is above population\^-1\.1"):
        Commitment("client", "add_remove", N, 4.0, 6e-4, floor=RUN.floor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Commitment("client", "add_remove", N, 4.0, 5e-4, floor=RUN.floor)


def test_modes_have_their_budgets() -> None:
    assert isinstance(budget_of(RUN), FloorBudget)
    assert isinstance(budget_of(filter_commitment(4.0, DELTA, SAMPLING, 20)[0]), FilterBudget)
