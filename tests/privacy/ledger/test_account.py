"""The account of a data set: adaptive runs stay within its lifetime, and no crash, copy or rollback spends it twice."""

import itertools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.signal import correlate
from scipy.stats import norm

from privacy.accountants import composition, renyi
from privacy.accountants.calibration import filter_commitment, floor_commitment
from privacy.commitment import POISSON, Commitment, FloorStep, Tries, Tuning
from privacy.errors import AccountRefused, BudgetExceeded, CorruptRun
from privacy.events import Banded, Component, CyclicPoisson, ExampleLevelPoisson, Poisson, ReleaseEvent
from privacy.ledger import account as ledger_account
from privacy.ledger.account import Account
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms, best_order, divergence, used_divergence
from privacy.ledger.place import At, Place

EPSILON, DELTA = 4.0, 1e-5
COHORT = Poisson(0.05, 1000)
TERMS = Terms("notes", "client", EPSILON, DELTA, order=best_order(EPSILON, DELTA))
SUMS = Terms("notes", "client", 8.0, 5 * DELTA, rule="sum")


def run_of(z: float, rounds: int = 20, sampling: Poisson = COHORT, delta: float = DELTA) -> Commitment:
    floor = (FloorStep("round", sampling, z, rounds),)
    epsilon = composition.epsilon(floor, delta)
    return Commitment(sampling.unit, "add_remove", sampling.population, epsilon * 1.0001, delta, floor=floor)


MODEST = run_of(1.5)


@pytest.fixture
def here(tmp_path: Path) -> At:
    """The file of an account, and this machine's place."""
    at = At(tmp_path / "notes" / "account.jsonl", tmp_path / "place")
    Account.create(at.file, TERMS, at.place).close()
    return at


def test_a_debit_is_once_a_run_and_stays(here: At) -> None:
    with Account.open(*here) as account:
        assert account.spent == (0.0, 0.0)
        assert account.debit("a", MODEST, "runs/a")
        assert not account.debit("a", MODEST, "runs/a")
    with Account.open(*here) as account:
        assert not account.debit("a", MODEST, "runs/a", spent=True)
        assert account.debit("b", MODEST, "runs/a")  # a new run in a folder of the same name
        assert [debit.rho for debit in account.debits.values()] == [divergence(MODEST, TERMS.order or 0)] * 2
        assert account.spent[0] == pytest.approx(
            renyi.epsilon_of(2 * divergence(MODEST, TERMS.order or 0), TERMS.order or 0, DELTA)
        )


def test_files_are_their_owner_s(here: At) -> None:
    file, place, _ = here
    assert {oct(path.stat().st_mode & 0o777) for path in (file.parent, place)} == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in (file, *place.iterdir())} == {"0o600"}


def test_another_commitment_under_a_debited_run_is_refused(here: At) -> None:
    with Account.open(*here) as account:
        account.debit("a", MODEST, "runs/a")
        with pytest.raises(CorruptRun, match="was debited for another commitment of runs/a"):
            account.debit("a", run_of(1.6), "runs/a")


def test_a_month_has_a_limit_of_its_own(here: At, monkeypatch: pytest.MonkeyPatch) -> None:
    with Account.open(*here._replace(per_month=1.5 * MODEST.epsilon)) as account:
        monkeypatch.setattr(ledger_account, "_today", lambda: "2026-01-31")
        account.debit("a", MODEST, "runs/a")
        with pytest.raises(AccountRefused, match=r"allows epsilon .* a month, of which .* is spent; .* or next month"):
            account.debit("b", MODEST, "runs/b")
        monkeypatch.setattr(ledger_account, "_today", lambda: "2026-02-01")
        account.debit("b", MODEST, "runs/b")


def test_a_run_that_has_spent_without_a_debit_is_refused(here: At) -> None:
    with Account.open(*here) as account, pytest.raises(CorruptRun, match="has no debit of runs/a, which has spent"):
        account.debit("a", MODEST, "runs/a", spent=True)


# Rolled back, copied, handed over


