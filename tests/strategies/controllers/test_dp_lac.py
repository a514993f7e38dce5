"""DP-LAC does what its paper says, keeps its guards, and ratchets as far as is known; fixed clipping is fixed."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Component, Poisson
from privacy.mechanism import Release
from privacy.queries import OneHotVote
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.rng import simulation_generator
from strategies.controllers.controller import InitialRelease, PublicSignals, RunInfo
from strategies.controllers.dp_lac import DpLac, LacState
from strategies.controllers.fixed import Fixed
from strategies.controllers.loss_following import GRID

SAMPLING = Poisson(0.05, 1000)
SETTING = RunInfo(rounds=200, layouts=((3, 2),), sampling=SAMPLING, noise_multipliers=(1.5,) * 200)


@pytest.fixture
def any_release(released) -> Release:
    plan = Plan(FlatClip(1.0, 5), 1.5)
    return released(plan, Contribution.zero(plan), SAMPLING)


def follow(controller: DpLac, losses: list[float], release: Release) -> list[float]:
    """Thresholds C_1, C_2, ... for validation losses v_0, v_1, ...; C_1 comes before any update."""
    state = controller.init(SETTING, PublicSignals(0, losses[0]))
    bounds = [bound_of(controller, state, 1)]
    for round, loss in enumerate(losses[1:], start=1):
        state = controller.update(state, SETTING, release, PublicSignals(round, loss))
        bounds.append(bound_of(controller, state, round + 1))
    return bounds


def bound_of(controller: DpLac, state: LacState, round: int) -> float:
    clip = controller.plan(state, SETTING, round).clip
    assert isinstance(clip, FlatClip)
    assert clip.params == 5
    return clip.bound


def test_the_papers_rule(any_release: Release) -> None:
    losses = [2.0, 1.8, 1.9, 1.5, 1.5, 1.2]
    expected = [8.0]
    for before, now in pairwise(losses):
        expected.append(min(1.0, now / before) * expected[-1])
    assert follow(DpLac(clip_norm=8.0), losses, any_release) == expected
    assert expected[1] == 8.0 * (1.8 / 2.0)  # C_1 = C_0, and v_1 / v_0 already decides C_2
    assert expected[2] == expected[1]  # a loss that rises leaves C alone


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize("smooth", [False, True])
def test_a_loss_that_is_no_positive_number_leaves_the_threshold_alone(
    bad: float, smooth: bool, any_release: Release
) -> None:
    controller = DpLac(clip_norm=4.0, smooth=smooth)
    with_gap = follow(controller, [2.0, 1.6, bad, 1.2, 1.0], any_release)
    without = follow(controller, [2.0, 1.6, 1.2, 1.0], any_release)
    assert with_gap[2] == with_gap[1]
    assert [*with_gap[:2], *with_gap[3:]] == without
    at_the_start = follow(controller, [bad, 1.6, 1.2, 1.0], any_release)
    assert at_the_start == [4.0, *follow(controller, [1.6, 1.2, 1.0], any_release)]


def test_without_a_first_evaluation_the_first_loss_is_the_reference(any_release: Release) -> None:
    controller = DpLac(clip_norm=4.0)
    state = controller.init(SETTING, PublicSignals(0, None))
    state = controller.update(state, SETTING, any_release, PublicSignals(1, 2.0))
    assert bound_of(controller, state, 2) == 4.0
    state = controller.update(state, SETTING, any_release, PublicSignals(2, 1.5))
    assert bound_of(controller, state, 3) == 3.0


def test_one_ratio_is_at_least_a_half_and_the_floor_holds(any_release: Release) -> None:
    assert follow(DpLac(clip_norm=8.0), [1.0, 1e-9], any_release) == [8.0, 4.0]
    falling = [2.0**-i for i in range(12)]
    bounds = follow(DpLac(clip_norm=8.0), falling, any_release)
    assert min(bounds) == bounds[-1] == 8.0 / 64
    assert follow(DpLac(clip_norm=8.0, floor=0.25), falling, any_release)[-1] == 2.0
    assert follow(DpLac(clip_norm=8.0, smooth=True), [2.0**-i for i in range(80)], any_release)[-1] == 8.0 / 64


@pytest.mark.parametrize(
    ("noise", "paper", "tolerance"), [(0.0, 0.368, 0.001), (0.005, 0.30, 0.02), (0.01, 0.18, 0.02), (0.02, 0.06, 0.01)]
)
def test_the_papers_rule_ratchets_down_on_noise_and_the_smoothed_one_does_not(
    noise: float, paper: float, tolerance: float, any_release: Release
) -> None:
    assert _final_share(noise, smooth=False, release=any_release) == pytest.approx(paper, abs=tolerance)
    assert _final_share(noise, smooth=True, release=any_release) == pytest.approx(0.385, abs=0.01)


def test_at_five_percent_of_noise_nothing_is_left_of_the_threshold(any_release: Release) -> None:
    assert _final_share(0.05, smooth=False, release=any_release) == pytest.approx(0.002, abs=0.001)
    assert _final_share(0.05, smooth=True, release=any_release) == pytest.approx(0.385, abs=0.02)


def _final_share(noise: float, smooth: bool, release: Release) -> float:
    """Mean over 20 runs of C_T / C_0 after 200 rounds in which the loss falls by e, with relative noise in its values.

    The expected shares are for C_1 = C_0 and no floor.
    """
    controller = DpLac(clip_norm=1.0, smooth=smooth, floor=1e-9)
    shares = []
    for seed in range(20):
        noises = simulation_generator(seed, "loss noise").standard_normal(201)
        losses = np.exp(-np.arange(201) / 200) * (1 + noise * noises)
        state = controller.init(SETTING, PublicSignals(0, float(losses[0])))
        for round in range(1, 201):
            state = controller.update(state, SETTING, release, PublicSignals(round, float(losses[round])))
        shares.append(bound_of(controller, state, 200))
    return float(np.mean(shares))


def test_a_given_threshold_takes_and_pays_for_no_histogram() -> None:
    assert DpLac(clip_norm=0.1).initial(SAMPLING) is None
    assert Fixed().initial(SAMPLING) is None


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0.05), (1.0, 1.0), (0.5, 0.5)])
def test_the_histogram_is_announced_as_it_is_released(rate: float, expected: float) -> None:
    controller = DpLac(histogram_noise=3.0, histogram_rate=rate)
    assert controller.initial(SAMPLING) == InitialRelease(
        Poisson(expected, 1000), (Component("vote", 1.0, 3.0, len(GRID)),)
    )
    plan = controller.plan(controller.init(SETTING, PublicSignals(0, 1.0)), SETTING, 0)
    assert plan.components() == (Component("vote", 1.0, 3.0, len(GRID)),)


def test_the_initial_plan_asks_for_votes_under_the_noise_a_round_will_carry() -> None:
    controller = DpLac()
    plan = controller.plan(controller.init(SETTING, PublicSignals(0, 1.0)), SETTING, 0)
    assert plan.clip == NoUpdate()
    (vote,) = plan.queries
    assert isinstance(vote, OneHotVote)
    assert vote.bins == tuple(2 ** (j / 2) for j in range(-12, 13))
    assert vote.candidates == (0.25, 0.5, 1.0)
    assert vote.simulated_noise_std_per_bound == pytest.approx(1.5 / 50)  # z / (q N)


def test_the_mode_of_the_noisy_histogram_becomes_the_first_threshold(released) -> None:
    controller = DpLac(histogram_noise=2.0)
    state = controller.init(SETTING, PublicSignals(0, 1.0))
    plan = controller.plan(state, SETTING, 0)
    votes = torch.tensor([7] * 20 + [3] * 9 + [24] * 9 + [-1] * 12)
    total = contribute(Units(torch.zeros(50, 5), votes=votes), plan)
    release = released(plan, total, SAMPLING, InsecureSeededNoise(0))
    assert not torch.equal(release.answers[0], release.answers[0].round())  # there is noise in it
    state = controller.update(state, SETTING, release, PublicSignals(0, None))
    assert bound_of(controller, state, 1) == GRID[7]
    assert controller.released_values(state, SETTING) == {"clip-bound": GRID[7]}
    state = controller.update(state, SETTING, release, PublicSignals(1, 0.75))
    assert bound_of(controller, state, 2) == 0.75 * GRID[7]


def test_a_plan_is_a_function_of_state_and_round() -> None:
    controller = DpLac(clip_norm=2.0)
    rising = replace(SETTING, noise_multipliers=tuple(1 + 0.01 * t for t in range(200)))
    state = controller.init(rising, PublicSignals(0, 1.0))
    assert controller.plan(state, rising, 3) == controller.plan(state, rising, 3) == Plan(FlatClip(2.0, 5), 1.02)


def test_the_validation_loss_is_needed(any_release: Release) -> None:
    controller = DpLac(clip_norm=1.0)
    state = controller.init(SETTING, PublicSignals(0, 1.0))
    with pytest.raises(ValueError, match=r"evaluation\.every = 1"):
        controller.update(state, SETTING, any_release, PublicSignals(1, None))
    assert controller.reads_validation
    assert not Fixed().reads_validation


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": -1.0},
        {"clip_norm": math.nan},
        {"histogram_noise": 0.0},
        {"histogram_rate": 1.5},
        {"floor": 0.0},
        {"floor": 2.0},
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DpLac(**options)


def test_fixed_clipping_never_changes(any_release: Release) -> None:
    controller = Fixed(0.5)
    state = controller.init(SETTING, PublicSignals(0, 1.0))
    assert controller.plan(state, SETTING, 1) == Plan(FlatClip(0.5, 5), 1.5)
    assert controller.update(state, SETTING, any_release, PublicSignals(1, 0.1)) == state
    assert controller.released_values(state, SETTING) == {"clip-bound": 0.5}
    assert controller.profile(3) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="clip_norm"):
        Fixed(0.0)


def test_a_setting_says_the_noise_of_every_round() -> None:
    setting = RunInfo(3, ((4, 6),), SAMPLING, (1.0, 2.0, 3.0))
    assert setting.dimension(0) == setting.dimension(3) == 10
    alternating = RunInfo(3, ((4, 6), (1, 2), (4, 6)), SAMPLING, (1.0, 2.0, 3.0))
    assert [alternating.dimension(round) for round in range(4)] == [10, 10, 3, 10]
    assert [setting.noise_multiplier(round) for round in range(4)] == [1.0, 1.0, 2.0, 3.0]
