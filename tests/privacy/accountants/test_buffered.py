"""Buffered Toeplitz strategies: errors and sensitivities against dense matrices, brute force and another library."""

import itertools
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

from privacy.accountants import buffered, composition, factorisation, pld
from privacy.accountants.calibration import calibrate, floor_commitment
from privacy.commitment import ROUNDING, FloorStep
from privacy.errors import UnsupportedEvent
from privacy.events import BufferedToeplitz, Component, CyclicPoisson, Poisson, ReleaseEvent

# rounds, groups, scales, decays, mean squared error of prefix sums, squared sensitivity: optimize_loss of
# jax_privacy 2.0.0 (buffered_toeplitz, error 'mean', min_sep = groups, in 64 bits)
GOLDEN = [
    (200, 200, [0.2860202882051197], [0.9689915874241164], 3.03100618131171, 2.339888702584086),
    (
        200,
        200,
        [0.14666438270652987, 0.1808118686417755, 0.1753776158718375],
        [0.9861037002867054, 0.8689617737427154, 0.4557640680709212],
        2.560451321282618,
        2.5177612267985725,
    ),
    (200, 20, [0.5117533797837444], [0.9098136079594459], 3.5359212402667044, 31.684957964753472),
    (
        200,
        20,
        [0.2562999483459419, 0.2554534394877168],
        [0.9098295346136467, 0.9097976201913195],
        3.5359212359216112,
        31.68495807672831,
    ),
    (
        1000,
        100,
        [0.1253375630813624, 0.12489748045813509, 0.2573454474478635],
        [0.9816668099779262, 0.98166015354248, 0.5777682746439986],
        3.89959363250564,
        38.12961819066609,
    ),
]
STRATEGIES = [
    BufferedToeplitz((0.4,), (0.9,)),
    BufferedToeplitz((0.17, 0.31), (0.984, 0.75)),
    BufferedToeplitz((0.5, 0.5), (0.6, 0.999)),
]


def dense(strategy: BufferedToeplitz, rounds: int) -> np.ndarray:
    """C, entry by entry from its definition."""
    whole = np.eye(rounds)
    for row, column in itertools.product(range(rounds), repeat=2):
        if row > column:
            terms = zip(strategy.scales, strategy.decays, strict=True)
            whole[row, column] = sum(scale * decay ** (row - column - 1) for scale, decay in terms)
    return whole


def loss(strategy: BufferedToeplitz, rounds: int, groups: int, momentum: float = 0.0) -> float:
    return buffered.mean_error(strategy, rounds, momentum) * strategy.sensitivity(rounds, groups) ** 2


@pytest.mark.parametrize(("rounds", "groups", "scales", "decays", "error", "squares"), GOLDEN)
def test_error_sensitivity_and_optimum_are_those_of_another_library(rounds, groups, scales, decays, error, squares):
    theirs = BufferedToeplitz(tuple(scales), tuple(decays))
    assert buffered.mean_error(theirs, rounds) == pytest.approx(error, rel=1e-9)
    assert theirs.sensitivity(rounds, groups) ** 2 == pytest.approx(squares, rel=1e-9)
    ours = buffered.optimise(len(scales), rounds, groups)
    assert 0.999 < loss(ours, rounds, groups) / (error * squares) <= 1.0 + 1e-8


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_error_is_that_of_the_matrices(strategy, momentum):
    lags = np.subtract.outer(np.arange(30), np.arange(30))
    sums = np.where(lags >= 0, np.cumsum(momentum ** np.arange(30, dtype=float))[np.maximum(lags, 0)], 0.0)
    exact = np.square(sums @ np.linalg.inv(dense(strategy, 30))).sum() / 30
    assert buffered.mean_error(strategy, 30, momentum) == pytest.approx(exact, rel=1e-10)
    assert strategy.coefficients(30) == pytest.approx(dense(strategy, 30)[:, 0], rel=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("rounds", "groups"), [(9, 1), (9, 2), (10, 3), (7, 7), (6, 9)])
