"""FedSVD changes the coordinates and nothing else: not the function, not the optimizer's direction, not the average."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.contribution import Plan, contribute
from privacy.events import Poisson
from privacy.mechanism import Release
from privacy.randomness.noise import InsecureZeroNoise
from privacy.randomness.rng import torch_generator
from strategies.adapter.layout import AdapterLayout, Entry, turn_factors
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.factors import Ffa
from strategies.aggregations.fedsvd import FedSvd, by_singular_values
from strategies.optimizers.fedadam import FedAdam
from strategies.optimizers.fedavg import FedAvg, FedAvgM
from strategies.server_update import ServerState, ServerUpdate

OUT, RANK, IN, ROUNDS = 12, 3, 8, 6
LAYOUT = AdapterLayout(
    (
        Entry("q.lora_A.weight", (RANK, IN), 0, "A", "q"),
        Entry("q.lora_B.weight", (OUT, RANK), RANK * IN, "B", "q"),
        Entry("v.lora_A.weight", (RANK, IN), RANK * (IN + OUT), "A", "v"),
        Entry("v.lora_B.weight", (IN, RANK), RANK * (2 * IN + OUT), "B", "v"),
        Entry("classifier.bias", (2,), RANK * (3 * IN + OUT), "head", "classifier"),
    )
)


def random(*shape: int, name: str = "") -> Tensor:
    return torch.randn(*shape, generator=torch_generator(0, "fedsvd", name, *shape))


def products(vector: Tensor) -> list[Tensor]:
    q_a, q_b, v_a, v_b, _ = (entry.of(vector.double()) for entry in LAYOUT.entries)
    return [q_b @ q_a, v_b @ v_a]


def close(found: Tensor, expected: Tensor, within: float = 1e-6) -> None:
    for one, other in zip(products(found), products(expected), strict=True):
        assert float((one - other).norm()) <= within * max(1.0, float(other.norm()))
    assert torch.allclose(found[-2:], expected[-2:])


def start(b: str = "zero") -> Tensor:
    full = random(LAYOUT.size, name="start")
    for entry in LAYOUT.entries:
        if entry.factor == "B":
            values = entry.of(full)
            if b == "zero":
                values.zero_()
            elif b == "deficient":
                values[:, 1:] = values[:, :1]
    return full


@pytest.mark.parametrize("b", ["zero", "deficient", "full"])
def test_the_product_stays_and_the_rows_of_a_are_orthonormal(b: str) -> None:
    full = start(b)
    rewritten = FedSvd().rewritten(full, LAYOUT)
    assert rewritten is not None
    close(rewritten.adapter, full)
    for entry in LAYOUT.entries:
        values = entry.of(rewritten.adapter).double()
        if entry.factor == "A":
            torch.testing.assert_close(values @ values.T, torch.eye(RANK).double(), rtol=0, atol=1e-6)
        elif entry.factor == "B":  # U S: orthogonal columns, longest first
            gram = values.T @ values
            torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-4)
            assert (gram.diagonal().diff() <= 1e-4).all()
            old = entry.of(full).double()
            torch.testing.assert_close(old @ rewritten.turns[entry.pair].double(), values, rtol=0, atol=1e-5)


def test_a_whose_rows_depend_on_each_other_is_completed() -> None:
    a = random(RANK, IN)
    a[1] = a[0]
    b = random(OUT, RANK)
    new_b, new_a = by_singular_values(b.double(), a.double())
    torch.testing.assert_close(new_b @ new_a, b.double() @ a.double())
    torch.testing.assert_close(new_a @ new_a.T, torch.eye(RANK).double())


def test_a_rank_without_as_many_directions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 3 .* 2 .* model\.rank"):
        by_singular_values(random(2, 3), random(3, 8))


def release_of(update: Tensor, released) -> Release:
    """What the mechanism makes of this update without noise: it is one client's, and the divisor is 1."""
    plan = Plan(FlatClip(100.0, len(update)), 1.0)
    return released(plan, contribute(Units(update[None]), plan), Poisson(1.0, 1), InsecureZeroNoise())


def descend(aggregation, optimizer, released, rounds: int = ROUNDS) -> ServerState:
    """A run whose clients take one gradient step on ||B A - M||^2 in the coordinates they are given."""
    targets = [random(OUT, IN, name="goal").double(), random(IN, IN, name="goal").double()]
    server = ServerUpdate(optimizer, aggregation, LAYOUT, 0.6)
    first = FedSvd().rewritten(start(), LAYOUT)
    assert first is not None
    state = server.start(first.adapter, None, 0)
    for round in range(1, rounds + 1):
        full = state.adapter.double()
        gradient = torch.zeros_like(full)
        for (a, b), target in zip((LAYOUT.entries[0:2], LAYOUT.entries[2:4]), targets, strict=True):
            b.of(gradient).copy_((b.of(full) @ a.of(full) - target) @ a.of(full).T)
        gradient[-2:] = 0.1 * round
        update = -0.1 * LAYOUT.training("b").trainable_values(gradient).float()
        state = server.after(state, release_of(update, released), TrainedSubset("b"), round, 1.0)
    return state


@pytest.mark.parametrize("optimizer", [FedAvg(), FedAvgM(momentum=0.8, decay=0.9)], ids=str)
def test_without_an_optimizer_that_minds_it_is_ffa_with_an_orthonormal_a(optimizer, released) -> None:
    """Momentum and the served average move along; were they left behind, the products would differ."""
    turned_run, fixed_run = descend(FedSvd(), optimizer, released), descend(Ffa(), optimizer, released)
    close(turned_run.adapter, fixed_run.adapter, 1e-5)
    close(turned_run.served, fixed_run.served, 1e-5)
    assert not torch.allclose(turned_run.adapter, fixed_run.adapter, atol=0.1), "the coordinates should have turned"
    assert float((turned_run.adapter - turned_run.served).norm()) > 0.1


def test_moments_that_stay_behind_would_show(released) -> None:
    class Forgetful(FedAvgM):
        moments: ClassVar[dict[str, int]] = {}

    kept = descend(FedSvd(), FedAvgM(momentum=0.8), released)
    left = descend(FedSvd(), Forgetful(momentum=0.8), released)
    with pytest.raises(AssertionError):
        close(left.adapter, kept.adapter, 1e-2)


def test_isotropic_second_moments_and_counts_survive_the_turn(released) -> None:
    state = descend(FedSvd(), FedAdam(learning_rate=0.05), released)
    trained = LAYOUT.training("b")
    assert (trained.trainable_values(state.optimizer["steps"]) == ROUNDS).all()
    assert (state.optimizer["second"] >= 0).all()
    assert not LAYOUT.training("a").trainable_values(state.optimizer["second"])[: RANK * IN].any()
    again = FedSvd().rewritten(state.adapter, LAYOUT)
    assert again is not None
    ones = turn_factors(torch.ones(LAYOUT.size), again.turns, LAYOUT, 2)
    torch.testing.assert_close(ones, torch.ones(LAYOUT.size), rtol=0, atol=1e-5)