def test_an_older_copy_is_refused(here: At, tmp_path: Path) -> None:
    file = here.file
    old = shutil.copy(file, tmp_path / "old.jsonl")
    with Account.open(*here) as account:
        account.debit("a", MODEST, "runs/a")
        head = account.head
    shutil.copy(old, file)
    with pytest.raises(CorruptRun, match="rolled back"):
        Account.open(*here)
    with pytest.raises(CorruptRun, match="rolled back"):
        Account.open(file, tmp_path / "elsewhere", head=head, read_only=True)


def test_two_copies_that_grew_apart_are_refused(here: At, tmp_path: Path) -> None:
    file, place, _ = here
    twin = Path(shutil.copy(file, tmp_path / "twin.jsonl"))
    with Account.open(*here) as account:
        account.debit("a", MODEST, "runs/a")
    with pytest.raises(CorruptRun, match="rolled back"):
        Account.open(twin, place)


def test_two_machines_with_one_account_are_refused(here: At, tmp_path: Path) -> None:
    file = here.file
    other = tmp_path / "other-machine"
    with pytest.raises(AccountRefused, match="is held by another machine"):
        Account.open(file, other)
    copy = Path(shutil.copy(file, tmp_path / "copy.jsonl"))
    with Account.open(*here) as account:
        account.debit("a", MODEST, "runs/a")
        account.move(Place(other).seat())
    with pytest.raises(AccountRefused, match="is held by another machine"):
        Account.open(*here)
    with pytest.raises(AccountRefused, match="is held by another machine"):
        Account.open(copy, other)
    shutil.copy(file, copy)
    with Account.open(copy, other) as account:
        assert not account.debit("a", MODEST, "runs/a")
        account.debit("b", MODEST, "runs/b")
    with pytest.raises(AccountRefused, match="is held by another machine"):
        Account.open(*here)


def test_a_seat_is_asked_for_by_its_name(here: At) -> None:
    with Account.open(*here) as account:
        for seat in ("", "x" * 64, account.seat):
            with pytest.raises(ValueError, match="lacquer account seat"):
                account.move(seat)


# Crashes


def test_a_hundred_kills_lose_and_refund_nothing(tmp_path: Path) -> None:
    """Each kill ends the process before one of its writes: fsync, write, link or rename, one after the other."""
    kills = 0
    for terms, torn in itertools.product((TERMS, SUMS), (False, True)):
        folder = tmp_path / f"{terms.rule}-{torn}"
        file, place = folder / "account.jsonl", folder / "place"
        Account.create(file, terms, place).close()
        for number in range(5):
            run, released = folder / f"run{number}", folder / f"released{number}"
            run.mkdir()
            for moment in itertools.count():
                ended = _forked(partial(_one_run, run, At(file, place), released), moment, torn)
                with Account.open(file, place, read_only=True) as account:
                    debits = dict(account.debits)
                charges = 0
                if (run / "ledger.jsonl").is_file():
                    with Ledger.open(run / "ledger.jsonl", read_only=True) as ledger:
                        charges = len(ledger.charges)
                        if charges:
                            assert ledger.run_id in debits, "charged before it was debited"
                assert charges or not released.exists()
                assert len(debits) in (number, number + 1), "a run was lost, refunded or debited twice"
                if ended:
                    break
                kills += 1
            assert len(debits) == number + 1
    assert kills >= 100


def test_kills_between_closing_and_giving_back_leave_a_run_closed_or_whole(tmp_path: Path) -> None:
    """Nothing is given back of a run whose ledger could still be charged; a second try gives it back."""
    kills = 0
    for torn, moment in itertools.product((False, True), range(40)):
        folder = tmp_path / f"{torn}-{moment}"
        at = At(folder / "account.jsonl", folder / "place")
        Account.create(at.file, TERMS, at.place).close()
        (folder / "run").mkdir()
        _one_run(folder / "run", at, folder / "released")
        ended = _forked(partial(_close, folder / "run", at), moment, torn)
        with Account.open(*at, read_only=True) as account, Ledger.open(folder / "run" / "ledger.jsonl") as ledger:
            (debit,) = account.debits.values()
            assert ledger.is_closed or not debit.closed, "given back, and it could go on"
            assert debit.closed or debit.rho == divergence(MODEST, TERMS.order or 0)
        if ended:
            break
        kills += 1
        _close(folder / "run", at)
        with Account.open(*at, read_only=True) as account:
            (debit,) = account.debits.values()
            assert debit.closed
            assert debit.rho == pytest.approx(divergence(MODEST, TERMS.order or 0) / 20)
    assert kills >= 4


