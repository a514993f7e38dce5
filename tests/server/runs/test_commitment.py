"""From a target to what a run commits to: the target is kept, the histogram is in it, and the impossible is refused."""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from privacy.accountants import composition
from privacy.clipping.norms import FlatClip
from privacy.commitment import Commitment
from privacy.contribution import Plan
from privacy.events import Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, parse
from server.config.schema import RunConfig
from server.runs.commitment import commit_clients, not_private_reason, round_sampling
from strategies.controllers.controller import InitialRelease, PublicSignals, RunInfo
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.controllers.quantile import Quantile


def small(**privacy: object) -> RunConfig:
    privacy = {"epsilon": 3.0, "delta": 1e-3} | privacy
    return parse({"rounds": 3, "clients": 60, "sampling-rate": 0.25, "privacy": privacy})


@dataclass(frozen=True)
class Falling(Fixed):
    """Less noise every round."""

    def profile(self, rounds: int) -> tuple[float, ...]:
        return tuple(1.5 - 0.25 * round for round in range(rounds))


@functools.cache
def committed(controller: Fixed | DpLac) -> tuple[Commitment, tuple[float, ...]]:
    return commit_clients(small(), controller)


@pytest.mark.run
@pytest.mark.parametrize("controller", [Fixed(), DpLac(), Falling()])
def test_the_commitment_costs_the_target_and_hardly_less(controller: Fixed | DpLac) -> None:
    commitment, multipliers = committed(controller)
    steps = [(step.sampling, step.noise_multiplier, step.count) for step in commitment.floor]
    assert 0.99 * 3.0 < composition.epsilon(steps, 1e-3) <= 3.0
    assert (commitment.epsilon, commitment.delta, commitment.population) == (3.0, 1e-3, 60)
    assert (commitment.unit, commitment.adjacency, commitment.not_private) == ("client", "add_remove", None)
    rounds = [step for step in commitment.floor if step.label == "round"]
    assert [step.noise_multiplier for step in rounds for _ in range(step.count)] == pytest.approx(multipliers)
    assert len(multipliers) == 3


@dataclass(frozen=True)
class Stumbling(Fixed):
    """Fails at its first plan, as one under construction does."""

    def plan(self, state, info, round):
        return state.no_such_thing


def test_what_a_users_controller_raises_is_told_with_its_place() -> None:
    ours = small(mode="filter")  # which needs no loss distribution
    mine = ours.model_copy(update={"strategy": ours.strategy.model_copy(update={"controller": "my:Stumbling"})})
    with pytest.raises(
        ConfigError, match=r"'my:Stumbling': AttributeError: .*no_such_thing.* \(.*test_commitment.py, line"
    ):
        commit_clients(mine, Stumbling())
    with pytest.raises(AttributeError):  # in one of the package's it is our fault
        commit_clients(ours, Stumbling())


@pytest.mark.run
def test_the_histogram_is_part_of_the_target() -> None:
    without, with_it = committed(Fixed()), committed(DpLac())
    assert [step.label for step in without[0].floor] == ["round"]
    histogram = with_it[0].floor[0]
    assert (histogram.label, histogram.noise_multiplier, histogram.sampling) == ("histogram", 2.0, Poisson(0.25, 60))
    assert with_it[1][0] > without[1][0]


@pytest.mark.run
def test_noise_follows_the_controllers_profile() -> None:
    _, multipliers = committed(Falling())
    assert [m / multipliers[0] for m in multipliers] == pytest.approx([1.0, 1.25 / 1.5, 1.0 / 1.5])


