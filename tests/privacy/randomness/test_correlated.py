"""Correlated noise: what the releases of a whole run carry, what one client can move, who may take part, and when.

C is the banded strategy, A the matrix of sums over rounds; noise in encoded space, clip threshold 1, cohort of 1. The
statistics are of 40,000 coordinates; each test fails by chance with a probability below 1e-6.
"""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from privacy.accountants import composition
from privacy.accountants.factorisation import cyclic, optimise
from privacy.audit.two_world import judge
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import Contribution, Plan, contribute
from privacy.errors import BudgetExceeded, CorruptRun
from privacy.events import Banded, CyclicPoisson, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from privacy.mechanism import Release, charged_release
from privacy.randomness.correlated import CorrelatedNoise, loudness
from privacy.randomness.noise import GaussianNoise, InsecureZeroNoise
from privacy.randomness.rng import simulation_generator
from privacy.randomness.sampling import CohortSampler
from tests.cases.ledgers import MemoryLedger

BANDS, ROUNDS, Z, DIM = 4, 11, 1.7, 40_000
COEFFICIENTS = optimise(BANDS, ROUNDS)
CLIENTS = 400
SAMPLING = CyclicPoisson(1.0, CLIENTS, groups=BANDS)
COMMITMENT = Commitment(
    "client",
    "add_remove",
    CLIENTS,
    8.0,
    1e-3,
    floor=(FloorStep("round", SAMPLING, Z, ROUNDS, Banded(COEFFICIENTS)),),
)


def strategy(rounds: int = ROUNDS, restarts: tuple[int, ...] = ()) -> np.ndarray:
    """C, with noise that starts anew at each of ``restarts``."""
    whole = sum(c * np.eye(rounds, k=-i) for i, c in enumerate(COEFFICIENTS))
    for start in restarts:
        whole[start:, :start] = 0.0
    return np.asarray(whole)


def noise_of_a_run(
    noises: dict[int, CorrelatedNoise], ledger: Any, sampler: CohortSampler, dim: int = DIM
) -> np.ndarray:
    """The releases of a run whose clients move nothing, ``[rounds, dim]`` in encoded space; new noise where given."""
    plan, rows, noise = Plan(FlatClip(1.0, dim), Z), [], noises[0]
    for turn in range(ROUNDS):
        noise = noises.get(turn, noise)
        drawn = sampler.draw(replace(SAMPLING, turn=turn), turn + 1)
        release = charged_release(Contribution.zero(plan), plan, drawn, ledger=ledger, noise=noise)
        assert release.encoded is not None
        rows.append(release.encoded.numpy())
    return np.stack(rows)


@pytest.fixture
def paid(tmp_path):
    with Ledger.create(tmp_path / "ledger.jsonl", COMMITMENT) as ledger:
        yield ledger


def test_noise_after_a_restart_begins_anew_and_says_so(paid):
    drawn = []

    def normals(length):
        drawn.append(length)
        return np.ones(length)

    noise = CorrelatedNoise(Banded(COEFFICIENTS), normals)
    assert noise.correlation(replace(SAMPLING, turn=6), paid).since == 6
    assert (noise.draw([(1.0, 3)]) == round(2.0**40 / COEFFICIENTS[0])).all()
    assert drawn == [3], "nothing is drawn for turns of the process before"
    assert noise.correlation(replace(SAMPLING, turn=7), paid).since == 6


