"""Percentile clipping: the fixed point is the clip rate that was asked for, and the nudge keeps its limits."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from privacy.events import Poisson
from privacy.queries import NormBit, NormHistogram
from strategies.controllers.controller import PublicSignals
from strategies.controllers.percentile import Percentile
from tests.cases.population import Population, constant, lognormal, setting_of

SAMPLING = Poisson(0.1, 1000)


@pytest.mark.run
@pytest.mark.parametrize("source", ["bit", "histogram"])
@pytest.mark.parametrize(("first", "rate"), [(8.0, 0.2), (0.3, 0.2), (8.0, 0.5)])
def test_the_share_of_clipped_clients_settles_at_the_target(
    source: str, first: float, rate: float, quick_ledger_for
) -> None:
    population = Population(quick_ledger_for(SAMPLING, 90), norms=lognormal(1.25, 0.5))
    controller = Percentile(clip_norm=first, clip_rate=rate, source=source, low_rate=0.1, high_rate=0.6)
    states = population.follow(controller, setting_of(90))
    bounds = np.array([state.bound for state in states[-40:]])
    clipped = norm.sf(np.log(bounds / 1.25) / 0.5)  # the true share of updates longer than C
    assert clipped.mean() == pytest.approx(rate, abs=0.04)
    assert np.mean([state.clip_rate for state in states[-40:]]) == pytest.approx(rate, abs=0.04)
    values = controller.released_values(states[-1], setting_of(90))
    assert values == {
        "clip-bound": states[-1].bound,
        "step-scale": states[-1].scale,
        "clip-rate": states[-1].clip_rate,
    }


@pytest.mark.parametrize("source", ["bit", "histogram"])
def test_the_step_grows_while_too_few_are_clipped_and_shrinks_while_too_many_are(source: str, quick_ledger_for) -> None:
    everyone = Poisson(1.0, 400)  # and little noise: every round's rate is on the right side of its limit
    controller = Percentile(
        lowest=1.0, highest=2.0, clip_norm=1.4, up=1.1, down=0.9, source=source, query_noise=4.0, history=0.5
    )
    for length in (0.01, 50.0):
        population = Population(quick_ledger_for(everyone, 14), sampling=everyone, norms=constant(length))
        states = population.follow(controller, setting_of(14, 1.0, everyone))
        scales = [controller.step_scale(state) for state in states]
        heard = [state.clip_rate >= 0 for state in states[1:]]
        assert heard[-1]
        factor = 1.1 if length < 1 else 0.9
        for before, after, said in zip(scales, scales[1:], heard, strict=False):
            assert after == pytest.approx(min(2.0, max(0.5, before * factor)) if said else before)
        assert scales[-1] == (2.0 if length < 1 else 0.5)
        assert states[-1].bound == (1.0 if length < 1 else 2.0)  # C keeps its range


def test_the_papers_factors_and_a_rate_between_the_limits() -> None:
    controller = Percentile()
    assert controller.nudge_scale(1.0, 0.05) == 1.01
    assert controller.nudge_scale(1.0, 0.35) == 0.995
    assert controller.nudge_scale(1.3, 0.2) == 1.3
    assert controller.nudge_scale(1.999, 0.0) == 2.0
    assert controller.nudge_scale(0.501, 1.0) == 0.5
    still = Percentile(up=1.0, down=1.0)
    assert [still.nudge_scale(1.0, rate) for rate in (0.0, 1.0)] == [1.0, 1.0]


@pytest.mark.parametrize(("source", "query", "alone"), [("bit", NormBit, 10.0), ("histogram", NormHistogram, 10.0)])
def test_what_c_follows_is_paid_for_inside_the_round(source: str, query: type, alone: float) -> None:
    controller = Percentile(source=source)
    plan = controller.plan(controller.init(setting_of(1), PublicSignals(0, None)), setting_of(1), 1)
    (asked,) = plan.queries
    assert isinstance(asked, query)
    assert asked.noise_std / asked.sensitivity == alone
    assert plan.noise_multiplier == pytest.approx((1.76**-2 - alone**-2) ** -0.5)
    assert plan.effective_noise_multiplier == pytest.approx(1.76, rel=1e-12)
    with pytest.raises(ValueError, match=r"no budget .*update"):
        controller.init(setting_of(1, 10.1), PublicSignals(0, None))


def test_before_the_first_release_there_is_no_clip_rate() -> None:
    controller = Percentile()
    state = controller.init(setting_of(1), PublicSignals(0, None))
    assert controller.released_values(state, setting_of(1)) == {"clip-bound": 3.0, "step-scale": 1.0}
    assert controller.step_scale(state) == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 65.0},
        {"clip_rate": 0.0},
        {"source": "norms"},
        {"learning_rate": 0.0},
        {"query_noise": -1.0},
        {"history": 1.0},
        {"lowest": 0.0},
        {"highest": 0.001},
        {"low_rate": 0.3},
        {"high_rate": 0.1},
        {"up": 0.9},
        {"down": 1.1},
        {"least_scale": 0.0},
        {"most_scale": math.inf},
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Percentile(**options)