def _close(run: Path, at: At) -> None:
    with Ledger.open(run / "ledger.jsonl") as ledger, Account.open(*at) as account:
        account.give_back(ledger)


def _one_run(run: Path, account: At, released: Path) -> None:
    path = run / "ledger.jsonl"
    found = Ledger.open(path) if path.is_file() else None
    with debited_ledger(found, lambda: Ledger.create(path, MODEST), account, MODEST) as ledger:
        if not ledger.charges:
            receipt = ledger.charge(ReleaseEvent("round", 1, COHORT, (Component("update", 1.0, 1.5, 3),)))
            released.touch()
            ledger.note_release(receipt)


def _forked(work: Callable[[], None], moment: int, torn: bool) -> bool:
    """Do the work in a process that dies before its write of this number; whether it came to its end."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), "the work failed by itself"
        return status == 0
    left = itertools.count(moment, -1)

    def dying(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*given: Any, **options: Any) -> Any:
            if next(left) == 0:
                if torn and name == "write":
                    real(given[0], given[1][: len(given[1]) // 2])
                os._exit(9)
            return real(*given, **options)

        return call

    try:
        for name in ("fsync", "write", "link", "replace"):
            setattr(os, name, dying(name))
        work()
        os._exit(0)
    finally:
        os._exit(1)


# What a run did not use


def test_a_run_that_is_closed_pays_for_what_it_charged_and_never_goes_on(here: At, tmp_path: Path) -> None:
    whole = divergence(MODEST, TERMS.order or 0)
    _one_run(tmp_path, here, tmp_path / "released")
    shutil.copy(tmp_path / "ledger.jsonl", tmp_path / "older.jsonl")
    with Ledger.open(tmp_path / "ledger.jsonl") as ledger, Account.open(*here) as account:
        assert account.give_back(ledger)
        assert not account.give_back(ledger)
        assert float(account.limits["rho"] - account.left["rho"]) == pytest.approx(whole / 20)
        with pytest.raises(BudgetExceeded, match="is closed"):
            ledger.charge(ledger.events[0])
    for copy in (None, "older.jsonl"):  # an older copy of the ledger is not closed, but the account knows
        if copy:
            shutil.copy(tmp_path / copy, tmp_path / "ledger.jsonl")
        with pytest.raises(AccountRefused, match="is closed, and its rest given back"):
            _one_run(tmp_path, here, tmp_path / "again")
    with Account.open(*here, read_only=True) as account:
        assert [debit.closed for debit in account.debits.values()] == [True]


def test_nothing_is_given_back_that_no_ledger_proves(here: At, tmp_path: Path) -> None:
    candidate = replace(MODEST, tuning=Tuning("t", Tries(2, POISSON), (MODEST.floor,)))
    sums = At(tmp_path / "sums.jsonl", here.place)
    Account.create(sums.file, SUMS, sums.place).close()
    _one_run(tmp_path, sums, tmp_path / "released")
    with Ledger.open(tmp_path / "ledger.jsonl") as ledger, Account.open(*sums) as account:
        assert not account.give_back(ledger), "the epsilon of a part bounds nothing if the end was chosen"
        assert not ledger.is_closed
    with Account.open(*here) as account, Ledger.open(tmp_path / "ledger.jsonl") as ledger:
        with pytest.raises(AccountRefused, match="no debit rests on"):
            account.give_back(ledger)
        account.debit(ledger.run_id, MODEST, "as its server says", basis=ledger_account.TOLD)
        with pytest.raises(AccountRefused, match="no debit rests on"):
            account.give_back(ledger)
    assert used_divergence(candidate, (), TERMS.order or 0) == math.inf
    with Ledger.create(tmp_path / "unused.jsonl", MODEST) as ledger, Account.open(*sums) as account:
        before = account.left
        account.debit(ledger.run_id, MODEST, "unused")
        assert account.give_back(ledger)
        assert account.left == before


# What is refused, in which words


def test_the_third_of_three_runs_is_told_what_is_left_and_what_fits(here: At) -> None:
    big = run_of(1.0)
    with Account.open(*here) as account:
        account.debit("a", big, "runs/a")
        account.debit("b", big, "runs/b")
        with pytest.raises(AccountRefused) as refused:
            account.debit("c", big, "runs/c")
        assert len(account.debits) == 2
        said = str(refused.value)
        left, asked = float(account.left["rho"]), divergence(big, TERMS.order or 0)
        assert f"({TERMS.data}): Rényi divergence {left:.4g} is left of {TERMS.rho:.4g}" in said
        assert f"the run asks for {asked:.4g} at order {TERMS.order}" in said
        assert f"epsilon {account.spent[0]:.4g} of 4 is spent" in said
        fits = float(said.partition("privacy.epsilon = ")[2].partition(" fits")[0])
        account.debit("c", floor_commitment(fits, DELTA, COHORT, 20)[0], "runs/c")
        assert float(account.left["rho"]) < 0.05 * left, "less was said to fit than does"
        with pytest.raises(AccountRefused):
            account.debit("d", big, "runs/d")


def test_sums_are_told_in_epsilon_and_delta(tmp_path: Path) -> None:
    with Account.create(tmp_path / "account.jsonl", replace(SUMS, epsilon=0.3, delta=3e-5), tmp_path / "p") as account:
        tenth = replace(run_of(8.0), epsilon=0.1)
        for run in "abc":
            account.debit(run, tenth, run)  # three times 0.1 is 0.3
        assert account.spent == (0.3, 3e-5)
        with pytest.raises(
            AccountRefused, match=r"epsilon 0 is left of 0\.3, the run asks for 0\.1, .* no run fits any"
        ):
            account.debit("d", tenth, "d")
    with Account.create(tmp_path / "two.jsonl", replace(SUMS, epsilon=0.3, delta=2e-5), tmp_path / "p") as account:
        account.debit("a", replace(tenth, epsilon=0.25), "a")
        with pytest.raises(AccountRefused, match=r"privacy.epsilon = 0.05 with privacy.delta = 1e-05 fits$"):
            account.debit("b", tenth, "b")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(1.5, sampling=Poisson(0.05, 1000, "record")), r"is for one client \(add_remove\).*protects one record"),
        (replace(MODEST, adjacency="replace_one"), r"one client \(replace_one\), and these do not add up; make an"),
        (replace(MODEST, not_private="a baseline"), r"gives no guarantee \(a baseline\)"),
        (
            run_of(3.0, 5, ExampleLevelPoisson(0.05, 1000, records_per_unit=2, records=1500)),
            "keep an account with --rule",
        ),
        (filter_commitment(2.0, DELTA, COHORT, 20)[0], ""),
        (Commitment("client", "add_remove", 1000, 9.0, DELTA, "filter", order=3, rho=0.5), "privacy.mode = 'floor'"),
    ],
)
def test_what_does_not_add_up_is_refused(here: At, run: Commitment, words: str) -> None:
    with Account.open(*here) as account:
        if words:
            with pytest.raises(AccountRefused, match=words):
                account.debit("a", run, "a")
        else:  # a filter at a higher order bounds the divergence at the account's too
            assert divergence(run, TERMS.order or 0) == run.rho
            account.debit("a", run, "a")


def test_candidates_of_a_private_sweep_are_one_debit(here: At) -> None:
    own, other = (FloorStep("round", COHORT, 1.5, 20),), (FloorStep("round", COHORT, 1.4, 25),)
    tuning = Tuning("event", Tries(4.0, POISSON), (own, other))
    one = Commitment("client", "add_remove", 1000, 3.9, DELTA, floor=own, tuning=tuning)
    with Account.open(*here) as account:
        assert account.debit("sweep", one, "runs/sweep")
        assert not account.debit("candidate", replace(one, floor=other), "runs/sweep/1")
        cost = float(TERMS.rho) - float(account.left["rho"])
    assert cost > divergence(replace(one, tuning=None), TERMS.order or 0)


def test_correlated_noise_costs_what_one_unit_sees_of_it() -> None:
    turns = CyclicPoisson(0.2, 1000, groups=4)
    floor = (FloorStep("round", turns, 1.5, 20, Banded((0.9, 0.3, 0.3, 0.1))),)
    correlated = Commitment("client", "add_remove", 1000, 9.0, DELTA, floor=floor)
    seen = renyi.subsampled_gaussian_rdp(0.2, 1.5, 6)
    assert divergence(correlated, 6) == pytest.approx(5 * seen)


def test_terms_are_checked() -> None:
    for wrong in ({"unit": "group:"}, {"rule": "pld"}, {"order": None}, {"order": 64}, {"epsilon": 0.01, "order": 2}):
        with pytest.raises(ValueError, match=r"unit|rule|order"):
            replace(TERMS, **wrong)


# The rule, against brute force


def losses(q: float, z: float, grid: np.ndarray) -> np.ndarray:
    """Probabilities of the loss of a Poisson-subsampled Gaussian, one unit removed, rounded up to a grid."""
    at = np.linspace(-12.0 * z, 1.0 + 12.0 * z, 40_001)
    mass = (1 - q) * np.diff(norm.cdf(at, 0.0, z)) + q * np.diff(norm.cdf(at, 1.0, z))
    loss = np.log1p(q * np.expm1((2 * at[1:] - 1) / (2 * z * z)))
    return np.bincount(np.searchsorted(grid, loss).clip(0, len(grid) - 1), mass, len(grid))


def adaptive_delta(stages: list[list[tuple[float, float]]], epsilon: float) -> float:
    """Delta at epsilon against whoever chooses each run's (rate, noise) from the losses so far; by enumeration."""
    step, half = 0.004, 4000
    grid = np.arange(-half, half + 1) * step
    value = np.maximum(0.0, -np.expm1(epsilon - grid))  # what a loss at the end is worth to the adversary
    for choices in reversed(stages):
        padded = np.concatenate([np.zeros(half), value, np.full(half, value[-1])])
        value = np.maximum.reduce([correlate(padded, losses(*choice, grid), "valid", "fft") for choice in choices])
    return float(value[half])


