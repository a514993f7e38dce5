"""Buffered Toeplitz noise: what the releases of a run carry, in how much memory, and what its ledger lets through.

Noise in encoded space, clip threshold 1, cohort of 1; statistics are of 20,000 coordinates, and each test fails by
chance with a probability below 1e-6.
"""

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privacy.accountants import composition, pld
from privacy.accountants.buffered import optimise
from privacy.audit.two_world import judge
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import ROUNDING, Commitment, FloorStep
from privacy.contribution import Contribution, Plan, contribute
from privacy.errors import BudgetExceeded, CorruptRun
from privacy.events import Banded, BufferedToeplitz, CyclicPoisson, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from privacy.mechanism import charged_release
from privacy.randomness.correlated import CorrelatedNoise, loudness
from privacy.randomness.sampling import CohortSampler
from tests.cases.ledgers import MemoryLedger

BUFFERS, GROUPS, ROUNDS, Z, DIM = 3, 4, 22, 2.5, 20_000
STRATEGY = BufferedToeplitz((0.16, 0.2, 0.15), (0.97, 0.8, 0.3))
CLIENTS = 400
SAMPLING = CyclicPoisson(0.5, CLIENTS, groups=GROUPS)
STEP = FloorStep("round", SAMPLING, Z, ROUNDS, STRATEGY)
COMMITMENT = Commitment("client", "add_remove", CLIENTS, 20.0, 1e-3, floor=(STEP,))


def matrix(rounds: int = ROUNDS, restarts: tuple[int, ...] = ()) -> np.ndarray:
    """C, with noise that starts anew at each of ``restarts``."""
    column = [1.0]
    for lag in range(1, rounds):
        column.append(sum(s * d ** (lag - 1) for s, d in zip(STRATEGY.scales, STRATEGY.decays, strict=True)))
    whole = sum(c * np.eye(rounds, k=-i) for i, c in enumerate(column))
    for start in restarts:
        whole[start:, :start] = 0.0
    return np.asarray(whole)


def event(turn: int, **other: Any) -> ReleaseEvent:
    components = Plan(FlatClip(1.0, 3), Z).components()
    made = {"sampling": replace(SAMPLING, turn=turn), "correlation": STRATEGY, **other}
    return ReleaseEvent("round", turn + 1, components=components, **made)


@pytest.fixture
def paid(tmp_path):
    with Ledger.create(tmp_path / "ledger.jsonl", COMMITMENT) as ledger:
        yield ledger


class TestNoise:
    @pytest.mark.parametrize("restarts", [(), (9,), (5, 6)])
    def test_the_covariance_of_a_run_is_that_of_the_strategy(self, restarts, paid):
        """z^2 C^-1 C^-T in every coordinate; buffers that died with their process are not in C."""
        plan, sampler, rows = Plan(FlatClip(1.0, DIM), Z), CohortSampler.create(), []
        for turn in range(ROUNDS):
            if turn in (0, *restarts):
                noise = CorrelatedNoise(STRATEGY)
            drawn = sampler.draw(replace(SAMPLING, turn=turn), turn + 1)
            rows.append(charged_release(Contribution.zero(plan), plan, drawn, ledger=paid, noise=noise).encoded.numpy())
        released, inverse = np.stack(rows), np.linalg.inv(matrix(restarts=restarts))
        promised = Z**2 * inverse @ inverse.T
        std = np.sqrt((promised**2 + np.outer(np.diag(promised), np.diag(promised))) / DIM)
        assert (np.abs(released @ released.T / DIM - promised) < 6.0 * std).all()
        whitened = matrix(restarts=restarts) @ released / Z  # what the proof is about: independent, variance 1
        assert np.abs(whitened @ whitened.T / DIM - np.eye(ROUNDS)).max() < 6.0 * math.sqrt(2.0 / DIM)
        starts = [max(start for start in (0, *restarts) if start <= turn) for turn in range(ROUNDS)]
        assert [charge.event.correlation.since for charge in paid.charges] == starts
        for charge, exact in zip(paid.charges, inverse, strict=True):
            loud = loudness(charge.event.correlation, charge.event.sampling.turn)
            assert loud == pytest.approx(np.linalg.norm(exact), rel=1e-12)

    def test_a_turn_that_was_charged_and_not_drawn_starts_it_anew(self, paid):
        noise = CorrelatedNoise(STRATEGY, lambda length: np.ones(length))
        scale = 2.0**40
        for turn, since, value in ((0, 0, 1.0), (1, 0, 1.0 - sum(STRATEGY.scales)), (3, 3, 1.0)):
            assert noise.correlation(replace(SAMPLING, turn=turn), paid) == replace(STRATEGY, since=since)
            assert noise.draw([(1.0, 2)]).tolist() == pytest.approx([value * scale] * 2, abs=1.0)

    def test_memory_is_that_of_the_buffers_however_many_releases(self, paid):
        """At most half a vector more than d of them is kept between releases, after 3 as after 200."""
        length, held = 50_000, []
        noise = CorrelatedNoise(STRATEGY)
        tracemalloc.start()
        try:
            for turn in range(200):
                noise.correlation(replace(SAMPLING, turn=turn), paid)
                noise.draw([(Z, length)])
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert max(held[2:]) < (BUFFERS + 0.5) * 8 * length
        assert min(held) > (BUFFERS - 0.5) * 8 * length, "and the test is sharp"

    def test_it_serves_one_ledger_and_one_length(self, ledger, paid):
        noise = CorrelatedNoise(STRATEGY)
        noise.correlation(replace(SAMPLING, turn=0), paid)
        with pytest.raises(ValueError, match="one ledger only"):
            noise.correlation(replace(SAMPLING, turn=1), ledger)
        with pytest.raises(ValueError, match="cyclic sampling with a turn"):
            noise.correlation(Poisson(0.5, CLIENTS), paid)
        noise.draw([(Z, 3)])
        with pytest.raises(ValueError, match="once for every turn"):
            noise.draw([(Z, 3)])
        noise.correlation(replace(SAMPLING, turn=1), paid)
        with pytest.raises(ValueError, match="same length"):
            noise.draw([(Z, 4)])

    def test_noise_that_would_leave_64_bit_integers_is_refused(self, paid):
        for z in (2.0**22, 2.0**22 - 1.0):
            noise = CorrelatedNoise(STRATEGY, lambda length: np.ones(length))
            noise.correlation(replace(SAMPLING, turn=0), paid)
            if z < 2.0**22:
                assert noise.draw([(z, 2)]).tolist() == [int(z) << 40] * 2
            else:
                with pytest.raises(ValueError, match="leaves the range of 64-bit integers"):
                    noise.draw([(z, 2)])

    def test_no_coordinates_need_no_noise(self, paid):
        noise = CorrelatedNoise(STRATEGY)
        noise.correlation(replace(SAMPLING, turn=0), paid)
        assert noise.draw([(Z, 0)]).tolist() == []

    def test_one_that_only_gets_louder_is_refused(self):
        with pytest.raises(ValueError, match="louder than 16"):
            CorrelatedNoise(BufferedToeplitz((1.0,), (1e-9,)))


