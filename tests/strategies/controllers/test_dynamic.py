"""Dynamic DP-SGD: end ratios of threshold and noise, and what the whole schedule costs, by PLD and by the filter."""

import math
from itertools import pairwise

import pytest

from privacy.accountants import composition
from privacy.clipping.norms import FlatClip
from privacy.errors import BudgetExceeded
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import GaussianNoise
from server.config.load import parse
from server.runs.commitment import commit_clients, round_sampling
from strategies.controllers.controller import RunInfo
from strategies.controllers.schedules import Dynamic
from tests.cases.population import Population

ROUNDS = 5


@pytest.mark.parametrize("mode", [pytest.param("floor", marks=pytest.mark.run), "filter"])
def test_both_modes_pay_for_the_schedule_and_its_ends_have_the_papers_ratios(mode: str, tmp_path) -> None:
    config = parse({"rounds": ROUNDS, "clients": 1000, "sampling-rate": 0.1, "privacy": {"epsilon": 2.0, "mode": mode}})
    controller = Dynamic(clip_norm=2.0, clip_ratio=0.3, noise_ratio=0.8)
    commitment, multipliers = commit_clients(config, controller)
    setting = RunInfo(ROUNDS, ((4,),), round_sampling(config), multipliers)
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        population = Population(ledger, sampling=setting.sampling, noise=GaussianNoise())
        states = population.follow(controller, setting)
        plans = [controller.plan(state, setting, round) for round, state in enumerate(states[:-1], start=1)]
        assert all(isinstance(plan.clip, FlatClip) for plan in plans)
        bounds = [plan.clip.bound for plan in plans]
        # C_t = C_0 rho_C^(t/T), sigma_t = sigma_0 rho_mu^(t/T): at t = T the ratios to C_0 and sigma_0 are the options.
        assert bounds[-1] == pytest.approx(0.3 * 2.0)
        assert [after / before for before, after in pairwise(bounds)] == pytest.approx([0.3 ** (1 / ROUNDS)] * 4)
        sigma_0 = plans[0].noise_multiplier / 0.8 ** (1 / ROUNDS)
        assert plans[-1].noise_multiplier / sigma_0 == pytest.approx(0.8)
        assert [event.effective_noise_multiplier for event in ledger.events] == pytest.approx(multipliers)
        # What was released costs the target: exactly by PLD in floor mode, by the filter's own price in filter mode.
        pld = composition.epsilon(ledger.events, config.privacy.delta, interval=1e-3)
        if mode == "floor":
            assert 0.99 * 2.0 < pld <= 2.002
            assert commitment.floor[0].noise_multiplier > commitment.floor[-1].noise_multiplier
        else:
            assert pld < 2.0
            assert 0.99 * 2.0 < ledger.epsilon_spent() <= 2.0
        with pytest.raises(BudgetExceeded):
            population.release(plans[-1], ROUNDS + 1)
        assert controller.released_values(states[1], setting)["clip-bound"] == bounds[1]
        assert controller.released_values(states[-1], setting)["noise-multiplier"] == multipliers[-1]


def test_without_a_profile_the_noise_is_constant() -> None:
    assert Dynamic(noise_ratio=1.0).profile(4) == (1.0,) * 4
    assert Dynamic(noise_ratio=0.25).profile(2) == (0.5, 0.25)


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.0}, {"clip_ratio": 0.0}, {"clip_ratio": 1.1}, {"noise_ratio": 0.001}, {"noise_ratio": math.nan}],
)
def test_values_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Dynamic(**options)