class TestNoise:
    @pytest.mark.parametrize("restarts", [(), (6,)])
    def test_the_covariance_of_all_sums_is_that_of_the_strategy(self, restarts, paid):
        """z^2 (A C^-1)(A C^-1)^T in every coordinate; noise that died with its process is not in C."""
        noises = {start: CorrelatedNoise(Banded(COEFFICIENTS)) for start in (0, *restarts)}
        released = noise_of_a_run(noises, paid, CohortSampler.create())
        sums = np.cumsum(released, axis=0)
        measured = sums @ sums.T / DIM
        factor = Z * np.tri(ROUNDS) @ np.linalg.inv(strategy(restarts=restarts))
        promised = factor @ factor.T
        std = np.sqrt((promised**2 + np.outer(np.diag(promised), np.diag(promised))) / DIM)
        assert np.abs(measured - promised).max() / std.max() < 6.0
        assert (np.abs(measured - promised) < 6.0 * std).all()
        whitened = strategy(restarts=restarts) @ released / Z  # what the proof is about: independent, variance 1
        assert np.abs(whitened @ whitened.T / DIM - np.eye(ROUNDS)).max() < 6.0 * math.sqrt(2.0 / DIM)

    def test_the_ledger_and_the_release_say_how_loud_a_round_is(self, paid):
        released = noise_of_a_run({0: CorrelatedNoise(Banded(COEFFICIENTS))}, paid, CohortSampler.create())
        for charge, row, exact in zip(paid.charges, released, np.linalg.inv(strategy()), strict=True):
            loud = loudness(charge.event.correlation, charge.event.sampling.turn)
            assert loud == pytest.approx(np.linalg.norm(exact), rel=1e-12)
            assert row.std() == pytest.approx(Z * loud, rel=6.0 / math.sqrt(2 * DIM))

    def test_one_band_is_independent_noise(self, ledger):
        noise = CorrelatedNoise(Banded((1.0,)), simulation_generator(5, "x").standard_normal)
        whole = noise_of_a_run({0: noise}, ledger, CohortSampler.insecure_from_seed(0), dim=500)
        plain = simulation_generator(5, "x").standard_normal(500 * ROUNDS).reshape(ROUNDS, 500)
        assert np.abs(whole - Z * plain).max() < 1e-11
        assert ledger.not_private is not None

    def test_it_serves_one_ledger_and_cannot_be_copied_into_another_run(self, ledger, paid):
        noise = CorrelatedNoise(Banded(COEFFICIENTS))
        noise.correlation(replace(SAMPLING, turn=0), paid)
        with pytest.raises(ValueError, match="one ledger only"):
            noise.correlation(replace(SAMPLING, turn=1), ledger)
        with pytest.raises(TypeError):
            copy.deepcopy(noise)

    def test_nothing_is_drawn_that_was_not_asked_for(self, paid):
        noise = CorrelatedNoise(Banded(COEFFICIENTS))
        with pytest.raises(ValueError, match="once for every turn"):
            noise.draw([(Z, 3)])
        with pytest.raises(ValueError, match="cyclic sampling with a turn"):
            noise.correlation(Poisson(0.5, CLIENTS), paid)
        noise.correlation(replace(SAMPLING, turn=0), paid)
        noise.draw([(Z, 3)])
        with pytest.raises(ValueError, match="once for every turn"):
            noise.draw([(Z, 3)])
        noise.correlation(replace(SAMPLING, turn=1), paid)
        with pytest.raises(ValueError, match="same length"):
            noise.draw([(Z, 4)])

    @pytest.mark.parametrize("bad", [(), (0.0, 1.0), (0.8, 0.61), (math.nan,), (0.6, -0.6), (0.1, 0.9)])
    def test_a_strategy_that_is_not_accounted_or_runs_away_is_refused(self, bad):
        with pytest.raises(ValueError, match="coefficients"):
            CorrelatedNoise(Banded(bad))


class TestSensitivity:
    """One client in every pattern of participation that the sampler and the ledger allow."""

    def test_no_pattern_moves_a_row_twice_or_the_whole_by_more_than_is_accounted(self):
        """Every window of the client is a Gaussian of multiplier exactly z, and no two windows meet."""
        matrix = strategy()
        for first in range(BANDS):
            turns = range(first, ROUNDS, BANDS)
            for taken in itertools.product([0.0, 1.0], repeat=len(turns)):
                columns = [matrix[:, t] * take for t, take in zip(turns, taken, strict=True)]
                assert all((a * b == 0.0).all() for a, b in itertools.combinations(columns, 2))
                squares = sum(float(column @ column) for column in columns)
                assert squares <= sum(taken) * (1 + 1e-12)
            assert len(turns) <= math.ceil(ROUNDS / BANDS)
        assert max(np.linalg.norm(matrix, axis=0)) == pytest.approx(1.0, abs=1e-12)
        assert COMMITMENT.floor[0].noise_multiplier == Z

    def test_a_client_in_neighbouring_rounds_would_move_it_by_more(self):
        """What the groups are for: without them the same noise is worth less."""
        matrix = strategy()
        assert np.linalg.norm(matrix[:, 0] + matrix[:, 1]) > 1.2 * math.sqrt(2.0)

    def test_the_account_is_that_of_the_windows(self):
        for rounds, rate in ((ROUNDS, 1.0), (9, 0.4), (8, 0.4)):
            one = FloorStep("round", replace(SAMPLING, rate=rate), Z, rounds, Banded(COEFFICIENTS))
            windows = [(Poisson(rate, CLIENTS), Z, math.ceil(rounds / BANDS))]
            assert composition.epsilon([one], 1e-3) == composition.epsilon(windows, 1e-3)
        two = FloorStep("round", SAMPLING, Z, 5), FloorStep("round", SAMPLING, Z, 5)  # of two runs: 2 windows each
        assert composition.epsilon(two, 1e-3) == composition.epsilon([(Poisson(1.0, CLIENTS), Z, 4)], 1e-3)