def test_no_pattern_of_participation_moves_a_run_by_more_than_is_accounted(strategy, rounds, groups):
    """All patterns at least b apart, those of the cyclic sampler among them, and all signs of what is contributed."""
    matrix, accounted, most = dense(strategy, rounds), strategy.sensitivity(rounds, groups), 0.0
    for size in range(1, -(-rounds // groups) + 1):
        for taken in itertools.combinations(range(rounds), size):
            if any(later - earlier < groups for earlier, later in itertools.pairwise(taken)):
                continue
            for signs in itertools.product([-1.0, 1.0], repeat=size):
                most = max(most, float(np.linalg.norm(matrix[:, taken] @ np.array(signs))))
    assert most == pytest.approx(accounted, rel=1e-12)


def test_nor_do_vectors_of_any_direction_and_length_up_to_one():
    random, strategy, rounds, groups = np.random.default_rng(0), STRATEGIES[1], 12, 3
    matrix = dense(strategy, rounds)
    for _ in range(500):
        first = random.integers(groups)
        moved = np.zeros((rounds, 3))
        directions = random.normal(size=(len(range(first, rounds, groups)), 3))
        lengths = random.uniform(size=len(directions)) ** 0.2
        moved[first::groups] = directions * (lengths / np.linalg.norm(directions, axis=1))[:, None]
        assert np.linalg.norm(matrix @ moved) <= strategy.sensitivity(rounds, groups)


@pytest.mark.parametrize("restarts", [(1,), (5,), (3, 4, 9), tuple(range(1, 12))])
def test_a_process_that_begins_anew_moves_no_row_by_more(restarts):
    """C is block-diagonal then. Row by row, so that the moment may be chosen by what was released."""
    for strategy, groups in itertools.product(STRATEGIES, (1, 2, 5)):
        whole = dense(strategy, 12)
        broken = whole.copy()
        for start in restarts:
            broken[start:, :start] = 0.0
        taken = (np.arange(12) % groups == 0).astype(float)
        assert (broken @ taken <= whole @ taken).all()
        assert np.linalg.norm(whole @ taken) == pytest.approx(strategy.sensitivity(12, groups), rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_one_participation_few_buffers_come_close_to_the_best_toeplitz_matrix(momentum):
    best = factorisation.mean_error(factorisation.optimise(200, 200, momentum), 200, momentum)
    share = [loss(buffered.optimise(d, 200, 200, momentum), 200, 200, momentum) / best for d in (1, 2, 3)]
    assert share[0] < 1.11
    assert 1.0 <= share[2] <= share[1] * (1.0 + 1e-9) < 1.005
    root = np.cumprod([1.0, *(1.0 - 0.5 / k for k in range(1, 200))])  # of (1 - x)^(-1/2)
    assert share[1] * best < factorisation.mean_error(root, 200, momentum) * float(root @ root)


@pytest.mark.parametrize(("groups", "momentum"), [(1, 0.0), (10, 0.0), (10, 0.9), (100, 0.0)])
def test_no_strategy_nearby_is_better(groups, momentum):
    best = buffered.optimise(2, 100, groups, momentum)
    least = loss(best, 100, groups, momentum)
    for name, i, factor in itertools.product(("scales", "decays"), range(2), (0.999, 1.001)):
        values = list(getattr(best, name))
        values[i] *= factor
        if (name == "decays" and values[i] < 1.0) or (name == "scales" and sum(values) <= 1.0):
            assert loss(replace(best, **{name: tuple(values)}), 100, groups, momentum) >= least * (1.0 - 1e-8)


@pytest.mark.parametrize(
    ("scales", "decays", "message"),
    [
        ((), (), "1 to 8 buffers"),
        ((0.1,) * 9, (0.5,) * 9, "1 to 8 buffers"),
        ((0.1, 0.1), (0.5,), "1 to 8 buffers"),
        ((-0.1, 0.5), (0.5, 0.9), "scales must be > 0"),
        ((0.0,), (0.5,), "scales must be > 0"),
        ((0.6, 0.5), (0.5, 0.9), "sum of at most 1"),
        ((math.nan,), (0.5,), "scales must be > 0"),
        ((0.5,), (0.0,), r"decays must lie in \(0, 1\)"),
        ((0.5,), (1.0,), r"decays must lie in \(0, 1\)"),
        ((0.5,), (-0.5,), r"decays must lie in \(0, 1\)"),
        ((0.5,), (math.nan,), r"decays must lie in \(0, 1\)"),
    ],
)
def test_what_could_make_a_coefficient_negative_or_grow_is_refused(scales, decays, message):
    with pytest.raises(ValueError, match=message):
        BufferedToeplitz(scales, decays)


def test_a_run_has_at_least_one_round():
    with pytest.raises(ValueError, match="rounds must be"):
        buffered.optimise(2, 0, 1)
    with pytest.raises(ValueError, match="groups must be"):
        buffered.optimise(2, 10, 0)
    with pytest.raises(ValueError, match="releases must be"):
        STRATEGIES[1].coefficients(0)
    with pytest.raises(ValueError, match="since must be"):
        replace(STRATEGIES[1], since=-1)


class TestPrice:
    STRATEGY, CLIENTS, Z, ROUNDS, GROUPS, DELTA = STRATEGIES[1], 400, 4.0, 23, 5, 1e-5
    STEP = FloorStep("round", CyclicPoisson(0.3, CLIENTS, groups=GROUPS), Z, ROUNDS, STRATEGY)

    def test_a_whole_run_is_one_gaussian(self):
        """Of the norm of the added columns of the dense matrix, whatever the rate within a group."""
        taken = (np.arange(self.ROUNDS) % self.GROUPS == 0).astype(float)
        multiplier = self.Z / float(np.linalg.norm(dense(self.STRATEGY, self.ROUNDS) @ taken)) * (1.0 - ROUNDING)
        found = composition.epsilon([self.STEP], self.DELTA)
        _, interval = pld.refine(composition.merge_steps([self.STEP]), self.DELTA, "add_remove")
        one = from_gaussian_mechanism(multiplier, value_discretization_interval=interval)
        assert found == pytest.approx(one.get_epsilon_for_delta(self.DELTA), abs=1e-6)
        exact = dp_accounting.get_epsilon_gaussian(multiplier, self.DELTA)
        assert exact <= found <= exact * 1.001
        other = composition.epsilon([self.STEP], self.DELTA, "rdp")
        assert other == composition.epsilon([(Poisson(1.0, self.CLIENTS), multiplier / (1.0 - ROUNDING), 1)],
                                            self.DELTA, "rdp")  # fmt: skip
        assert other >= exact
        whole = replace(self.STEP, sampling=replace(self.STEP.sampling, rate=1.0))
        assert composition.epsilon([whole], self.DELTA) == found

    def test_one_group_is_a_cycle_too(self):
        FloorStep("round", replace(self.STEP.sampling, groups=1), self.Z, self.ROUNDS, self.STRATEGY)

    def test_every_release_counts(self):
        spent = [composition.epsilon([replace(self.STEP, count=n)], self.DELTA) for n in (1, 2, 5, 6, 22, 23)]
        assert all(later > earlier for earlier, later in itertools.pairwise(spent))
        assert composition.epsilon([replace(self.STEP, count=1)], self.DELTA) == composition.epsilon(
            [(Poisson(1.0, self.CLIENTS), self.Z, 1)], self.DELTA
        )

    def test_it_composes_with_other_releases_and_runs(self):
        other = FloorStep("round", Poisson(0.1, self.CLIENTS), 1.5, 10)
        share = self.STRATEGY.sensitivity(self.ROUNDS, self.GROUPS)
        one = (Poisson(1.0, self.CLIENTS), self.Z / share, 1)
        assert composition.epsilon([self.STEP, other, self.STEP], self.DELTA) == composition.epsilon(
            [one, other, one], self.DELTA
        )

    def test_the_noise_is_that_of_one_gaussian_times_what_a_client_moves(self):
        commitment, z = floor_commitment(
            2.0, self.DELTA, self.STEP.sampling, self.ROUNDS, correlation=self.STRATEGY
        )  # fmt: skip
        exact = calibrate(2.0, self.DELTA, Poisson(1.0, self.CLIENTS), 1)
        share = self.STRATEGY.sensitivity(self.ROUNDS, self.GROUPS)
        assert z == pytest.approx(exact * share, abs=2e-4 * share)
        assert composition.epsilon(commitment.floor, self.DELTA) <= 2.0
        assert commitment.floor == (replace(self.STEP, noise_multiplier=z),)

    def test_what_would_not_be_accounted_is_refused(self):
        part = Component("update", 1.0, self.Z, 3)
        event = ReleaseEvent("round", 1, replace(self.STEP.sampling, turn=0), (part,), correlation=self.STRATEGY)
        with pytest.raises(UnsupportedEvent, match="account the run's floor step"):
            composition.epsilon([event], self.DELTA)
        with pytest.raises(ValueError, match="must be CyclicPoisson"):
            FloorStep("round", Poisson(0.3, self.CLIENTS), self.Z, self.ROUNDS, self.STRATEGY)
        with pytest.raises(ValueError, match="one CyclicPoisson"):
            calibrate(2.0, self.DELTA, Poisson(0.3, self.CLIENTS), self.ROUNDS, correlation=self.STRATEGY)
        with pytest.raises(ValueError, match="queries must be empty"):
            calibrate(2.0, self.DELTA, self.STEP.sampling, self.ROUNDS, correlation=self.STRATEGY, queries=[5.0])
        with pytest.raises(ValueError, match="protects no one"):
            calibrate(19.5, self.DELTA, self.STEP.sampling, self.ROUNDS, correlation=self.STRATEGY)

    def test_a_floor_that_protects_no_one_is_refused_by_what_a_client_sees_of_it(self):
        commitment, _ = floor_commitment(2.0, self.DELTA, self.STEP.sampling, self.ROUNDS, correlation=self.STRATEGY)
        share = self.STRATEGY.sensitivity(self.ROUNDS, self.GROUPS)
        weak = replace(self.STEP, noise_multiplier=0.29 * share)
        assert weak.noise_multiplier > 0.3
        with pytest.raises(ValueError, match=r"noise_multiplier .* must be >= 0.3, got 0.29"):
            replace(commitment, floor=(weak,), epsilon=100.0)


def test_the_fewest_buffers_that_do_are_taken_with_as_many_groups_as_the_cohort_allows():
    found = buffered.choose(4.0, 1e-5, 1000, 0.07, 300)
    assert [one.correlation.buffers for one in found] == sorted((1, 2, 3, 4), key=lambda d: d != 1)
    assert {one.sampling for one in found} == {CyclicPoisson(14 * 0.07, 1000, groups=14)}
    errors = [one.error for one in found]
    assert errors[0] <= buffered.ENOUGH * min(errors)
    longer = buffered.choose(4.0, 1e-5, 1000, 0.001, 300)
    assert longer[0].correlation.buffers == 2
    assert longer[0].sampling.groups == 300
    assert longer[0].sampling.expected_units == pytest.approx(1.0)
    expected = math.sqrt(buffered.mean_error(longer[0].correlation, 300)) * longer[0].noise_multiplier
    assert longer[0].error == pytest.approx(expected, rel=1e-12)


def test_a_rate_that_is_one_over_a_number_has_that_many_groups():
    for groups in range(2, 60):
        assert buffered.turns(10_000, 1.0 / groups, 1000).groups == groups


def test_the_strategy_is_for_the_momentum_of_the_server():
    plain, heavy = (buffered.choose(4.0, 1e-5, 1000, 0.05, 100, momentum)[0] for momentum in (0.0, 0.9))
    assert heavy.correlation != plain.correlation
    expected = math.sqrt(buffered.mean_error(heavy.correlation, 100, 0.9)) * heavy.noise_multiplier
    assert heavy.error == pytest.approx(expected / heavy.sampling.expected_units, rel=1e-12)
    again = buffered.optimise(heavy.correlation.buffers, 100, heavy.sampling.groups, 0.9)
    assert again == heavy.correlation


def test_an_error_is_over_at_least_one_round():
    assert buffered.mean_error(STRATEGIES[0], 1) == pytest.approx(1.0)