class TestLedger:
    def test_a_full_run_costs_one_gaussian_and_a_part_of_it_less(self, paid):
        """Its sensitivity that of the added columns of the dense matrix, for the releases that were charged."""
        spent, interval = [], pld.refine(composition.merge_steps([STEP]), 1e-3, "add_remove")[1]
        for turn in range(ROUNDS):
            paid.charge(event(turn))
            spent.append(paid.epsilon_spent())
            taken = (np.arange(turn + 1) % GROUPS == 0).astype(float)
            one = Z / float(np.linalg.norm(matrix(turn + 1) @ taken)) * (1.0 - ROUNDING)
            gaussian = pld.dp_pld.from_gaussian_mechanism(one, value_discretization_interval=interval)
            assert spent[-1] == pytest.approx(gaussian.get_epsilon_for_delta(1e-3), abs=1e-6)
        assert spent == sorted(spent)
        assert spent[-1] == pytest.approx(paid.epsilon_guaranteed(), abs=1e-6)

    def test_lost_charges_and_restarts_cost_no_more_than_was_committed(self, paid):
        for turn in range(ROUNDS):
            paid.charge(event(turn, correlation=replace(STRATEGY, since=turn)))
        assert paid.epsilon_spent() == pytest.approx(paid.epsilon_guaranteed())
        with pytest.raises(BudgetExceeded, match="are used"):
            paid.charge(event(ROUNDS))

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"sampling": replace(SAMPLING, turn=2)}, "not .*turn=1"),
            ({"sampling": replace(SAMPLING, turn=0)}, "not .*turn=1"),
            ({"sampling": replace(SAMPLING, turn=1, groups=GROUPS - 1)}, "groups=3"),
            ({"sampling": replace(SAMPLING, turn=1, rate=0.6)}, "more than the committed"),
            ({"sampling": Poisson(0.5, CLIENTS), "correlation": None}, "as committed"),
            ({"correlation": replace(STRATEGY, scales=(0.16, 0.2, 0.1))}, "correlated as"),
            ({"correlation": replace(STRATEGY, decays=(0.9, 0.8, 0.3))}, "correlated as"),
            ({"correlation": Banded((0.8, 0.6))}, "correlated as"),
            ({"correlation": None}, "correlated as None"),
        ],
    )
    def test_only_the_committed_turn_and_noise_are_paid(self, other, message, paid):
        paid.charge(event(0))
        with pytest.raises(BudgetExceeded, match=message):
            paid.charge(event(1, **other))
        paid.charge(event(1))
        assert len(paid.charges) == 2

    @pytest.mark.parametrize(
        ("part", "change", "message"),
        [
            ("sampling", {"turn": 0}, "turn=1"),
            ("sampling", {"groups": 2 * GROUPS}, "groups=8"),
            ("correlation", {"scales": [0.16, 0.2, 0.1]}, "correlated as"),
            ("correlation", {"scales": [0.5, 0.5, 0.5]}, "sum of at most 1"),
            ("correlation", {"decays": [0.97, 0.8]}, "buffers, got 3 and 2"),
            ("correlation", {"decays": [0.97, 0.8, -0.3]}, "decays must lie in"),
            ("correlation", {"since": 7}, "since must be at most the turn"),
            ("correlation", {"kind": "of my own"}, "kind of correlated noise"),
        ],
    )
    def test_a_ledger_with_a_row_that_was_never_allowed_is_not_opened(self, part, change, message, paid):
        """One that was written by a process without these rules: its chain is whole."""
        paid.charge(event(0))
        hostile = event(1).to_json()
        hostile[part] |= change
        paid._journal.append("charge", dict(paid._journal.entries[-1].body) | {"charge": 1, "event": hostile})
        paid.close()
        with pytest.raises(CorruptRun, match=message):
            Ledger.open(paid.path)

    def test_rows_in_another_order_are_not_opened(self, paid):
        bodies = []
        for turn in range(2):
            paid.charge(event(turn))
            bodies.append(dict(paid._journal.entries[-1].body))
        paid.close()
        with Ledger.create(paid.path.with_name("other.jsonl"), COMMITMENT) as other:
            other._journal.append("charge", bodies[1] | {"charge": 0})
        with pytest.raises(CorruptRun, match="turn=0"):
            Ledger.open(other.path)

    def test_a_commitment_that_costs_more_than_it_states_is_no_ledger(self, tmp_path):
        """As many releases as independent noise would allow are far too many."""
        epsilon = composition.epsilon([replace(STEP, correlation=None)], 1e-3)
        with pytest.raises(ValueError, match="committed releases cost epsilon"):
            Ledger.create(tmp_path / "other.jsonl", replace(COMMITMENT, epsilon=1.05 * epsilon))

    def test_it_says_from_its_file_alone_what_the_run_carries(self, paid):
        for turn in range(3):
            paid.note_release(paid.charge(event(turn, correlation=replace(STRATEGY, since=min(turn, 1)))))
        paid.close()
        with Ledger.open(paid.path, read_only=True) as again:
            assert again.commitment == COMMITMENT
            assert [one.correlation.since for one in again.events] == [0, 1, 1]
            statement = json.loads(json.dumps(privacy_statement(again)))
            assert statement["epsilon_spent"] < statement["epsilon"]
        assert statement["correlation"] == STRATEGY.to_json()
        share = STRATEGY.sensitivity(ROUNDS, GROUPS)
        assert f"costs one Gaussian of a noise multiplier {share:.4g} times smaller" in statement["mechanism"]
        assert "3 buffers" in statement["mechanism"]
        assert "no amplification by sampling is claimed" in statement["mechanism"]
        assert statement["sampling"]["round"] == "Poisson with rate 0.5 from one of 4 groups of 400 clients in turn"


