"""What holds for every registered controller: paid for to the last release, kept by a checkpoint, combined freely."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy.commitment import Commitment
from privacy.contribution import Plan
from privacy.errors import BudgetExceeded
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import GaussianNoise, InsecureZeroNoise
from server.config.load import parse
from server.config.methods import methods
from server.config.schema import RunConfig
from server.run_folder.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from server.runs.commitment import commit, round_sampling
from strategies import CONTROLLERS
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.optimizers.fedavg import FedAvg
from strategies.private_training import ServerState
from strategies.state_files import same_bits
from tests.cases.population import Population

ROUNDS, EPSILON = 4, 3.0
LAYOUTS = ((3, 1), (1, 1), (2, 2), (3, 1))  # updates of other sizes in other rounds, as DP-DyLoRA has them
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dp-lac": [{"clip-norm": 2.0, "smooth": True}],
    "dp-clac": [{"clip-norm": 2.0, "smooth": True, "centred": True}],
    "percentile": [{"source": "histogram"}],
}
CASES = [(name, options) for name in CONTROLLERS for options in ({}, *VARIANTS.get(name, ()))]
LONG = {"dynamic", "rise-reset"}  # a schedule is calibrated over all its rounds, in seconds
every_controller = pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, options, marks=[pytest.mark.slow] if name in LONG else []) for name, options in CASES],
    ids=lambda value: str(value).strip("{}"),
)


def configured(name: str, options: dict[str, Any], mode: str) -> RunConfig:
    strategy = {"controller": name, "controller-options": options, "optimizer-options": {"decay": 0.98}}
    privacy = {"epsilon": EPSILON, "mode": mode}
    return parse({"rounds": ROUNDS, "clients": 1000, "sampling-rate": 0.1, "privacy": privacy, "strategy": strategy})


@functools.cache
def committed(name: str, mode: str, options: tuple[tuple[str, Any], ...]) -> tuple[Any, RunInfo, Commitment]:
    """Controller, setting and commitment of a run; controllers without a release of their own share a calibration."""
    config = configured(name, dict(options), mode)
    made = methods(config)
    assert made.optimizer == FedAvg(decay=0.98)  # a decaying server learning rate goes with any controller
    commitment, multipliers = commit(config, made.controller)
    setting = RunInfo(ROUNDS, LAYOUTS, round_sampling(config), multipliers, commitment.order)
    return made.controller, setting, commitment


@pytest.mark.parametrize("mode", ["floor", "filter"])
@every_controller
def test_the_commitment_pays_exactly_for_what_is_planned(
    name: str, options: dict[str, Any], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    controller, setting, commitment = committed(name, mode, tuple(options.items()))
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        population = Fitting(ledger, sampling=setting.sampling, noise=GaussianNoise())
        population.follow(controller, setting)
        rounds = [event for event in ledger.events if event.label == "round"]
        # Every component of a round is in the event, and the event has the noise the run was calibrated for.
        if (name, mode) != ("rl", "filter"):  # it may spend unevenly what the filter allows
            assert [event.effective_noise_multiplier for event in rounds] == pytest.approx(
                setting.noise_multipliers, rel=2e-9
            )
        for event, plan in zip(rounds, population.plans[-ROUNDS:], strict=True):
            assert [part.name for part in event.components] == ["update", *(query.name for query in plan.queries)]
        assert (controller.initial(setting.sampling) is not None) == (len(ledger.events) == ROUNDS + 1)
        # Nothing is left of the budget, and nothing more is paid for.
        assert 0.985 * EPSILON < ledger.spent() <= ledger.guaranteed() <= EPSILON * (1 + 1e-12)
        with pytest.raises(BudgetExceeded):
            population.release(population.plans[-1], ROUNDS)
        assert len(ledger.events) == len(population.plans) - 1


class Fitting(Population):
    """A population whose updates have the size the plan asks for."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.plans: list[Plan] = []

    def release(self, plan: Plan, round: int, sampling: Any = None) -> Any:
        self.plans.append(plan)
        self.width = plan.clip.params or sum(LAYOUTS[0])
        return super().release(plan, round, sampling)


@every_controller
def test_a_controllers_state_survives_a_checkpoint_and_goes_on_to_the_same_plans(
    name: str, options: dict[str, Any], tmp_path: Path, quick_ledger_for
) -> None:
    controller, setting, _ = committed(name, "filter", tuple(options.items()))
    ledger = quick_ledger_for(setting.sampling, ROUNDS)
    whole = Fitting(ledger, sampling=setting.sampling, noise=InsecureZeroNoise())
    states = whole.follow(controller, setting)

    half = Fitting(quick_ledger_for(setting.sampling, ROUNDS), sampling=setting.sampling, noise=InsecureZeroNoise())
    before = half.follow(controller, setting, rounds=2)[-1]
    server = ServerState(2, torch.zeros(6), torch.zeros(6), {}, before)
    save_checkpoint(tmp_path, Checkpoint(server, None, (), "1:head"))
    fresh = ServerState(0, torch.zeros(6), torch.zeros(6), {}, controller.init(setting, PublicSignals(0, None)))
    restored = load_checkpoint(tmp_path, fresh).state.controller
    assert same_bits(restored, before)
    assert controller.plan(restored, 3) == controller.plan(before, 3) == whole.plans[-2]
    assert controller.step_scale(restored) == controller.step_scale(before)
    assert same_bits(half.follow(controller, setting, rounds=2, state=restored)[-1], states[-1])


@every_controller
def test_what_is_shown_is_plain_numbers_and_state_does_not_change_in_place(
    name: str, options: dict[str, Any], quick_ledger_for
) -> None:
    controller, setting, _ = committed(name, "filter", tuple(options.items()))
    population = Fitting(quick_ledger_for(setting.sampling, ROUNDS), sampling=setting.sampling)
    for round, state in enumerate(population.follow(controller, setting)[:ROUNDS], start=1):
        assert controller.plan(state, round) == controller.plan(state, round)
        assert controller.plan(state, round).clip.params == setting.dimension(round)
        values = controller.released_values(state)
        assert all(type(value) is float and math.isfinite(value) for value in values.values())
        scale = controller.step_scale(state)
        assert type(scale) is float
        assert scale > 0
