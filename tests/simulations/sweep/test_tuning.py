"""The noise of a private sweep's candidates: all of it together within the target, and close to it."""

from dataclasses import replace
from pathlib import Path

import pytest

from privacy.accountants import composition, selection
from privacy.commitment import POISSON, Tries
from server.config.load import ConfigError
from server.config.methods import methods
from server.runs.commitment import commit_clients
from simulations.sweep.cells import Cell, read_cells
from simulations.sweep.tuning import TuningPlan, every_cell_once, plan_tuning, refuse_unlike
from strategies.calibration import Calibrated

BASE = """
clients = 500
sampling-rate = 0.1
rounds = 10
[privacy]
epsilon = 3.0
delta = 1e-4
"""
SWEEP = """
name = "small"
[variants.fixed]
strategy.controller = "fixed"
[variants.loose]
strategy.controller = "fixed"
strategy.controller-options.clip-norm = 4.0
[variants.longer]
strategy.controller = "fixed"
rounds = 30
[variants.histogram]
strategy.controller = "dp-lac"
sampling-rate = 0.05
[[grids]]
name = "g"
base = "base.toml"
variants = ["fixed", "loose", "longer", "histogram"]
seeds = [0]
"""


def noise_of(cell: Cell, epsilon: float) -> Calibrated:
    privacy = cell.config.privacy.model_copy(update={"epsilon": epsilon})
    return commit_clients(cell.config.model_copy(update={"privacy": privacy}), methods(cell.config).controller)


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "small.toml").write_text(SWEEP)
    return read_cells(tmp_path / "small.toml", tmp_path)[1]


def check(plan: TuningPlan, cells: list[Cell]) -> None:
    """What every plan must be, by the accountant and not by the plan's own word."""
    floors = [plan.noise[cell.key].commitment.floor for cell in cells]
    total, order = selection.epsilon(plan.tries, floors, plan.delta)
    assert (total, order) == (plan.total, plan.order)
    assert 0.985 * plan.epsilon < total <= plan.epsilon
    for cell, floor in zip(cells, floors, strict=True):
        found = plan.noise[cell.key].commitment
        assert (found.epsilon, found.delta) == (cell.config.privacy.epsilon, cell.config.privacy.delta)
        assert composition.epsilon(floor, plan.delta) <= plan.alone
        assert found.tuning is not None
        assert set(found.tuning.candidates) == set(floors)
        assert len(plan.noise[cell.key].multipliers) == cell.config.rounds


@pytest.mark.run
@pytest.mark.parametrize("law", [Tries(2.0, POISSON), Tries(8.0, 1.0)])
def test_candidates_of_equal_noise_share_one_curve(cells: list[Cell], law: Tries) -> None:
    plan = plan_tuning(cells[:2], law, noise_of)
    check(plan, cells[:2])
    tuning = plan.noise[cells[0].key].commitment.tuning
    assert tuning is not None
    assert len(tuning.candidates) == 1
    assert "by repeat-and-select, RDP order" in plan.statement


@pytest.mark.run
@pytest.mark.nightly  # most of a minute
def test_cells_of_other_rounds_rates_and_releases_are_bounded_by_the_largest_curve(cells: list[Cell]) -> None:
    plan = plan_tuning(cells, Tries(4.0, POISSON), noise_of)
    check(plan, cells)
    for cell in cells:
        own, _ = selection.epsilon(plan.tries, [plan.noise[cell.key].commitment.floor], plan.delta)
        assert own <= plan.total


@pytest.mark.run
@pytest.mark.nightly  # most of a minute
def test_more_tries_leave_a_candidate_less(cells: list[Cell]) -> None:
    alone = [plan_tuning(cells[:1], Tries(mean, 0.0), noise_of).alone for mean in (1.0, 3.0, 9.0)]
    assert alone == sorted(alone, reverse=True)
    assert alone[0] < 3.0, "RDP and not PLD accounts the whole"


@pytest.mark.run
def test_the_alternative_composes_every_cell_once(cells: list[Cell]) -> None:
    each, noise = every_cell_once(cells[:2], noise_of)
    steps = [step for one in noise.values() for step in one.commitment.floor]
    assert 2.95 < composition.epsilon(steps, 1e-4) <= 3.0
    assert 1.5 < each < 3.0, "more than half: composition by PLD is not a sum of epsilons"


def test_noise_that_does_not_follow_the_target_is_refused(cells: list[Cell]) -> None:
    stuck = noise_of(cells[0], 3.0)
    with pytest.raises(ConfigError, match=r"privacy.epsilon = 3: .*--tries"):
        plan_tuning(cells[:1], Tries(4.0, 1.0), lambda cell, epsilon: stuck)


@pytest.mark.run
def test_cells_over_other_units_are_refused(cells: list[Cell]) -> None:
    def other(cell: Cell, epsilon: float) -> Calibrated:
        config = cell.config.model_copy(update={"clients": 400 if cell is cells[1] else 500})
        return noise_of(replace(cell, config=config), epsilon)

    with pytest.raises(ValueError, match="units"):
        plan_tuning(cells[:2], Tries(2.0, 1.0), other)


def test_refusals_name_cell_key_and_both_values(cells: list[Cell]) -> None:
    refuse_unlike(cells)
    other = replace(cells[1], config=cells[1].config.model_copy(update={"seed": 4}))
    with pytest.raises(ConfigError, match=r"g/loose/seed=0: seed = 4, and g/fixed/seed=0 has 0: .*--only"):
        refuse_unlike([cells[0], other])
    site = cells[1].config.site.model_copy(update={"sampling_level": "example"})
    with pytest.raises(ConfigError, match=r"g/loose/seed=0: site\.sampling-level = 'example' must be 'user'"):
        refuse_unlike([cells[0], replace(cells[1], config=cells[1].config.model_copy(update={"site": site}))])
    with pytest.raises(ConfigError, match="'public-only' takes no part"):
        refuse_unlike([cells[0], replace(cells[1], kind="public-only")])