@pytest.mark.parametrize("mode", [pytest.param("floor", marks=pytest.mark.run), "filter"])
def test_the_ledger_pays_for_what_the_controller_plans_and_for_no_more(mode: str, tmp_path: Path) -> None:
    config, controller = small(mode=mode), DpLac()
    commitment, multipliers = committed(controller) if mode == "floor" else commit_clients(config, controller)
    setting = RunInfo(3, ((4,),), round_sampling(config), multipliers)
    initial = controller.initial(setting.sampling)
    assert isinstance(initial, InitialRelease)
    state = controller.init(setting, PublicSignals(0, 1.0))
    events = [ReleaseEvent("histogram", 0, initial.sampling, controller.plan(state, setting, 0).components())]
    state = replace(state, bound=1.0, first_bound=1.0)  # what the histogram decides
    for round in (1, 2, 3, 3):
        events.append(
            ReleaseEvent("round", round, setting.sampling, controller.plan(state, setting, round).components())
        )
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        spent = []
        for event in events[:-1]:
            assert ledger.would_exceed(event) is None
            ledger.charge(event)
            spent.append(ledger.epsilon_spent())
        assert ledger.would_exceed(events[-1]) is not None
        assert spent == sorted(spent)
        assert 0.9 * 3.0 < spent[-1] <= 3.0


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [(1e-3, "privacy.epsilon = 0.001: .*extra releases"), (1e4, "privacy.epsilon = 10000: .* protects no one")],
)
def test_a_target_that_no_noise_can_keep_is_refused(epsilon: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        commit_clients(small(epsilon=epsilon), DpLac())


def test_a_cohort_too_small_for_what_is_asked_of_it_is_refused_in_plain_words() -> None:
    config = parse({"clients": 20, "rounds": 40, "privacy": {"delta": 1e-3}, "strategy": {"controller": "quantile"}})
    with pytest.raises(ConfigError, match=r"'quantile': an expected cohort of 1 is too small\. .*clients \(now 20\)"):
        commit_clients(config, Quantile())
    commit_clients(parse({**config.to_table(), "clients": 9000, "privacy": {"delta": 1e-5}}), Quantile())


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({}, None),
        ({"non-private": True}, "privacy.non-private = true"),
        ({"non-private": True, "noise": "insecure-zero"}, "no noise is added"),
        ({"non-private": True, "seeded-cohorts": True}, "cohorts can be foretold"),
        ({"non-private": True, "noise": "insecure-zero", "seeded-cohorts": True}, "; cohorts can be foretold"),
    ],
)
def test_what_voids_the_guarantee_is_in_the_commitment(
    privacy: dict[str, object], words: str | None, tmp_path: Path
) -> None:
    config = small(mode="filter", **privacy)
    reason = not_private_reason(config)
    commitment, _ = commit_clients(config, Fixed())
    assert commitment.not_private == reason
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        if words is None:
            assert reason is None
            assert ledger.epsilon_spent() < 3.0
        else:
            assert reason is not None
            assert words in reason
            assert ledger.epsilon_spent() == math.inf


@dataclass(frozen=True)
class OwnClip(FlatClip):
    """A clip map the nodes do not have."""

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "kind": "own"}


class OwnPlan(Fixed):
    """A controller of a user's own that plans with it."""

    def plan(self, state: object, info: object, round: int) -> Plan:
        return Plan(OwnClip(self.clip_norm, 1), 1.0)


def test_a_plan_that_nodes_could_not_read_is_refused_before_anything_is_spent() -> None:
    with pytest.raises(ConfigError, match=r"nodes: .*'own'"):
        commit_clients(small(mode="filter"), OwnPlan())


def test_noise_with_which_no_client_of_a_secure_sum_takes_part_is_refused_before_the_first_charge() -> None:
    """Every client would refuse the round, which is charged by then."""
    config = parse(
        {
            "rounds": 1, "clients": 6, "sampling-rate": 1.0, "simulation": {"clients-per-node": 1},
            "privacy": {"epsilon": 30.0, "delta": 1e-3, "trust": "secagg", "mode": "filter", "noise": "discrete"},
        }
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"privacy\.epsilon = 30 with rounds = 1 .* from 0\.3 on: lower privacy\.epsilon"
    ):
        commit_clients(config, Fixed())
    privacy = config.privacy.model_copy(update={"epsilon": 8.0})
    commit_clients(config.model_copy(update={"privacy": privacy}), Fixed())
