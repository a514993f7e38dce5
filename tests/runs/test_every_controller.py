"""What holds for every registered controller: the commitment pays for it to the last release."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from privacy.commitment import Commitment
from privacy.contribution import Plan
from privacy.errors import BudgetExceeded
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import GaussianNoise
from server.config.load import parse
from server.config.methods import methods
from server.config.schema import RunConfig
from server.runs.commitment import commit_clients, round_sampling
from strategies import CONTROLLERS
from strategies.controllers.controller import RunInfo
from strategies.optimizers.fedavg import FedAvg
from tests.cases.controllers import VARIANTS
from tests.cases.population import Population

ROUNDS, EPSILON = 4, 3.0
LAYOUTS = ((3, 1), (1, 1), (2, 2), (3, 1))  # updates of other sizes in other rounds, as DP-DyLoRA has them
CASES = [(name, options) for name in CONTROLLERS for options in ({}, *VARIANTS.get(name, ()))]


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
    commitment, multipliers = commit_clients(config, made.controller)
    setting = RunInfo(ROUNDS, LAYOUTS, round_sampling(config), multipliers, commitment.order)
    return made.controller, setting, commitment


@pytest.mark.parametrize("mode", ["floor", "filter"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value).strip("{}"))
def test_the_commitment_pays_exactly_for_what_is_planned(
    name: str, options: dict[str, Any], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    controller, setting, commitment = committed(name, mode, tuple(options.items()))
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        population = Fitting(ledger, sampling=setting.sampling, noise=GaussianNoise())
        states = population.follow(controller, setting)
        rounds = [event for event in ledger.events if event.label == "round"]
        # Every component of a round is in the event, and the event has the noise the run was calibrated for.
        if (name, mode) != ("rl", "filter"):  # it may spend unevenly what the filter allows
            assert [event.effective_noise_multiplier for event in rounds] == pytest.approx(
                setting.noise_multipliers, rel=2e-9
            )
        for event, plan in zip(rounds, population.plans[-ROUNDS:], strict=True):
            assert [part.name for part in event.components] == ["update", *(query.name for query in plan.queries)]
        assert (controller.initial(setting.sampling) is not None) == (len(ledger.events) == ROUNDS + 1)
        for state in states:
            assert controller.step_scale(state) > 0
            assert all(math.isfinite(value) for value in controller.released_values(state, setting).values())
        # Nothing is left of the budget, and nothing more is paid for.
        assert 0.985 * EPSILON < ledger.epsilon_spent() <= ledger.epsilon_guaranteed() <= EPSILON * (1 + 1e-12)
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