def audited(turns_of_the_canary: range, repetitions: int = 400, z: float = 1.0) -> Any:
    """Two worlds over whole runs: a canary in these turns or in none; the most powerful score of all releases together.

    The canary moves one coordinate by 1 in every release it is in; honest clients move nothing.
    """
    matrix, plan = strategy(8), Plan(FlatClip(1.0, 1), z)
    moved = matrix[:, list(turns_of_the_canary)].sum(axis=1)
    canary = contribute(Units(torch.full((1, 1), 800.0)), plan)
    sampler, scores = CohortSampler.create(), ([], [])
    cohorts = [sampler.draw(replace(SAMPLING, turn=turn), turn + 1) for turn in range(8)]
    for _ in range(repetitions):
        for world in (0, 1):
            noise, ledger, released = CorrelatedNoise(Banded(COEFFICIENTS)), MemoryLedger(), []
            for turn, drawn in enumerate(cohorts):
                total = canary if world and turn in turns_of_the_canary else Contribution.zero(plan)
                release = charged_release(total, plan, drawn, ledger=ledger, noise=noise)
                released.append(float(release.encoded[0]))
            scores[world].append(float(moved @ matrix @ np.array(released)) / np.linalg.norm(moved))
    # a client in two windows of its own, asked each time, is (sqrt(2) / z)-GDP
    return judge(np.array(scores[1]), np.array(scores[0]), noise_multiplier=z / math.sqrt(2.0))


class TestAudit:
    def test_a_client_in_its_own_turns_keeps_the_claim(self):
        result = audited(range(1, 8, BANDS))
        assert result.passed
        assert result.mu_estimate > 0.8 * result.claimed_mu, "and the test is sharp"

    def test_a_client_outside_its_group_is_caught(self):
        assert not audited(range(8)).passed


class TestSampler:
    def test_everybody_has_one_group_for_the_whole_run(self):
        sampler, sampling = CohortSampler.create(), CyclicPoisson(0.5, 3000, groups=3)
        group = sampler.group_of(3000, 3)
        sizes = np.bincount(group, minlength=3)
        assert (np.abs(sizes - 1000) < 6 * math.sqrt(3000 * 2 / 9)).all()
        for turn, attempt in itertools.product(range(9), range(2)):
            drawn = sampler.draw(replace(sampling, turn=turn), turn + 1, attempt)
            assert (group[drawn.ids] == turn % 3).all()
            assert abs(len(drawn) - 500) < 6 * math.sqrt(3000 / 6)
        assert sampling.expected_units == 500

    def test_groups_are_the_runs_own(self):
        one, other = CohortSampler.create().group_of(3000, 3), CohortSampler.create().group_of(3000, 3)
        assert abs((one == other).mean() - 1 / 3) < 6 * math.sqrt(2 / 9 / 3000)

    def test_at_rate_one_the_whole_group_takes_part(self):
        sampler = CohortSampler.insecure_from_seed(1)
        drawn = [sampler.draw(replace(SAMPLING, turn=turn), turn).ids for turn in range(BANDS)]
        assert sorted(np.concatenate(drawn)) == list(range(CLIENTS))

    def test_there_is_no_cohort_without_a_turn(self):
        with pytest.raises(ValueError, match="turn must be a number"):
            CohortSampler.create().draw(SAMPLING, 1)


