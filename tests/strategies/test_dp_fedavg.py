"""DP-FedAvg over a federation in memory: who is asked, what is summed, and what becomes of it."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.mechanism import Release
from privacy.randomness.noise import GaussianNoise
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.factors import Ffa
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.loss_following import GRID
from strategies.controllers.quantile import Quantile, QuantileState
from strategies.optimizers.fedavg import FedAvgM


def test_a_round_adds_the_mean_of_clipped_updates_over_the_expected_cohort(fed) -> None:
    strategy, nodes = fed.make(), fed.Nodes()
    release = fed.hold(strategy, nodes)
    assert len(nodes.cohort) != fed.RATE * fed.N  # else the divisor would not show
    torch.testing.assert_close(release.update, fed.expected_mean(nodes.cohort).float())
    assert release.expected_units == fed.RATE * fed.N
    torch.testing.assert_close(fed.state_of(strategy).adapter, fed.START + release.update, rtol=0, atol=0)
    assert fed.state_of(strategy).round == 1


def test_the_release_depends_neither_on_order_nor_on_nodes_nor_on_how_clients_are_sent(fed) -> None:
    releases = []
    for ids, shuffle, clients_per_node in [
        ((1, 2, 3), None, None),
        ((1, 2, 3), 1, None),
        ((1, 2, 3), 2, None),
        ((8,), None, None),
        (range(1, 40), 3, None),
        ((1, 2, 3), None, 1),
        (range(1, fed.N + 1), 4, 1),
    ]:
        strategy = fed.make(nodes=len(list(ids)), clients_per_node=clients_per_node)
        releases.append(fed.hold(strategy, fed.Nodes(ids), shuffle).update)
    for other in releases[1:]:
        assert torch.equal(releases[0], other)


def test_balancing_by_work_changes_no_sum(fed) -> None:
    plain = fed.hold(fed.make(), fed.Nodes()).update
    nodes = fed.Nodes()
    assert torch.equal(plain, fed.hold(fed.make(work=np.arange(fed.N, dtype=float) ** 3), nodes).update)
    assert len({len(request.clients) for _, request in nodes.requests}) > 1


def test_with_one_client_per_message_a_client_is_always_the_same_node(fed) -> None:
    nodes = fed.Nodes(range(101, 101 + fed.N))
    strategy = fed.make(nodes=fed.N, clients_per_node=1)
    fed.hold(strategy, nodes)
    fed.hold(strategy, nodes)
    assert all(len(request.clients) == 1 for _, request in nodes.requests)
    assert all(node == 101 + int(request.clients[0]) for node, request in nodes.requests)


def test_requests_carry_the_whole_adapter_the_plan_and_the_factors(fed) -> None:
    strategy, nodes = fed.make(job='{"a": 1}'), fed.Nodes()
    fed.hold(strategy, nodes)
    fed.hold(strategy, nodes)
    first, last = nodes.requests[0][1], nodes.requests[-1][1]
    np.testing.assert_array_equal(first.adapter, fed.START.numpy())
    assert not np.array_equal(last.adapter, fed.START.numpy())
    assert (first.plan, first.part, first.round, first.job) == (
        Plan(FlatClip(fed.BOUND, fed.DIM), 1.5),
        TrainedSubset("both"),
        1,
        '{"a": 1}',
    )
    assert last.round == 2


def test_ffa_releases_and_moves_b_and_the_head_only(fed) -> None:
    setting = RunInfo(fed.ROUNDS, (fed.LAYOUT.training("b").blocks(),), fed.SAMPLING, (1.5,) * fed.ROUNDS)
    strategy, nodes = fed.make(aggregation=Ffa(), info=setting, optimizer=FedAvgM()), fed.Nodes()
    release = fed.hold(strategy, nodes)
    assert {request.part for _, request in nodes.requests} == {TrainedSubset("b")}
    assert len(release.update) == 8
    adapter = fed.state_of(strategy).adapter
    assert torch.equal(adapter[:6], fed.START[:6])
    torch.testing.assert_close(adapter[6:], fed.START[6:] + release.update, rtol=0, atol=0)


def test_the_optimizer_sees_the_round_and_keeps_its_state(fed) -> None:
    strategy, nodes = fed.make(optimizer=FedAvgM(learning_rate=2.0, decay=0.5, momentum=0.5)), fed.Nodes()
    first, second = fed.hold(strategy, nodes).update, fed.hold(strategy, nodes).update
    expected = fed.START + 2.0 * first + 1.0 * (0.5 * first + second)
    torch.testing.assert_close(fed.state_of(strategy).adapter, expected)
    torch.testing.assert_close(fed.state_of(strategy).optimizer["momentum"], 0.5 * first + second)


def test_the_served_adapter_is_the_debiased_average(fed) -> None:
    beta, adapters = 0.8, []
    strategy, nodes = fed.make(served_average=beta), fed.Nodes()
    for _ in range(4):
        fed.hold(strategy, nodes)
        adapters.append(fed.state_of(strategy).adapter)
        weights = [beta ** (len(adapters) - 1 - i) for i in range(len(adapters))]
        expected = sum(w * x for w, x in zip(weights, adapters, strict=True)) / sum(weights)
        torch.testing.assert_close(fed.state_of(strategy).served, expected)
    without = fed.make()
    fed.hold(without, fed.Nodes())
    assert torch.equal(fed.state_of(without).served, fed.state_of(without).adapter)


def test_dp_lac_begins_with_a_histogram_that_moves_no_adapter(fed) -> None:
    strategy, nodes = fed.make(controller=DpLac(histogram_rate=1.0)), fed.Nodes()
    assert fed.state_of(strategy).round == -1
    release = fed.hold(strategy, nodes)
    assert nodes.cohort == list(range(fed.N))
    assert (fed.state_of(strategy).round, torch.equal(fed.state_of(strategy).adapter, fed.START)) == (0, True)
    assert release.answers[0][7] == 40.0
    assert strategy.next_release().plan.clip == FlatClip(GRID[7], fed.DIM)
    assert [(event.label, event.round) for event in strategy.ledger.events] == [("histogram", 0)]
    fed.hold(strategy, nodes)
    fed.hold(strategy, nodes)
    bounds = [request.plan.clip.bound for _, request in nodes.requests if request.round]
    assert bounds[0] == GRID[7]
    assert bounds[-1] == pytest.approx(0.9 * GRID[7])
    assert [(event.label, event.round) for event in strategy.ledger.events[1:]] == [("round", 1), ("round", 2)]


@dataclass(frozen=True)
class Restless:
    """A controller that never plans the same twice, as one does that samples its action."""

    reads_validation = False
    counter: list[float] = field(default_factory=lambda: [1.0])

    def initial(self, sampling: Poisson) -> None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return (1.0,) * rounds

    def init(self, info: RunInfo, public: PublicSignals) -> None:
        return None

    def plan(self, state: None, info: RunInfo, round: int) -> Plan:
        self.counter[0] *= 2
        return Plan(FlatClip(self.counter[0], 14), 1.5)

    def update(self, state: None, info: RunInfo, released: Release, public: PublicSignals) -> None:
        return None

    def step_scale(self, state: None) -> float:
        return 1.0

    def released_values(self, state: None, info: RunInfo) -> dict[str, float]:
        return {}


def test_the_plan_that_clipped_is_the_plan_that_noises(fed) -> None:
    strategy, nodes = fed.make(controller=Restless()), fed.Nodes()
    for _ in range(3):
        assert strategy.refusal() is None
        release = fed.hold(strategy, nodes)
        assert nodes.requests[-1][1].plan == release.plan
    assert len({request.plan for _, request in nodes.requests}) == 3


@dataclass(frozen=True)
class Listening(Quantile):
    """Keeps what it is told of the clip bit."""

    heard: list[float] = field(default_factory=list)

    def update(self, state: QuantileState, info: RunInfo, released: Release, public: PublicSignals) -> QuantileState:
        self.heard.append(float(released.answer("norm-bit")))
        return super().update(state, info, released, public)


def test_a_controller_hears_of_a_count_with_its_noise_only(fed) -> None:
    """A sum of bits is a multiple of a half; with noise it is not, and differs from run to run."""
    exact, first, second = (Listening(bit_noise=5.0) for _ in range(3))
    fed.hold(fed.make(controller=exact), fed.Nodes())
    for controller in (first, second):
        fed.hold(fed.make(controller=controller, noise=GaussianNoise()), fed.Nodes())
    assert 2 * exact.heard[0] == round(2 * exact.heard[0])
    assert len({exact.heard[0], first.heard[0], second.heard[0]}) == 3


def test_a_step_over_an_exchange_is_the_round_that_flower_drives(fed) -> None:
    driven, stepped = fed.make(), fed.make()
    with pytest.raises(ValueError, match="needs a grid and an exchange"):
        stepped.step()
    assert stepped.ledger.events == ()
    for _ in range(2):
        release = fed.hold(driven, fed.Nodes())
        nodes = fed.Nodes()
        stepped.grid, stepped.exchange = nodes, nodes.send_and_receive  # type: ignore[assignment]
        assert torch.equal(stepped.step().update, release.update)
        stepped.observe(PublicSignals(stepped.state.round, None))
        assert torch.equal(stepped.state.adapter, driven.state.adapter)
    assert [event.round for event in stepped.ledger.events] == [1, 2]


def test_a_sum_of_more_units_than_were_drawn_is_no_release(fed) -> None:
    """One that was topped up after the draw, say; counts show it whatever the norms are."""
    strategy = fed.make(controller=DpLac())
    planned = strategy.next_release()
    cohort = strategy.cohort(planned)
    with pytest.raises(ValueError, match="must be a possible sum over the units that were asked"):
        planned.release(fed.sum_of([*cohort.ids, 0], planned.plan), cohort, strategy.ledger, None)
    assert not strategy.ledger.events
    planned.release(fed.sum_of(cohort.ids, planned.plan), cohort, strategy.ledger, None)
    assert [event.sampling for event in strategy.ledger.events] == [cohort.sampling]
