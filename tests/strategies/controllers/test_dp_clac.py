"""DP-CLAC: loss and update share one event, losses are cut where the last release says, C follows the noisy loss."""

import math
from itertools import pairwise

import numpy as np
import pytest

from privacy.clipping.norms import FlatClip
from privacy.events import Poisson
from privacy.queries import BoundedMean, LossHistogram, OneHotVote
from privacy.randomness.noise import InsecureZeroNoise
from strategies.controllers.controller import PublicSignals
from strategies.controllers.dp_clac import LOSS_EDGES, ClacState, DpClac
from strategies.controllers.loss_following import GRID
from tests.cases.population import Population, constant, setting_of

SAMPLING = Poisson(0.1, 1000)
EVERYONE = Poisson(1.0, 400)


def test_a_third_of_the_event_pays_for_the_loss(quick_ledger_for) -> None:
    controller = DpClac(clip_norm=1.0)
    states = Population(quick_ledger_for(SAMPLING, 2)).follow(controller, setting_of(2, 2.0))
    first, second = (
        controller.plan(state, setting_of(2, 2.0), round) for round, state in enumerate(states[:2], start=1)
    )
    for plan, kind in ((first, LossHistogram), (second, BoundedMean)):
        (query,) = plan.queries
        assert isinstance(query, kind)
        assert plan.noise_multiplier == pytest.approx(2.0 * math.sqrt(3 / 2))  # 1.225 z
        assert query.noise_std / query.sensitivity == pytest.approx(2.0 * math.sqrt(3))  # 1.732 z
        assert plan.effective_noise_multiplier == pytest.approx(2.0, rel=1e-12)
    tenth = DpClac(clip_norm=1.0, loss_share=0.1)
    plan = tenth.plan(tenth.init(setting_of(2, 2.0), PublicSignals(0, None)), setting_of(2, 2.0), 1)
    assert plan.noise_multiplier == pytest.approx(2.0 / math.sqrt(0.9))
    assert plan.effective_noise_multiplier == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize(("loss", "first"), [(0.6, 2**-0.5), (2.7, 2**1.5), (99.0, 16.0), (0.0, 2**-4)])
def test_the_fullest_bin_of_the_first_round_gives_the_first_loss_threshold(
    loss: float, first: float, quick_ledger_for
) -> None:
    population = Population(quick_ledger_for(SAMPLING, 1), losses=constant(loss))
    (_, state) = population.follow(DpClac(clip_norm=1.0), setting_of(1))
    assert state.loss_bound == first
    assert state.bound == 1.0
    assert math.isnan(state.loss)  # a threshold is no loss: the first ratio is v_3 / v_2
    (_, centred) = Population(quick_ledger_for(SAMPLING, 1), losses=constant(loss)).follow(
        DpClac(clip_norm=1.0, centred=True), setting_of(1)
    )
    assert centred.loss_bound == min(16.0, 2 * first)


def test_later_thresholds_and_c_follow_the_noisy_mean(quick_ledger_for) -> None:
    """Everyone takes part and has the loss 0.95^t, so that v_t is known but for its noise."""
    population = Population(
        quick_ledger_for(EVERYONE, 12),
        sampling=EVERYONE,
        losses=lambda generator, round, units: np.full(units, 0.7 * 0.95**round),
    )
    controller = DpClac(clip_norm=4.0)
    states = population.follow(controller, setting_of(12, 0.5, EVERYONE))
    for round, (before, after) in enumerate(pairwise(states[1:]), start=2):
        expected = min(0.7 * 0.95**round, before.loss_bound)
        assert after.mean_loss == pytest.approx(expected, rel=0.02)  # 1.732 x 0.5 x L / 400 is 0.2 % of it
        assert after.loss_bound == max(0.01, after.mean_loss)
        if math.isnan(before.loss):
            assert after.bound == before.bound == 4.0
        else:
            assert after.bound == pytest.approx(before.bound * min(1.0, max(0.5, after.loss / before.loss)))
    assert states[-1].bound == pytest.approx(4.0 * 0.95**10, rel=0.1)
    values = controller.released_values(states[-1], setting_of(12, 0.5, EVERYONE))
    assert values == {
        "clip-bound": states[-1].bound,
        "loss-bound": states[-1].loss_bound,
        "mean-loss": states[-1].mean_loss,
    }
    assert controller.released_values(states[0], setting_of(12, 0.5, EVERYONE)) == {"clip-bound": 4.0}


def steady(centred: bool, smooth: bool, quick_ledger_for) -> list[ClacState]:
    """40 rounds at m = 100 in which the clients' losses stay 0.7 with a spread of 0.15."""
    population = Population(
        quick_ledger_for(SAMPLING, 40),
        losses=lambda generator, round, units: 0.7 + 0.15 * generator.standard_normal(units),
    )
    return population.follow(DpClac(clip_norm=1.0, centred=centred, smooth=smooth), setting_of(40))


def test_as_published_c_collapses_where_no_loss_falls_and_centring_prevents_it(quick_ledger_for) -> None:
    published = steady(False, False, quick_ledger_for)
    assert published[-1].bound < 0.2
    assert published[-1].mean_loss < 0.4  # the mean of losses cut at the last mean drifts away from 0.7
    centred = steady(True, True, quick_ledger_for)
    assert centred[-1].bound > 0.9
    assert np.mean([state.mean_loss for state in centred[10:]]) == pytest.approx(0.7, rel=0.05)


def test_the_least_loss_keeps_the_threshold_positive(quick_ledger_for) -> None:
    population = Population(quick_ledger_for(SAMPLING, 6), losses=constant(0.0), noise=InsecureZeroNoise())
    states = population.follow(DpClac(clip_norm=1.0, least_loss=0.03), setting_of(6))
    assert [state.loss_bound for state in states[2:]] == [0.03] * 5
    assert {state.bound for state in states} == {1.0}  # a loss of 0 has no ratio


def test_the_vote_decides_where_c_begins_and_is_an_event_of_its_own(quick_ledger_for) -> None:
    controller = DpClac()
    ledger = quick_ledger_for(SAMPLING, 1)
    states = Population(ledger, vote=9).follow(controller, setting_of(1))
    assert states[0].bound == states[0].first_bound == GRID[9]
    assert [event.label for event in ledger.events] == ["histogram", "round"]
    fresh = controller.init(setting_of(1), PublicSignals(0, None))
    plan = controller.plan(fresh, setting_of(1), 0)
    (vote,) = plan.queries
    assert isinstance(vote, OneHotVote)
    assert vote.simulated_noise_std_per_bound == pytest.approx(1.76 * math.sqrt(1.5) / 100)
    release = controller.initial(SAMPLING)
    assert release is not None
    assert release.components == plan.components()
    clip = controller.plan(states[0], setting_of(1), 1).clip
    assert isinstance(clip, FlatClip)
    assert clip.bound == GRID[9]
    assert DpClac(clip_norm=1.0).initial(SAMPLING) is None
    assert not controller.reads_validation
    assert len(LOSS_EDGES) == 17


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": -1.0},
        {"histogram_noise": 0.0},
        {"histogram_rate": 2.0},
        {"floor": 0.0},
        {"loss_share": 1.0},
        {"least_loss": 0.0},
        {"least_loss": 17.0},
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DpClac(**options)
