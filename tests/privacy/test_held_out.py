"""Units that are held out: who they are, that no cohort of training holds one, and that the parts do not add up."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from privacy.accountants import composition
from privacy.accountants.attack_rates import bound_of_events
from privacy.commitment import Commitment, FloorStep
from privacy.errors import BudgetExceeded
from privacy.events import Component, PartPoisson, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from privacy.randomness.sampling import CohortSampler, held_out, split_units

N, SHARE, SEED = 400, 0.25, 5
TRAINED, OUT = split_units(Poisson(0.2, N), SHARE, SEED, 1.0)
ROUNDS, EVALUATIONS = FloorStep("round", TRAINED, 1.5, 30), FloorStep("evaluation", OUT, 4.0, 10)
FLOOR = (ROUNDS, EVALUATIONS)


def test_the_part_of_a_unit_is_its_own_matter() -> None:
    """Units that come behind it, or do not, move nobody: what parallel composition rests on."""
    whole = held_out(N, SHARE, SEED)
    for fewer in (1, 7, N - 1):
        assert (held_out(fewer, SHARE, SEED) == whole[:fewer]).all()
    assert (held_out(N, 0.5, SEED) >= whole).all(), "a larger share only adds units"
    assert (held_out(N, SHARE, SEED + 1) != whole).any()
    assert OUT.members == whole.sum() == N - TRAINED.members
    assert (OUT.expected_units, TRAINED.expected_units) == (OUT.members, pytest.approx(0.2 * TRAINED.members))


def test_a_cohort_is_of_its_part_alone() -> None:
    sampler, out = CohortSampler.create(), held_out(N, SHARE, SEED)
    drawn = np.zeros(N, dtype=int)
    for round in range(300):
        drawn[sampler.draw(TRAINED, round).ids] += 1
    assert (drawn[out] == 0).all()
    assert abs(drawn[~out].mean() - 60) < 5 * np.sqrt(300 * 0.16 / TRAINED.members)
    assert (sampler.draw(OUT, 1, label="evaluation").ids == np.flatnonzero(out)).all()


def test_a_part_of_another_size_is_refused() -> None:
    lying = PartPoisson(1.0, N, "client", True, SHARE, SEED, OUT.members - 1)
    with pytest.raises(ValueError, match="members must be the number of units in that part"):
        CohortSampler.create().draw(lying, 1)
    with pytest.raises(ValueError, match="must leave some in both parts, got 0 held out"):
        split_units(Poisson(1.0, 5), 1e-6, 0, 1.0)


def test_disjoint_parts_cost_the_larger_of_both() -> None:
    delta = 1e-5
    alone = [composition.epsilon([step], delta) for step in FLOOR]
    assert composition.epsilon(FLOOR, delta) == max(alone)
    assert composition.tightest_bound(FLOOR, delta)[0] <= max(alone)
    pairs = composition.curve(FLOOR, [1e-6, delta], suits=delta)
    for (_, both), *each in zip(
        pairs, *(composition.curve([s], [1e-6, delta], suits=delta) for s in FLOOR), strict=True
    ):
        assert both == max(epsilon for _, epsilon in each)


def test_everybody_is_in_both_parts_and_two_splits_share_units() -> None:
    delta, shared = 1e-5, FloorStep("histogram", Poisson(1.0, N), 3.0)
    alone = [composition.epsilon([step, shared], delta) for step in FLOOR]
    assert composition.epsilon([*FLOOR, shared], delta) == max(alone) > composition.epsilon(FLOOR, delta)
    other = FloorStep("evaluation", split_units(Poisson(1.0, N), SHARE, SEED + 1, 1.0)[1], 4.0, 10)
    both = composition.epsilon([ROUNDS, other], delta)
    assert both > max(composition.epsilon([step], delta) for step in (ROUNDS, other)), "a unit may be in one of each"


def test_attacks_on_either_part_are_bounded() -> None:
    both = bound_of_events(FLOOR, suits=1e-5)
    for step in FLOOR:
        assert both.true_positive_rate(0.01) >= bound_of_events([step], suits=1e-5).true_positive_rate(0.01) - 1e-6


def test_a_ledger_pays_each_part_from_its_own_steps(tmp_path: Path) -> None:
    epsilon = composition.epsilon(FLOOR, 1e-5)
    commitment = Commitment("client", "add_remove", N, epsilon, 1e-5, floor=FLOOR)
    assert Commitment.from_json(json.loads(json.dumps(commitment.to_json()))) == commitment
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        spent = [0.0]
        for round in range(1, 11):
            ledger.charge(ReleaseEvent("round", round, TRAINED, (Component("update", 1.0, 1.5, 8),)))
            ledger.charge(ReleaseEvent("evaluation", round, OUT, (Component("loss", 1.0, 4.0, 1),)))
            spent.append(ledger.epsilon_spent())
        assert all(before < after for before, after in pairwise(spent))
        ten = FloorStep("round", TRAINED, 1.5, 10)
        assert spent[-1] == pytest.approx(composition.epsilon([ten, EVALUATIONS], 1e-5), rel=1e-3)
        with pytest.raises(BudgetExceeded, match="all committed releases labelled 'evaluation' are used"):
            ledger.charge(ReleaseEvent("evaluation", 11, OUT, (Component("loss", 1.0, 4.0, 1),)))
        with pytest.raises(BudgetExceeded, match="sample as committed"):
            ledger.charge(ReleaseEvent("round", 11, OUT, (Component("update", 1.0, 1.5, 8),)))
        said = privacy_statement(ledger)
    assert said["epsilon"] <= epsilon + 1e-4
    assert "are held out by their number and a public seed, are never trained on" in said["mechanism"]
    assert said["sampling"]["evaluation"] == f"all {OUT.members} held-out of {N} clients"
