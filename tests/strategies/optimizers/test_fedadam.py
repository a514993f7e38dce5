"""FedAdam with the noise taken out: against numbers and against plain loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy.clipping.norms import AutomaticClip, FlatClip, PerAdapterClip, PsacClip
from privacy.clipping.subspace import SubspaceClip
from privacy.contribution import GRID, Contribution, Plan
from privacy.events import Poisson
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.rng import simulation_generator, torch_generator
from strategies.optimizers.fedadam import FedAdam, FedAdamW
from strategies.optimizers.fedavg import FedAvg, FedAvgM
from strategies.optimizers.optimizer import Optimizer, ServerStep

OPTIMIZERS: tuple[Optimizer, ...] = (
    FedAvg(0.5, 0.9),
    FedAvgM(0.5, 0.9),
    FedAdam(decay=0.9),
    FedAdam(bias_correction=False, decay=0.9),
    FedAdamW(decay=0.9),
)


def updates(rounds: int, size: int = 4) -> list[Tensor]:
    return list(torch.randn(rounds, size, generator=torch_generator(0, "updates", rounds, size)))


def walk(optimizer: Optimizer, given: list[Tensor], stds: list[Any], start: Tensor):
    state, parameters = optimizer.init(start), start
    for round, (update, std) in enumerate(zip(given, stds, strict=True), start=1):
        step = ServerStep(round, update, torch.as_tensor(std))
        state, parameters = optimizer.step(state, parameters, step)
    return state, parameters


# --- the noise in a release --------------------------------------------------------------------------------------


def orthonormal(k: int, d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, k, generator=torch_generator(3, "basis"))).Q.T.contiguous()


@pytest.mark.parametrize(
    "clip",
    [
        FlatClip(0.5, 6),
        AutomaticClip(0.5, 6),
        PsacClip(0.5, 6),
        PerAdapterClip((0.5, 2.0), (4, 2)),
        SubspaceClip(orthonormal(3, 6), 0.7),
    ],
    ids=lambda clip: type(clip).__name__,
)
def test_the_noise_an_optimizer_is_told_of_is_the_noise_there_is(clip, released) -> None:
    plan, noise, rounds, sampling = Plan(clip, 1.5), InsecureSeededNoise(4), 1200, Poisson(0.1, 200)
    drawn = [clip.decode(noise.draw([(1.5, clip.dim)]).double() / GRID, 20.0) for _ in range(rounds)]
    told = plan.noise_std(sampling.expected_units).expand(6)
    found = torch.stack(drawn).square().mean(0).sqrt()
    assert ((found / told - 1).abs() < 5 / math.sqrt(2 * rounds)).all()
    assert torch.equal(
        released(plan, Contribution.zero(plan), sampling, InsecureSeededNoise(4)).update, drawn[0].float()
    )


# --- FedAdam -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_plain_fedadam_is_torch_adam(decay: float) -> None:
    start, given = torch.tensor([1.0, -2.0, 0.5, 0.0]), updates(7)
    parameter = torch.nn.Parameter(start.clone())
    adam = torch.optim.Adam([parameter], lr=0.05, betas=(0.8, 0.95), eps=1e-6)
    for round, update in enumerate(given):
        adam.param_groups[0]["lr"] = 0.05 * decay**round
        parameter.grad = -update
        adam.step()
    optimizer = FedAdam(0.05, decay, 0.8, 0.95, bias_correction=False, eps=1e-6)
    _, found = walk(optimizer, given, [0.3] * 7, start)
    torch.testing.assert_close(found, parameter.detach())


def test_plain_fedadamw_is_torch_adamw() -> None:
    start, given = torch.tensor([1.0, -2.0, 0.5, 0.0]), updates(7)
    parameter = torch.nn.Parameter(start.clone())
    adam = torch.optim.AdamW([parameter], lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    for update in given:
        parameter.grad = -update
        adam.step()
    optimizer = FedAdamW(0.05, 1.0, 0.8, 0.95, False, eps=1e-6, weight_decay=0.2)
    _, found = walk(optimizer, given, [0.3] * 7, start)
    torch.testing.assert_close(found, parameter.detach())


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_bias_correction_subtracts_the_average_of_changing_noise_value_by_value(floor: float) -> None:
    beta1, beta2, rounds = 0.9, 0.95, 9
    stds = [torch.tensor([0.1, 0.1, 0.9, 0.9]) * 0.8**t for t in range(rounds)]  # C_t falls; two blocks
    given = [std * update for std, update in zip(stds, updates(rounds), strict=True)]
    start = torch.zeros(4)
    optimizer = FedAdam(0.05, 0.9, beta1, beta2, eps_root=1e-7, relative_floor=floor)
    _, found = walk(optimizer, given, stds, start)
    x = np.zeros(4)
    for t in range(1, rounds + 1):
        weights1 = (1 - beta1) * beta1 ** np.arange(t - 1, -1, -1) / (1 - beta1**t)
        weights2 = (1 - beta2) * beta2 ** np.arange(t - 1, -1, -1) / (1 - beta2**t)
        us = np.stack([u.double().numpy() for u in given[:t]])
        phi = weights2 @ np.stack([s.double().numpy() ** 2 for s in stds[:t]])
        root = np.sqrt(np.maximum(weights2 @ us**2 - phi, np.maximum(floor * phi, 1e-7)))
        x += 0.05 * 0.9 ** (t - 1) * (weights1 @ us) / root
    np.testing.assert_allclose(found.numpy(), x, rtol=2e-3)


def test_the_correction_finds_the_signal_below_the_noise() -> None:
    """Two values with signals 1 and 0.5 under noise 2: Adam steps nearly as 2:1, the corrected one nearly alike, as
    Adam does without noise, once the average is long enough."""
    rng = simulation_generator(0, "signal")
    signal, rounds = torch.tensor([1.0, 0.5]).repeat(2000), 600
    ratios = {}
    for corrected in (True, False):
        optimizer = FedAdam(1.0, 1.0, 0.99, 0.998, bias_correction=corrected, relative_floor=0.0)
        state, start = optimizer.init(signal), torch.zeros_like(signal)
        for round in range(1, rounds + 1):
            noise = torch.from_numpy(2.0 * rng.standard_normal(len(signal), dtype="float32"))
            state, after = optimizer.step(state, start, ServerStep(round, signal + noise, torch.tensor(2.0)))
        ratios[corrected] = float((after[0::2].median()) / after[1::2].median())
    assert ratios[False] == pytest.approx(2.0 * math.sqrt(4.25 / 5.0), rel=0.03)
    assert ratios[True] < 1.35


def test_values_trained_in_some_rounds_have_their_own_count() -> None:
    """As if each had its own Adam: what rests neither moves nor ages."""
    optimizer, start = FedAdam(0.05, relative_floor=0.3), torch.tensor([1.0, -2.0])
    given = updates(6, 2)
    state, parameters = optimizer.init(start), start.clone()
    for round, update in enumerate(given, start=1):
        value = slice(0, 1) if round % 2 else slice(1, 2)
        part = {name: tensor[value] for name, tensor in state.items()}
        part, values = optimizer.step(part, parameters[value], ServerStep(round, update[value], torch.tensor(0.4)))
        for name, tensor in part.items():
            state[name][value] = tensor
        parameters[value] = values
    for value in (0, 1):
        own = [update[value : value + 1] for update in given[value::2]]
        _, alone = walk(optimizer, own, [0.4] * 3, start[value : value + 1])
        torch.testing.assert_close(parameters[value : value + 1], alone)


# --- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_steps_leave_their_arguments_alone_and_keep_shapes(optimizer: Optimizer) -> None:
    start = torch.tensor([1.0, -2.0, 0.5, 0.0])
    state, _ = walk(optimizer, updates(2), [0.1, 0.2], start)
    kept, parameters, update = {n: t.clone() for n, t in state.items()}, start.clone(), updates(1)[0]
    before = update.clone()
    step = ServerStep(3, update, torch.tensor([0.1, 0.2, 0.3, 0.4]), 1.0)
    new, after = optimizer.step(state, parameters, step)
    assert torch.equal(parameters, start)
    assert torch.equal(update, before)
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    assert {n: (t.shape, t.dtype) for n, t in new.items()} == {n: (t.shape, t.dtype) for n, t in state.items()}
    assert all(tensor.shape in ((4,), ()) for tensor in state.values())
    assert after.dtype == torch.float32
    assert set(optimizer.moments) <= {name for name, tensor in state.items() if tensor.shape == (4,)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_decay_and_the_controllers_factor_multiply_the_step(optimizer: Optimizer) -> None:
    start, update = torch.tensor([1.0, -2.0, 0.5, 0.0]), updates(1)[0]
    moved = []
    for round, scale in ((1, 1.0), (1, 0.25), (3, 1.0)):
        step = ServerStep(round, update, torch.tensor(0.1), scale)
        _, after = optimizer.step(optimizer.init(start), start, step)
        moved.append(float((after - start).norm()))
    # the decay of weights scales with the rate too
    assert moved[1] == pytest.approx(0.25 * moved[0], rel=1e-3)
    assert moved[2] == pytest.approx(0.81 * moved[0], rel=1e-3)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: FedAdam(learning_rate=0.0), "learning_rate"),
        (lambda: FedAdam(beta1=1.0), "beta1"),
        (lambda: FedAdam(beta2=-0.1), "beta2"),
        (lambda: FedAdam(eps_root=0.0), "eps_root"),
        (lambda: FedAdam(relative_floor=-1.0), "relative_floor"),
        (lambda: FedAdamW(weight_decay=-1.0), "weight_decay"),
        (lambda: FedAdamW(decay=2.0), "decay"),
    ],
)
def test_values_that_cannot_work_are_refused(make, argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        make()
