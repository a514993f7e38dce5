"""ATDP's noise schedule: drawn before the run, committed step by step, paid for exactly."""

import math
from itertools import pairwise

import pytest
import torch

from privacy.accountants import composition
from privacy.errors import BudgetExceeded
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import GaussianNoise
from server.config.load import parse
from server.run_folder.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from server.runs.commitment import commit_clients, round_sampling
from strategies.conformance.controllers import check_controller
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.schedules import RiseReset
from strategies.server_update import ServerState
from tests.cases.population import Population

ROUNDS = 4


def test_it_rises_by_factors_within_the_limits_and_falls_back_to_the_start() -> None:
    schedule = RiseReset(growth=1.4, low=0.9, high=1.2, reset=4.0, seed=3).profile(60)
    assert schedule[0] == 1.0
    rises = [(before, after) for before, after in pairwise(schedule) if after != 1.0]
    assert all(1.4 * 0.9 <= after / before <= 1.4 * 1.2 for before, after in rises)
    falls = [before for before, after in pairwise(schedule) if after == 1.0]
    assert len(falls) >= 5
    assert all(before * 1.4 * 1.2 > 4.0 for before in falls)
    assert 3.0 < max(schedule) <= 4.0


def test_factors_come_from_the_seed_alone_and_once_every_epoch() -> None:
    one = RiseReset(seed=1)
    assert one.profile(20) == RiseReset(seed=1).profile(20) != RiseReset(seed=2).profile(20)
    assert one.profile(20)[:7] == one.profile(7)  # a longer run begins as a shorter one
    slow = RiseReset(seed=1, every=4).profile(12)
    assert [slow[i : i + 4] for i in (0, 4, 8)] == [(share,) * 4 for share in one.profile(3)]
    assert RiseReset(growth=1.0, low=1.0, high=1.0).profile(5) == (1.0,) * 5
    assert RiseReset(growth=1.0, low=0.5, high=0.5).profile(3) == (1.0,) * 3  # never below sigma_0


@pytest.mark.parametrize("mode", [pytest.param("floor", marks=pytest.mark.run), "filter"])
def test_the_whole_schedule_costs_the_asked_epsilon(mode: str, tmp_path) -> None:
    config = parse({"rounds": ROUNDS, "clients": 1000, "sampling-rate": 0.1, "privacy": {"epsilon": 2.0, "mode": mode}})
    controller = RiseReset(reset=2.5, every=2)
    commitment, multipliers = commit_clients(config, controller)
    assert [z / multipliers[0] for z in multipliers] == pytest.approx(controller.profile(ROUNDS))
    if mode == "floor":  # known before the run: every step stands in the commitment
        committed = [step.noise_multiplier for step in commitment.floor for _ in range(step.count)]
        assert committed == pytest.approx(list(multipliers))
    setting = RunInfo(ROUNDS, ((4,),), round_sampling(config), multipliers, commitment.order)
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        population = Population(ledger, sampling=setting.sampling, noise=GaussianNoise())
        states = population.follow(controller, setting)
        assert [event.effective_noise_multiplier for event in ledger.events] == pytest.approx(multipliers)
        assert 0.99 * 2.0 < ledger.epsilon_spent() <= 2.0
        if mode == "floor":
            pld = composition.epsilon(ledger.events, config.privacy.delta, interval=1e-3)
            assert 0.99 * 2.0 < pld <= 2.002
        with pytest.raises(BudgetExceeded):
            population.release(controller.plan(states[-1], setting, ROUNDS), ROUNDS + 1)
        assert controller.released_values(states[-1], setting) == {
            "clip-bound": 1.0,
            "noise-multiplier": multipliers[-1],
        }


def test_it_conforms_and_comes_back_from_a_checkpoint(tmp_path) -> None:
    check_controller(RiseReset(seed=5))
    controller = RiseReset()
    setting = RunInfo(ROUNDS, ((3, 1),), Population.__dataclass_fields__["sampling"].default_factory(), (1.5,) * ROUNDS)
    state = controller.init(setting, PublicSignals(0, None))
    state = controller.update(state, setting, None, PublicSignals(4, None))
    save_checkpoint(tmp_path, Checkpoint(ServerState(4, torch.zeros(4), torch.zeros(4), {}, state), None, (), "1:head"))
    fresh = ServerState(0, torch.zeros(4), torch.zeros(4), {}, controller.init(setting, PublicSignals(0, None)))
    assert load_checkpoint(tmp_path, fresh).state.controller == state


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.0}, {"growth": 0.9}, {"low": 0.0}, {"high": 0.5}, {"reset": 0.5}, {"every": 0}, {"low": math.nan}],
)
def test_values_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RiseReset(**options)
