"""Quantile clipping finds the quantile from above and from below, by bits that are paid for, and only with its sign."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.stats import norm

from privacy.events import Poisson
from privacy.mechanism import Release
from privacy.randomness.noise import InsecureZeroNoise
from server.config.load import ConfigError, parse
from server.runs.commitment import commit_clients
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.quantile import Quantile, QuantileState
from tests.cases.population import Population, setting_of

SAMPLING = Poisson(0.1, 1000)
MEDIAN, SIGMA = 3.0, 0.5  # of the norms of Population


def settled(population: Population, controller: Quantile, rounds: int = 90) -> float:
    """Geometric mean of C over the last 40 rounds."""
    states = population.follow(controller, setting_of(rounds))
    return float(np.exp(np.mean([math.log(state.bound) for state in states[-40:]])))


def of_the_law(gamma: float) -> float:
    return MEDIAN * math.exp(SIGMA * norm.ppf(gamma))


@pytest.mark.run
@pytest.mark.parametrize(("first", "gamma"), [(0.1, 0.5), (30.0, 0.5), (0.3, 0.8), (30.0, 0.2)])
def test_the_threshold_converges_to_the_quantile(first: float, gamma: float, quick_ledger_for) -> None:
    population = Population(quick_ledger_for(SAMPLING, 90))
    found = settled(population, Quantile(clip_norm=first, quantile=gamma))
    assert found == pytest.approx(of_the_law(gamma), rel=0.08)


@dataclass(frozen=True)
class WrongSign(Quantile):
    """Flower's bug: the share of CLIPPED clients where that of the unclipped ones belongs."""

    def update(self, state: QuantileState, info: RunInfo, released: Release, public: PublicSignals) -> QuantileState:
        right = super().update(state, info, released, public)
        wrong = state.bound * math.exp(-self.learning_rate * ((1 - right.unclipped) - self.quantile))
        return replace(right, bound=wrong)


@pytest.mark.run
@pytest.mark.parametrize("first", [2.5, 3.5])
def test_with_the_sign_of_the_wrong_share_the_threshold_runs_away(first: float, quick_ledger_for) -> None:
    found = settled(Population(quick_ledger_for(SAMPLING, 90)), WrongSign(clip_norm=first))
    assert not 0.5 < found / of_the_law(0.5) < 2.0


def test_one_step_is_the_papers(quick_ledger_for) -> None:
    population = Population(quick_ledger_for(SAMPLING, 1), noise=InsecureZeroNoise())
    state = Quantile(clip_norm=3.0, quantile=0.4, learning_rate=0.3).init(setting_of(1), PublicSignals(0, None))
    controller = Quantile(clip_norm=3.0, quantile=0.4, learning_rate=0.3)
    plan = controller.plan(state, setting_of(1), 1)
    released = population.release(plan, 1)
    share = 0.5 + float(released.answers[0]) / 100  # by the expected cohort, whoever came
    after = controller.update(state, setting_of(1), released, PublicSignals(1, None))
    assert after.bound == pytest.approx(3.0 * math.exp(-0.3 * (share - 0.4)), rel=1e-12)
    assert controller.released_values(after, setting_of(1)) == {"clip-bound": after.bound, "unclipped-share": share}
    assert controller.released_values(state, setting_of(1)) == {"clip-bound": 3.0}


def test_an_empty_cohort_says_nothing_for_either_side(quick_ledger_for) -> None:
    nobody = Poisson(1e-9, 1000)
    population = Population(quick_ledger_for(nobody, 1), sampling=nobody, noise=InsecureZeroNoise())
    controller = Quantile(clip_norm=3.0, bit_noise=5.0)
    states = population.follow(controller, setting_of(1, sampling=nobody))
    assert states[-1] == replace(states[0], unclipped=0.5)


@pytest.mark.parametrize(("z", "expected"), [(3.24, 3.4247), (1.22, 1.2292)])
def test_the_update_pays_for_the_bit(z: float, expected: float) -> None:
    """m = 100, so sigma_b = 5: z_D = (z^-2 - 10^-2)^(-1/2)."""
    controller = Quantile()
    plan = controller.plan(controller.init(setting_of(3, z), PublicSignals(0, None)), setting_of(3, z), 1)
    assert plan.noise_multiplier == pytest.approx(expected, abs=1e-4)
    assert plan.effective_noise_multiplier == pytest.approx(z, rel=1e-12)
    (bit,) = plan.queries
    assert (bit.sensitivity, bit.noise_std) == (0.5, 5.0)


def test_a_bit_that_leaves_no_budget_is_refused_before_anything_is_spent() -> None:
    setting = RunInfo(2, ((4,),), SAMPLING, (1.0, 2.0))
    with pytest.raises(ValueError, match=r"< 2, .*'norm-bit'.* got 2"):
        Quantile(bit_noise=1.0).init(setting, PublicSignals(0, None))
    privacy = {"epsilon": 1.0, "delta": 1e-3, "mode": "filter"}  # which needs no loss distribution
    config = parse({"rounds": 3, "clients": 60, "sampling-rate": 0.25, "privacy": privacy})
    with pytest.raises(ConfigError, match=r"strategy\.controller = .*an expected cohort of 15 is too small.*norm-bit"):
        commit_clients(config, Quantile())


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.0}, {"quantile": 1.5}, {"quantile": -0.1}, {"learning_rate": 0.0}, {"bit_noise": -1.0}],
)
def test_values_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Quantile(**options)
