"""The soft actor-critic itself: it learns, forgets nobody's order, and repeats itself to the bit."""

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy.randomness.rng import simulation_generator, torch_generator
from strategies.controllers.rl.sac import (
    GLOBAL,
    HIDDEN,
    LOCAL,
    Agent,
    Learning,
    act,
    explore,
    fresh_weights,
    learn,
    new_agent,
    policy,
    remember,
    value,
)

BEST = 1.0
WHOLE = torch.zeros(GLOBAL)


def where(log_bound: float) -> Tensor:
    local = torch.zeros(1, LOCAL)
    local[0, 3] = log_bound
    return local


def walk(seed: int, *, learning: bool, actions: int = 160, updates: int = 2) -> tuple[list[float], Agent]:
    """A threshold of known best log: move it by up to 1/2 ten times, then start elsewhere; reward: -|distance|."""
    parameters, generator = Learning(seed=seed, discount=0.9, learning_rate=3e-3), simulation_generator(seed, "walk")
    agent, rewards, log_bound = new_agent(fresh_weights(seed), 1, 1000), [], 0.0
    for turn in range(actions):
        if turn % 10 == 0:
            log_bound = float(generator.uniform(-2, 2))
        local = where(log_bound)
        at_random = not learning or agent.stored < 20
        agent, action = explore(agent, parameters, local, WHOLE, at_random=at_random)
        log_bound = min(max(log_bound + 0.5 * float(action[0]), -2.0), 2.0)
        rewards.append(-abs(log_bound - BEST))
        transition = {"local": local, "whole": WHOLE, "action": action, "reward": torch.tensor(rewards[-1])}
        transition |= {"next-local": where(log_bound), "next-whole": WHOLE, "end": torch.tensor(float(turn % 10 == 9))}
        agent = remember(agent, transition)
        if learning and agent.stored >= 20:
            for _ in range(updates):
                agent = learn(agent, parameters)
    return rewards, agent


@pytest.mark.parametrize("seed", [0, 1])
def test_it_finds_the_best_threshold_of_a_known_problem_faster_than_chance(seed: int) -> None:
    rewards, agent = walk(seed, learning=True)
    by_chance, _ = walk(seed, learning=False)
    assert statistics.mean(rewards[-60:]) > -0.6
    assert statistics.mean(by_chance[-60:]) < -0.8
    assert float(act(agent, where(-1.5), WHOLE)[0]) > 0.5, "far below the best it goes up"
    assert float(act(agent, where(2.0), WHOLE)[0]) < -0.2, "above it goes down"


def some(adapters: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch_generator(seed, "states")
    shapes = ((4, adapters, LOCAL), (4, GLOBAL), (4, adapters + 1))
    local, whole, action = (2 * torch.rand(shape, generator=generator) - 1 for shape in shapes)
    return local, whole, action


def test_one_set_of_weights_serves_any_number_of_adapters_in_any_order() -> None:
    weights = fresh_weights(0)
    for adapters in (1, 3, 24):
        local, whole, action = some(adapters)
        order = torch.randperm(adapters, generator=torch_generator(0, "order"))
        mean, log_std = policy(weights, local, whole)
        assert mean.shape == log_std.shape == (4, adapters + 1)
        moved, _ = policy(weights, local[:, order], whole)
        torch.testing.assert_close(moved[:, :-1], mean[:, :-1][:, order])
        torch.testing.assert_close(moved[:, -1], mean[:, -1])
        turned = torch.cat([action[:, :-1][:, order], action[:, -1:]], dim=1)
        before = value(weights, "critic1", local, whole, action)
        torch.testing.assert_close(value(weights, "critic1", local[:, order], whole, turned), before)
        assert bool((value(weights, "critic2", local, whole, action) != before).any()), "twins, not one critic twice"


def filled(stored: int = 40, capacity: int = 16, adapters: int = 2) -> Agent:
    agent = new_agent(fresh_weights(3), adapters, capacity)
    for i in range(stored):
        local, whole, action = some(adapters, seed=i)
        transition = {"local": local[0], "whole": whole[0], "action": action[0], "reward": torch.tensor(float(i))}
        transition |= {"next-local": local[1], "next-whole": whole[1], "end": torch.tensor(0.0)}
        agent = remember(agent, transition)
    return agent


def test_the_buffer_forgets_the_oldest() -> None:
    agent = filled(stored=40, capacity=16)
    assert (agent.remembered, agent.stored) == (16, 40)
    assert sorted(agent.buffer["reward"].tolist()) == [float(i) for i in range(24, 40)]
    assert filled(stored=3).remembered == 3


def bits(agent: Agent) -> list[list[float]]:
    return [part[name].tolist() for part in (agent.weights, agent.moments) for name in sorted(part)]


def test_a_step_is_a_function_of_the_agent_alone() -> None:
    agent, parameters = filled(), Learning(seed=5)
    before = bits(agent)
    random.seed(0)
    kinds = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    once, again = learn(agent, parameters), learn(agent, parameters)
    assert bits(once) == bits(again)
    assert bits(agent) == before
    assert kinds == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert bits(learn(once, parameters)) != bits(once)
    assert (once.steps, agent.steps) == (1, 0)
    other = learn(agent, replace(parameters, seed=6))
    assert bits(other) != bits(once)


def test_every_action_has_random_numbers_of_its_own() -> None:
    agent, parameters = filled(), Learning(seed=5)
    local, whole, _ = some(2)
    after, first = explore(agent, parameters, local[0], whole[0], at_random=False)
    _, second = explore(after, parameters, local[0], whole[0], at_random=False)
    assert torch.equal(explore(agent, parameters, local[0], whole[0], at_random=False)[1], first)
    assert not torch.equal(first, second)
    assert bool((first.abs() < 1).all())
    torch.testing.assert_close(
        act(agent, local[0], whole[0]), torch.tanh(policy(agent.weights, local[:1], whole[:1])[0][0])
    )


def test_targets_follow_slowly() -> None:
    agent = filled()
    after = learn(agent, Learning(polyak=0.25))
    name = "critic1.adapter.0.weight"
    moved = 0.25 * after.weights[name] + 0.75 * agent.weights[name]  # the target starts as the critic
    torch.testing.assert_close(after.weights[f"target-{name}"], moved)
    assert after.weights[name].shape == (HIDDEN, LOCAL + GLOBAL + 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"discount": 1.0}, "one_minus_discount"),
        ({"polyak": 0.0}, "polyak must be"),
        ({"batch": 0}, "batch must be"),
        ({"seed": -1}, "seed must be"),
        ({"learning_rate": -1.0}, "learning_rate must be > 0"),
    ],
)
def test_impossible_parameters_are_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Learning(**change)  # type: ignore[arg-type]