class TestLedger:
    def event(self, turn: int, **other: Any) -> ReleaseEvent:
        components = Plan(FlatClip(1.0, 3), Z).components()
        made = {"sampling": replace(SAMPLING, turn=turn), "correlation": Banded(COEFFICIENTS), **other}
        return ReleaseEvent("round", turn + 1, components=components, **made)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"sampling": replace(SAMPLING, turn=2)}, "not .*turn=1"),
            ({"sampling": replace(SAMPLING, turn=1 + BANDS)}, "not .*turn=1"),
            ({"sampling": replace(SAMPLING, turn=1, groups=BANDS + 1)}, "groups=5"),
            ({"sampling": Poisson(1.0, CLIENTS), "correlation": None}, "as committed"),
            ({"correlation": Banded((0.8, 0.6))}, "correlated as"),
            ({"correlation": None}, "correlated as None"),
        ],
    )
    def test_only_the_committed_turn_and_noise_are_paid(self, other, message, paid):
        paid.charge(self.event(0))
        with pytest.raises(BudgetExceeded, match=message):
            paid.charge(self.event(1, **other))
        paid.charge(self.event(1))
        assert len(paid.charges) == 2

    def test_a_lost_charge_passes_the_turn_on_and_the_run_has_no_more_participations(self, paid):
        for turn in range(ROUNDS):
            paid.charge(self.event(turn, correlation=Banded(COEFFICIENTS, since=turn)))
        with pytest.raises(BudgetExceeded, match="are used"):
            paid.charge(self.event(ROUNDS))
        assert paid.epsilon_spent() == pytest.approx(paid.epsilon_guaranteed())

    def test_spending_grows_when_a_group_has_its_next_turn(self, paid):
        spent = []
        for turn in range(ROUNDS):
            paid.charge(self.event(turn))
            spent.append(paid.epsilon_spent())
        for first in range(0, ROUNDS, BANDS):
            assert spent[first : first + BANDS] == pytest.approx([spent[first]] * len(spent[first : first + BANDS]))
        assert 1.2 * spent[0] < spent[BANDS] < spent[2 * BANDS] / 1.2

    def test_a_ledger_with_another_participation_is_not_opened(self, paid):
        """One that was written by a process without these rules."""
        paid.charge(self.event(0))
        body = dict(paid._journal.entries[-1].body) | {"charge": 1, "event": self.event(0).to_json()}
        paid._journal.append("charge", body)
        paid.close()
        with pytest.raises(CorruptRun, match="turn=1"):
            Ledger.open(paid.path)

    def test_it_says_from_its_file_alone_how_the_run_was_sampled_and_what_it_carries(self, paid):
        for turn in range(3):
            paid.note_release(paid.charge(self.event(turn)))
        paid.close()
        with Ledger.open(paid.path, read_only=True) as again:
            assert again.commitment == COMMITMENT
            assert [event.sampling.turn for event in again.events] == [0, 1, 2]
            statement = privacy_statement(again)
        assert statement["correlation"]["bands"] == BANDS
        assert statement["correlation"]["coefficients"] == list(COEFFICIENTS)
        assert statement["correlation"]["column_norm"] == pytest.approx(1.0)
        assert statement["sampling"]["round"] == "Poisson with rate 1 from one of 4 groups of 400 clients in turn"
        assert len(statement["releases"]) == 1

    @pytest.mark.parametrize("sampling", [Poisson(0.5, CLIENTS), CyclicPoisson(0.5, CLIENTS, groups=BANDS - 1)])
    def test_a_commitment_in_which_windows_meet_is_refused(self, sampling):
        with pytest.raises(ValueError, match="at least 4 groups"):
            FloorStep("round", sampling, Z, ROUNDS, Banded(COEFFICIENTS))

    def test_two_cyclic_steps_are_refused(self):
        step = COMMITMENT.floor[0]
        with pytest.raises(ValueError, match="one step under add_remove"):
            replace(COMMITMENT, floor=(step, step))
        with pytest.raises(ValueError, match="one step under add_remove"):
            replace(COMMITMENT, adjacency="replace_one")

    def test_independent_noise_is_not_released_where_correlated_was_committed(self, paid):
        plan = Plan(FlatClip(1.0, 3), Z)
        drawn = CohortSampler.create().draw(replace(SAMPLING, turn=0), 1)
        with pytest.raises(BudgetExceeded, match="correlated as None"):
            charged_release(Contribution.zero(plan), plan, drawn, ledger=paid, noise=GaussianNoise())


def test_the_divisor_is_the_expected_cohort_whoever_the_group_is(ledger):
    plan = Plan(FlatClip(1.0, 2), Z)
    row = contribute(Units(torch.tensor([[3.0, 4.0]])), plan)
    for turn in range(3):
        drawn = CohortSampler.insecure_from_seed(0).draw(replace(SAMPLING, rate=0.4, turn=turn), turn)
        release: Release = charged_release(row, plan, drawn, ledger=ledger, noise=InsecureZeroNoise())
        assert release.update.tolist() == pytest.approx([0.6 / 40, 0.8 / 40])
    assert cyclic(4, CLIENTS, 0.1).expected_units == pytest.approx(40.0)