def audited(turns_of_the_canary: range, repetitions: int = 400, rounds: int = 8) -> Any:
    """Two worlds over whole runs: a canary in these turns or in none; the most powerful score of all releases together.

    The canary moves one coordinate by 1 in every release it is in; honest clients move nothing.
    """
    whole, share = matrix(rounds), STRATEGY.sensitivity(rounds, GROUPS)
    plan, moved = Plan(FlatClip(1.0, 1), share / 1.2), whole[:, list(turns_of_the_canary)].sum(axis=1)
    canary = contribute(Units(torch.full((1, 1), 800.0)), plan)
    sampler, scores = CohortSampler.create(), ([], [])
    cohorts = [sampler.draw(replace(SAMPLING, turn=turn), turn + 1) for turn in range(rounds)]
    for _ in range(repetitions):
        for world in (0, 1):
            noise, ledger, released = CorrelatedNoise(STRATEGY), MemoryLedger(), []
            for turn, drawn in enumerate(cohorts):
                total = canary if world and turn in turns_of_the_canary else Contribution.zero(plan)
                release = charged_release(total, plan, drawn, ledger=ledger, noise=noise)
                released.append(float(release.encoded[0]))
            scores[world].append(float(moved @ whole @ np.array(released)) / np.linalg.norm(moved))
    return judge(np.array(scores[1]), np.array(scores[0]), noise_multiplier=1.0 / 1.2)


class TestAudit:
    def test_a_client_in_its_own_turns_keeps_the_claim(self):
        result = audited(range(0, 8, GROUPS))
        assert result.passed
        assert result.mu_estimate > 0.8 * result.claimed_mu, "and the test is sharp"

    def test_a_client_outside_its_group_is_caught(self):
        assert not audited(range(8)).passed


def test_the_optimum_for_a_run_is_accepted_as_noise(tmp_path: Path):
    for momentum in (0.0, 0.9):
        strategy = optimise(2, 300, 20, momentum)
        assert loudness(strategy, 299) < 2.0
        CorrelatedNoise(strategy)
