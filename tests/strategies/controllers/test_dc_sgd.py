"""DC-SGD-P finds its bin and DC-SGD-E the least error, from noisy histograms and from nothing else."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from privacy.clipping.norms import FlatClip
from privacy.events import Poisson
from privacy.randomness.noise import InsecureZeroNoise
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.dc_sgd import DcSgdE, DcSgdP, DcSgdState, least_error
from strategies.controllers.released_norms import norm_edges
from tests.cases.population import DIM, Population, lognormal, setting_of

SAMPLING = Poisson(0.1, 1000)
EDGES = norm_edges(1 / 256, 64.0)


@pytest.mark.parametrize(("share", "first"), [(0.23, 8.0), (0.23, 0.01), (0.45, 8.0), (0.7, 8.0)])
def test_p_finds_the_bin_of_its_share(share: float, first: float, quick_ledger_for) -> None:
    """Norms of median 1.25 and spread 0.5: the shares below the edges 1, 1.41, 2 are 0.33, 0.6, 0.83."""
    population = Population(quick_ledger_for(SAMPLING, 25), norms=lognormal(1.25, 0.5))
    states = population.follow(DcSgdP(clip_norm=first, share=share), setting_of(25))
    expected = next(edge for edge in EDGES if norm.cdf(math.log(edge / 1.25) / 0.5) > share)
    assert [state.bound for state in states[-10:]] == [expected] * 10


def test_c_stays_as_it_was_until_something_significant_was_seen(quick_ledger_for) -> None:
    population = Population(quick_ledger_for(SAMPLING, 12), norms=lognormal(1.25, 0.5))
    states = population.follow(DcSgdP(clip_norm=8.0), setting_of(12))
    bounds = [state.bound for state in states]
    moved = next(i for i, bound in enumerate(bounds) if bound != 8.0)
    assert 1 <= moved <= 6
    assert all(0.5 <= bound <= 2.0 for bound in bounds[moved:])
    deaf = Population(quick_ledger_for(SAMPLING, 12), norms=lognormal(1.25, 0.5))
    states = deaf.follow(DcSgdP(clip_norm=8.0, histogram_noise=300.0), setting_of(12))
    assert {state.bound for state in states} == {8.0}


@pytest.mark.parametrize("dimension", [1_000, 10_000, 40_000])
def test_e_finds_the_least_expected_error(dimension: int, quick_ledger_for) -> None:
    """Against the integral over the true law of norms, within the width of a bin."""

    def controller_setting(rounds: int) -> RunInfo:
        return RunInfo(rounds, ((dimension,),), SAMPLING, (1.76,) * rounds)

    population = Population(quick_ledger_for(SAMPLING, 30), norms=lognormal(1.25, 0.5))
    controller = DcSgdE(clip_norm=8.0)
    states = [controller.init(controller_setting(30), PublicSignals(0, None))]
    for round in range(1, 31):  # updates of DIM values stand for those of d: only their norms matter here
        plan = controller.plan(states[-1], controller_setting(30), round)
        assert isinstance(plan.clip, FlatClip)
        short = type(plan)(FlatClip(plan.clip.bound, DIM), plan.noise_multiplier, plan.queries)
        states.append(
            controller.update(
                states[-1], controller_setting(30), population.release(short, round), PublicSignals(round, None)
            )
        )
    noise = plan.noise_multiplier**2 * dimension / 100**2
    norms = 1.25 * np.exp(0.5 * norm.ppf((np.arange(4000) + 0.5) / 4000))
    best = minimize_scalar(lambda c: noise * c**2 + np.mean(np.maximum(norms - c, 0) ** 2), bounds=(0, 9)).x
    found = np.exp(np.mean([math.log(state.bound) for state in states[-15:]]))
    assert found == pytest.approx(best, rel=0.2)


@pytest.mark.parametrize("price", [1e-6, 0.01, 0.3, 5.0, 100.0])
def test_the_minimiser_is_exact(price: float) -> None:
    norms, parts = (0.1, 0.5, 1.0, 2.0, 8.0), (0.05, 0.25, 0.4, 0.2, 0.1)

    def error(c: float) -> float:
        return price * c**2 + sum(p * max(0.0, n - c) ** 2 for n, p in zip(norms, parts, strict=True))

    found = least_error(norms, parts, price)
    best = minimize_scalar(error, bounds=(0.0, 8.0), method="bounded", options={"xatol": 1e-10})
    assert found == pytest.approx(best.x, rel=1e-5)


def test_one_histogram_without_noise_is_read_as_it_is(quick_ledger_for) -> None:
    sampling = Poisson(1.0, 200)
    norms = [0.3] * 50 + [1.2] * 100 + [5.0] * 50
    population = Population(
        quick_ledger_for(sampling, 1),
        sampling=sampling,
        norms=lambda generator, round, units: np.array(norms),
        noise=InsecureZeroNoise(),
    )
    setting = setting_of(1, sampling=sampling)
    for share, expected in ((0.2, 0.3536), (0.3, 1.4142), (0.8, 5.657)):
        controller = DcSgdP(share=share, histogram_noise=2.0)
        plan = controller.plan(controller.init(setting, PublicSignals(0, None)), setting, 1)
        state = controller.update(
            controller.init(setting, PublicSignals(0, None)),
            setting,
            population.release(plan, 1),
            PublicSignals(1, None),
        )
        assert state.bound == pytest.approx(expected, rel=1e-3)
        population.ledger = quick_ledger_for(sampling, 1)


def test_the_histogram_is_paid_for_inside_the_round() -> None:
    for controller in (DcSgdP(), DcSgdE()):
        plan = controller.plan(controller.init(setting_of(1), PublicSignals(0, None)), setting_of(1), 1)
        (histogram,) = plan.queries
        assert (histogram.sensitivity, histogram.noise_std, histogram.dim) == (1.0, 10.0, len(EDGES) + 1)
        assert plan.noise_multiplier == pytest.approx((1.76**-2 - 10**-2) ** -0.5)
        assert plan.effective_noise_multiplier == pytest.approx(1.76, rel=1e-12)
        with pytest.raises(ValueError, match=r"< 10, .*'norm-histogram'"):
            controller.init(setting_of(1, 10.5), PublicSignals(0, None))


def test_history_is_remembered_and_can_be_switched_off(quick_ledger_for) -> None:
    states = Population(quick_ledger_for(SAMPLING, 6)).follow(DcSgdP(history=0.0), setting_of(6))
    assert isinstance(states[-1], DcSgdState)
    assert states[-1].histograms == 6
    assert all(before.history != after.history for before, after in pairwise(states))


@pytest.mark.parametrize("kind", [DcSgdP, DcSgdE])
@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.0}, {"histogram_noise": -1.0}, {"history": 1.0}, {"lowest": 0.0}, {"highest": 1 / 300}],
)
def test_values_that_cannot_work_are_refused(kind: type, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(**options)
    with pytest.raises(ValueError, match="share"):
        DcSgdP(share=1.0)
