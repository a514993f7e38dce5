"""From a release to the next adapter where rounds train different parts of it, at different scales."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from privacy.randomness.noise import GaussianNoise, InsecureZeroNoise
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters
from strategies.aggregations.factors import Plain, RoLora
from strategies.aggregations.ranks import DyLora, ZeroPad
from strategies.controllers.controller import RunInfo
from strategies.controllers.fixed import Fixed
from strategies.dp_fedavg import DpFedAvg
from strategies.optimizers.fedavg import FedAvg, FedAvgM
from strategies.optimizers.optimizer import ServerStep


def make(fed, aggregation: Any, **parts: Any) -> DpFedAvg:
    adapters, rounds = Adapters(2, fed.N, 0), range(1, fed.ROUNDS + 1)
    layouts = tuple(aggregation.part(adapters, round).layout(fed.LAYOUT).blocks() for round in rounds)
    setting = RunInfo(fed.ROUNDS, layouts, fed.SAMPLING, (1.5,) * fed.ROUNDS)
    return fed.make(aggregation=aggregation, info=setting, **parts)


def test_rolora_moves_b_then_a_and_each_keeps_its_momentum(fed) -> None:
    beta = 0.5
    strategy, nodes = make(fed, RoLora(), optimizer=FedAvgM(momentum=beta)), fed.Nodes()
    expected, momentum = fed.START.clone(), torch.zeros(fed.DIM)
    # In the full vector: A of 6 values, B of 6, the head of 2.
    trained = {"b": torch.arange(6, 14), "a": torch.tensor([0, 1, 2, 3, 4, 5, 12, 13])}
    for round in range(1, 5):
        release = fed.hold(strategy, nodes)
        place = trained["b" if round % 2 else "a"]
        assert nodes.requests[-1][1].part == TrainedSubset("b" if round % 2 else "a")
        assert len(release.update) == 8
        momentum[place] = beta * momentum[place] + release.update
        expected[place] += momentum[place]
        torch.testing.assert_close(fed.state_of(strategy).adapter, expected)
        torch.testing.assert_close(fed.state_of(strategy).optimizer["momentum"], momentum)


def test_scales_are_undone_after_the_release(fed) -> None:
    """The nodes of this federation send their rows as they are: they are taken to be scaled already."""
    strategy, nodes = make(fed, Plain(scale_a=4.0, scale_b=0.5)), fed.Nodes()
    release = fed.hold(strategy, nodes)
    scales = torch.tensor([4.0] * 6 + [0.5] * 6 + [1.0] * 2)
    torch.testing.assert_close(fed.state_of(strategy).adapter, fed.START + release.update / scales)


@dataclass(frozen=True)
class Remembers(FedAvg):
    """Keeps what it was told."""

    told: ClassVar[list[ServerStep]] = []

    def step(self, state: dict[str, Tensor], parameters: Tensor, step: ServerStep) -> tuple[dict[str, Tensor], Tensor]:
        self.told.append(step)
        return super().step(state, parameters, step)


def test_the_noise_told_is_that_of_adapter_values(fed) -> None:
    Remembers.told.clear()
    for scale, noise in ((4.0, GaussianNoise()), (1.0, GaussianNoise()), (1.0, InsecureZeroNoise())):
        fed.hold(make(fed, Plain(scale_a=scale), optimizer=Remembers(), noise=noise), fed.Nodes())
    scaled, plain, none = Remembers.told
    each = 1.5 * fed.BOUND / (fed.RATE * fed.N)
    torch.testing.assert_close(scaled.noise_std, torch.tensor([each / 4] * 6 + [each] * 8))
    assert plain.noise_std.shape == ()
    assert float(plain.noise_std) == pytest.approx(each)
    assert not none.noise_std.any()


def test_dylora_sends_and_moves_the_first_ranks_only(fed) -> None:
    strategy, nodes = make(fed, DyLora()), fed.Nodes()
    ranks = []
    for round in range(1, fed.ROUNDS + 1):
        before = fed.state_of(strategy).adapter
        release = fed.hold(strategy, nodes)
        part = strategy.planner.part(round)
        assert nodes.requests[-1][1].part == part
        assert nodes.requests[-1][1].ranks is None
        ranks.append(part.ranks)
        assert len(release.update) == {1: 8, 2: 14}[part.ranks]
        assert strategy.ledger.events[-1].components[0].dim == len(release.update)
        moved = fed.state_of(strategy).adapter - before
        if part.ranks == 1:
            assert not moved[3:6].any(), "the second row of A"
            assert not moved[[7, 9, 11]].any(), "the second column of B"
        torch.testing.assert_close(
            part.layout(fed.LAYOUT).trainable_values(moved), release.update, rtol=1e-4, atol=1e-6
        )
    assert set(ranks) == {1, 2}


def test_zero_pad_tells_every_client_its_rank(fed) -> None:
    strategy, nodes = make(fed, ZeroPad("1,2")), fed.Nodes()
    fed.hold(strategy, nodes)
    told = {
        int(c): int(r) for _, request in nodes.requests for c, r in zip(request.clients, request.ranks, strict=True)
    }
    assert set(told.values()) == {1, 2}
    fed.hold(strategy, nodes)
    for _, request in nodes.requests:
        for client, rank in zip(request.clients.tolist(), request.ranks.tolist(), strict=True):
            assert told.setdefault(client, rank) == rank


@dataclass(frozen=True)
class Quarter(Fixed):
    """A controller that wants quarter steps."""

    def step_scale(self, state: None) -> float:
        return 0.25


def test_the_controllers_factor_is_on_the_servers_step(fed) -> None:
    strategy = make(fed, Plain(), controller=Quarter(fed.BOUND), optimizer=FedAvg(2.0))
    release = fed.hold(strategy, fed.Nodes())
    torch.testing.assert_close(fed.state_of(strategy).adapter, fed.START + 0.5 * release.update)
