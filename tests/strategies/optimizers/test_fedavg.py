"""Server optimizers against numbers worked out by hand."""

import pytest
import torch

from strategies.optimizers.fedavg import FedAvg, FedAvgM
from strategies.optimizers.optimizer import ServerStep

START = torch.tensor([1.0, -2.0])
UPDATES = [torch.tensor([0.5, 0.25]), torch.tensor([-1.0, 0.5]), torch.tensor([0.125, 0.0])]


def walk(optimizer: FedAvg | FedAvgM) -> list[torch.Tensor]:
    state, parameters, path = optimizer.init(START), START, []
    for round, update in enumerate(UPDATES, start=1):
        state, parameters = optimizer.step(state, parameters, ServerStep(round, update, torch.tensor(0.1)))
        path.append(parameters)
    return path


def close(path: list[torch.Tensor], expected: list[list[float]]) -> None:
    for got, wanted in zip(path, expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(wanted))
        assert got.dtype == torch.float32


def test_fedavg_adds_the_mean_update() -> None:
    close(walk(FedAvg()), [[1.5, -1.75], [0.5, -1.25], [0.625, -1.25]])


def test_fedavg_decays_its_rate_after_each_round() -> None:
    # eta_t = 2, 1, 1/2
    close(walk(FedAvg(learning_rate=2.0, decay=0.5)), [[2.0, -1.5], [1.0, -1.0], [1.0625, -1.0]])


def test_fedavgm_is_heavy_ball() -> None:
    # m = u_1, u_1/2 + u_2, u_1/4 + u_2/2 + u_3 = (.5, .25), (-.75, .625), (-.25, .3125)
    close(walk(FedAvgM(momentum=0.5)), [[1.5, -1.75], [0.75, -1.125], [0.5, -0.8125]])


def test_fedavgm_with_decay_applies_it_to_the_step_not_to_the_momentum() -> None:
    close(
        walk(FedAvgM(learning_rate=2.0, decay=0.5, momentum=0.5)),
        [[2.0, -1.5], [1.25, -0.875], [1.125, -0.71875]],
    )


def test_fedavgm_without_momentum_is_fedavg() -> None:
    for mine, plain in zip(walk(FedAvgM(0.5, 0.9, 0.0)), walk(FedAvg(0.5, 0.9)), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)


def test_a_constant_update_grows_to_one_over_one_minus_momentum() -> None:
    optimizer, parameters, update = FedAvgM(momentum=0.75), torch.zeros(1), torch.ones(1)
    state = optimizer.init(parameters)
    for round in range(1, 100):
        before = parameters
        state, parameters = optimizer.step(state, parameters, ServerStep(round, update, torch.tensor(0.1)))
    torch.testing.assert_close(parameters - before, torch.tensor([4.0]))


def test_steps_leave_their_arguments_alone() -> None:
    for optimizer in (FedAvg(), FedAvgM()):
        state, parameters, update = optimizer.init(START), START.clone(), UPDATES[0].clone()
        kept = {name: value.clone() for name, value in state.items()}
        optimizer.step(state, parameters, ServerStep(1, update, torch.tensor(0.1)))
        assert torch.equal(parameters, START)
        assert torch.equal(update, UPDATES[0])
        assert all(torch.equal(state[name], value) for name, value in kept.items())


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: FedAvg(learning_rate=0.0), "learning_rate"),
        (lambda: FedAvg(decay=1.5), "decay"),
        (lambda: FedAvgM(momentum=1.0), "momentum"),
        (lambda: FedAvgM(momentum=-0.1), "momentum"),
        (lambda: FedAvgM(decay=0.0), "decay"),
    ],
)
def test_values_that_cannot_work_are_refused(make, argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        make()