def noise_for(fits: Callable[[float], bool]) -> float:
    low, high = 0.3, 50.0
    for _ in range(25):
        low, high = (low, (low + high) / 2) if fits((low + high) / 2) else ((low + high) / 2, high)
    return high


RATES = (1.0, 0.02)


def test_three_adaptive_runs_stay_within_the_lifetime() -> None:
    """Whoever picks each run's rate, its noise filling a third of the account, from all that was lost before."""

    def fits(rate: float, noise: float) -> bool:
        return renyi.subsampled_gaussian_rdp(rate, noise, TERMS.order or 0) <= TERMS.rho / 3

    choices = [(rate, noise_for(partial(fits, rate))) for rate in RATES]
    assert 0.01 * DELTA < adaptive_delta([choices] * 3, EPSILON) <= DELTA


def test_adding_loss_distributions_of_runs_chosen_later_would_exceed_it() -> None:
    """Every path costs exactly (epsilon, delta) by its own loss distribution; the choice between them costs more."""
    first = (1.0, 2.5)

    def fits(rate: float, noise: float) -> bool:
        return adaptive_delta([[first], [(rate, noise)]], EPSILON) <= DELTA

    second = [(rate, noise_for(partial(fits, rate))) for rate in RATES]
    assert all(fits(*choice) for choice in second)
    assert adaptive_delta([[first], second], EPSILON) > 1.1 * DELTA
