"""Every registered method keeps the promises of the conformance suite, and every kind of broken promise is found."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Component, Poisson
from privacy.mechanism import Release
from privacy.queries import NormBit
from strategies import AGGREGATIONS, CONTROLLERS, OPTIMIZERS
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Rewritten
from strategies.aggregations.factors import Plain
from strategies.aggregations.fedsvd import FedSvd
from strategies.aggregations.ranks import ZeroPad
from strategies.conformance.aggregations import check_aggregation
from strategies.conformance.controllers import check_controller
from strategies.conformance.optimizers import check_optimizer
from strategies.conformance.purity import ConformanceError
from strategies.controllers.controller import InitialRelease, PublicSignals, RunInfo
from strategies.controllers.fixed import Fixed
from strategies.controllers.rl.controller import Rl
from strategies.optimizers.fedavg import FedAvg, FedAvgM
from strategies.optimizers.optimizer import ServerStep
from strategies.plugins import build
from tests.cases.controllers import VARIANTS

SETTING = RunInfo(6, ((4, 3),), Poisson(0.1, 1000), (1.5,) * 6)
INDIVIDUAL = {"flora", "fedex", "fedgsa"}


@pytest.mark.run
@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in CONTROLLERS for options in ({}, *VARIANTS.get(name, ()))]
)
def test_every_controller_conforms(name: str, options: dict[str, Any]) -> None:
    check_controller(build("strategy.controller", CONTROLLERS, name, options))


def test_an_agent_that_learns_conforms_too() -> None:
    check_controller(Rl(policy="scratch", interval=2, warm_up=1, batch=4, updates=1), info=SETTING)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_conforms(name: str) -> None:
    check_optimizer(build("strategy.optimizer", OPTIMIZERS, name, {}))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_conforms_or_is_not_for_sums(name: str) -> None:
    aggregation = build("strategy.aggregation", AGGREGATIONS, name, {})
    if name not in INDIVIDUAL:
        check_aggregation(aggregation)
        return
    with pytest.raises(ConformanceError, match=r"sum: .* needs every client's own factors"):
        check_aggregation(aggregation)


# --- planted violations: controllers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counting:
    """A state with something in it."""

    rounds: int = 0
    note: Any = None


@dataclass(frozen=True)
class Sound(Fixed):
    """A controller that counts; the planted ones below break one promise each."""

    def init(self, info: RunInfo, public: PublicSignals) -> Any:
        return Counting()

    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        return replace(state, rounds=state.rounds + 1)


class Clock(Sound):
    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        return replace(state, note=time.perf_counter_ns())


@dataclass(frozen=True)
class Hoarding(Sound):
    """Keeps what changes in itself: a resumed run would be another."""

    seen: list[float] = field(default_factory=list)

    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        self.seen.append(float(released.update.norm()))
        return replace(state, note=len(self.seen))


class PlansByHistory(Hoarding):
    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        self.seen.append(1.0)
        return super(Hoarding, self).update(state, info, released, public)

    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(1.0 + len(self.seen), info.dimension(round)), info.noise_multiplier(round))


class DrawsFromPython(Sound):
    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        return replace(state, note=0 * random.random())


class DrawsFromNumpy(Sound):
    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        np.random.random()
        return super().plan(state, info, round)


class SeedsTorch(Sound):
    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        torch.manual_seed(7)
        return replace(state, note=torch.rand(3))


class UnseededGenerator(Sound):
    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        return replace(state, note=float(np.random.default_rng().uniform()))


class TooLittleNoise(Sound):
    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return replace(super().plan(state, info, round), noise_multiplier=0.99 * info.noise_multiplier(round))


class FreeQuery(Sound):
    """A bit that the update does not pay for."""

    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return replace(super().plan(state, info, round), queries=(NormBit(self.clip_norm, 5.0),))


class FirstLayoutForEver(Sound):
    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(1.0, info.dimension(1)), info.noise_multiplier(round))


class Spendthrift(Sound):
    """In filter mode, nine tenths of the noise in every round."""

    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        plan = super().plan(state, info, round)
        return plan if info.order is None else replace(plan, noise_multiplier=0.9 * plan.noise_multiplier)


class Unannounced(Sound):
    """Announces one histogram and takes another."""

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return InitialRelease(sampling, (Component("norm-bit", 0.5, 50.0, 1),))

    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        from privacy.clipping.norms import NoUpdate

        return super().plan(state, info, round) if round else Plan(NoUpdate(), 1.0, (NormBit(1.0, 5.0),))


class LooseBit(NormBit):
    def answer(self, units: Any) -> Tensor:
        return 2 * super().answer(units)


class TooSensitive(Sound):
    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(1.0, info.dimension(round)), 30.0, (LooseBit(1.0, 5.0),))


class WholeCohort(FlatClip):
    """Divides by the norm of all rows: one client changes what the others add."""

    def encode(self, rows: Tensor) -> Tensor:
        encoded = super().encode(rows)
        return encoded / max(1.0, float(encoded.norm()))


class DependsOnOthers(Sound):
    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return Plan(WholeCohort(1.0, info.dimension(round)), info.noise_multiplier(round))


class ChangesTheRelease(Sound):
    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        released.update.zero_()
        return super().update(state, info, released, public)


class KeepsTheRelease(Sound):
    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        return replace(state, note=lambda: released)


@dataclass(frozen=True)
class Forgetful:
    """Compares equal, but a part is not stored."""

    bound: float = field(init=False, default=0.0)


class Rebuilt(Sound):
    def init(self, info: RunInfo, public: PublicSignals) -> Any:
        return Forgetful()

    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        new = Forgetful()
        object.__setattr__(new, "bound", state.bound + 1.0)
        return new

    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(1.0 + state.bound, info.dimension(round)), info.noise_multiplier(round))


class Fragile(Sound):
    """Cannot take a loss that is not a number."""

    reads_validation: ClassVar[bool] = True

    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        return replace(state, rounds=int(public.validation_loss or 0.0))


class Undeclared(Sound):
    """Reads the validation loss and does not say so."""

    def update(self, state: Any, info: RunInfo, released: Release, public: PublicSignals) -> Any:
        return replace(state, note=1.0 + public.validation_loss)  # type: ignore[operator]


class NotANumber(Sound):
    def step_scale(self, state: Any) -> float:
        return float("nan")


class NotReleased(Sound):
    def released_values(self, state: Any, info: RunInfo) -> dict[str, Any]:
        return {"update": torch.zeros(3)}


class NamesNoThreshold(Sound):
    def released_values(self, state: Any, info: RunInfo) -> dict[str, Any]:
        return {"threshold": 1.0}


class ShortProfile(Sound):
    def profile(self, rounds: int) -> tuple[float, ...]:
        return (1.0,) * (rounds - 1)


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        (Clock, "deterministic"),
        (Hoarding, "deterministic"),
        (PlansByHistory, "deterministic"),
        (DrawsFromPython, "global randomness"),
        (DrawsFromNumpy, "global randomness"),
        (SeedsTorch, "global randomness"),
        (UnseededGenerator, "deterministic"),
        (TooLittleNoise, "noise"),
        (FreeQuery, "noise"),
        (FirstLayoutForEver, "dimension"),
        (Spendthrift, "budget"),
        (Unannounced, "initial release"),
        (TooSensitive, "sensitivity"),
        (DependsOnOthers, "sensitivity"),
        (ChangesTheRelease, "inputs"),
        (KeepsTheRelease, "state"),
        (Rebuilt, "checkpoint"),
        (Fragile, "runs"),
        (Undeclared, "runs"),
        (NotANumber, "numbers"),
        (NotReleased, "numbers"),
        (NamesNoThreshold, "numbers"),
        (ShortProfile, "protocol"),
        (FedAvg, "protocol"),
    ],
)
def test_a_planted_controller_is_found(planted: type[Any], rule: str) -> None:
    before = torch.get_rng_state()
    try:
        with pytest.raises(ConformanceError) as error:
            check_controller(planted())
    finally:
        torch.set_rng_state(before)
    assert error.value.rule == rule, str(error.value)
    assert str(error.value).startswith(f"{rule}: ")


def test_the_planted_controllers_break_nothing_else() -> None:
    check_controller(Sound())


# --- planted violations: optimizers -------------------------------------------------------------------------------


class Ascending(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        return state, parameters - step.update


class InPlace(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        parameters += step.update
        return state, parameters


class InPlaceState(FedAvgM):
    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        state["momentum"] += step.update
        return state, parameters + state["momentum"]


class Wider(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        return state, (parameters + step.update).double()


class WholeAdapterOnly(FedAvgM):
    """Cannot train a part: its state has the size it began with."""

    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        momentum = torch.zeros(12)
        momentum[: len(parameters)] += step.update
        return {"momentum": momentum}, parameters + step.update


class MoreEveryRound(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        return {**state, f"update-{step.round}": step.update}, parameters + step.update


class Unguarded(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        return state, parameters + step.update / step.update.norm()


class Dithering(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
        return state, parameters + step.update * torch.rand(())


class StrangeMoments(FedAvgM):
    moments: ClassVar[Any] = {"velocity": 1}


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        (Ascending, "direction"),
        (InPlace, "inputs"),
        (InPlaceState, "inputs"),
        (Wider, "shapes"),
        (WholeAdapterOnly, "shapes"),
        (MoreEveryRound, "shapes"),
        (Unguarded, "finite"),
        (Dithering, "global randomness"),
        (StrangeMoments, "protocol"),
        (Fixed, "protocol"),
    ],
)
def test_a_planted_optimizer_is_found(planted: type[Any], rule: str) -> None:
    with pytest.raises(ConformanceError) as error:
        check_optimizer(planted())
    assert error.value.rule == rule, str(error.value)


# --- planted violations: aggregations -----------------------------------------------------------------------------


class RandomPart(Plain):
    def part(self, adapters: Any, round: int) -> TrainedSubset:
        return TrainedSubset("both", int(np.random.default_rng().integers(1, 5)))


class TooManyRanks(Plain):
    def part(self, adapters: Any, round: int) -> TrainedSubset:
        return TrainedSubset("both", adapters.rank + 1)


@dataclass(frozen=True)
class ScalesAfterwards(TrainedSubset):
    """Sends what it says, but multiplies what one client adds."""

    def sent_rows(self, engine: Any, updates: Tensor) -> Tensor:
        return super().sent_rows(engine, updates) * float(updates.norm())


class DataDependentScale(Plain):
    def part(self, adapters: Any, round: int) -> TrainedSubset:
        return ScalesAfterwards("both")


class RanksByCompany(ZeroPad):
    def client_ranks(self, adapters: Any, clients: Any) -> Any:
        return np.arange(len(clients)) % 3 + 1


class NoRanks(ZeroPad):
    def client_ranks(self, adapters: Any, clients: Any) -> Any:
        return np.zeros(len(clients), dtype=np.int64)


class Shrinking(FedSvd):
    def rewritten(self, adapter: Tensor, layout: Any) -> Rewritten | None:
        rewritten = super().rewritten(adapter, layout)
        return None if rewritten is None else replace(rewritten, adapter=0.9 * rewritten.adapter)


class WrongTurns(FedSvd):
    def rewritten(self, adapter: Tensor, layout: Any) -> Rewritten | None:
        rewritten = super().rewritten(adapter, layout)
        assert rewritten is not None
        return replace(rewritten, turns={pair: torch.eye(len(turn)) for pair, turn in rewritten.turns.items()})


class InPlaceRewriting(FedSvd):
    def rewritten(self, adapter: Tensor, layout: Any) -> Rewritten | None:
        rewritten = super().rewritten(adapter, layout)
        assert rewritten is not None
        adapter.copy_(rewritten.adapter)
        return rewritten


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        (RandomPart, "deterministic"),
        (TooManyRanks, "part"),
        (DataDependentScale, "sensitivity"),
        (RanksByCompany, "ranks"),
        (NoRanks, "ranks"),
        (Shrinking, "rewriting"),
        (WrongTurns, "rewriting"),
        (InPlaceRewriting, "inputs"),
        (FedAvg, "protocol"),
    ],
)
def test_a_planted_aggregation_is_found(planted: Callable[..., Any], rule: str) -> None:
    with pytest.raises(ConformanceError) as error:
        check_aggregation(planted())
    assert error.value.rule == rule, str(error.value)
