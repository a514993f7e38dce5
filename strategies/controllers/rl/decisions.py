"""The agent's side of a run: what it saw, what it is paid, and how its actions move thresholds and noise."""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from strategies.controllers.controller import RunInfo
from strategies.controllers.rl import sac, spending
from strategies.controllers.rl.features import (
    OF_ADAPTER,
    OF_RUN,
    IntervalStats,
    empty_interval,
    global_features,
    local_features,
)
from strategies.controllers.rl.sac import Agent, Learning, features

FREEZE = 0.9
"""Share of the budget after which what is left is spent evenly."""

REWARD_SCALE, MOST_REWARD = 4.0, 10.0
"""Reward of one e-fold of the public loss, and the bound on a reward."""


@dataclass(frozen=True)
class RlState:
    """The controller's state between two releases.

    Everything in it comes from releases, public values and its own seed.

    Attributes:
        scales: log(C_i / C_i0).
        offset: logarithm of the noise wished for, relative to spending evenly what is left.
        heard: sums over the rounds since the last action.
        spent, spent_before: of the budget, now and at the last action.
        first_loss, loss_before, loss: public loss at the start, at the last action, now.
        last: observation and action of the last action, and the reward of the one before it.
        actions: how many there were.
    """

    scales: tuple[float, ...]
    offset: float
    heard: IntervalStats
    spent: float
    spent_before: float
    first_loss: float
    loss_before: float
    loss: float
    last: dict[str, Tensor]
    actions: int
    agent: Agent


Deciding = TypeVar("Deciding", bound=RlState)


@dataclass(frozen=True)
class Acting:
    """The settings of how the agent acts and learns. See the fields of the same names of ``Rl``."""

    learning: Learning
    step: float
    reach: float
    noise_step: float
    noise_range: float
    per_spent: bool
    explores: bool
    random_until: int
    warm_up: int
    updates: int


def begin(info: RunInfo, agent: Agent, loss: float) -> RlState:
    """The state before round 1."""
    adapters = len(info.blocks(1))
    local, whole = features(agent.weights)
    last = {"local": torch.zeros(adapters, local), "whole": torch.zeros(whole), "action": torch.zeros(adapters + 1)}
    last["reward"] = torch.tensor(0.0)
    scales = (0.0,) * adapters
    return RlState(scales, 0.0, empty_interval(adapters), 0.0, 0.0, loss, loss, loss, last, 0, agent)


def decide(
    state: Deciding,
    info: RunInfo,
    acting: Acting,
    round: int,
    local: Float[Tensor, "n l"],
    whole: Float[Tensor, " g"],
    reward: float,
) -> Deciding:
    """Learn from the interval that ends with ``round``, then act for the next one.

    Args:
        state: with the interval heard.
        round: 1..T.
        local, whole: what the agent sees after ``round``.
        reward: of the last action.
    """
    agent, ends = state.agent, round == info.rounds
    if acting.explores and state.actions:
        seen = {"next-local": local, "next-whole": whole, "end": torch.tensor(float(ends))}
        agent = sac.remember(agent, state.last | seen | {"reward": torch.tensor(reward)})
        if agent.stored >= acting.warm_up:
            for _ in range(acting.updates):
                agent = sac.learn(agent, acting.learning)
    state = replace(
        state, agent=agent, heard=empty_interval(len(local)), spent_before=state.spent, loss_before=state.loss
    )
    state = replace(state, last=state.last | {"reward": torch.tensor(reward)})
    return state if ends else _acted(state, info, acting, local, whole)


def agent_values(state: RlState) -> dict[str, float]:
    """The last action, what the agent saw before it, and the newest reward, under the names that metrics have.

    ``action-i`` and ``action-noise`` in (-1, 1); ``reward``; ``sees-NAME`` of the run and ``sees-NAME-i`` of adapter i,
    in the order of :func:`~strategies.controllers.rl.features.local_features` and ``global_features``.
    """
    *adapters, noise = state.last["action"].tolist()
    values = {f"action-{number}": action for number, action in enumerate(adapters, 1)}
    values |= {"action-noise": noise, "reward": float(state.last["reward"]), "actions": float(state.actions)}
    values |= dict(zip((f"sees-{name}" for name in OF_RUN), state.last["whole"].tolist(), strict=False))
    for number, row in enumerate(state.last["local"].tolist(), 1):
        values |= dict(zip((f"sees-{name}-{number}" for name in OF_ADAPTER), row, strict=False))
    return values


def observation(
    state: RlState, info: RunInfo, acting: Acting, round: int
) -> tuple[Float[Tensor, "n l"], Float[Tensor, " g"]]:
    """The features that the agent sees after ``round``."""
    intervals = info.rounds / max(state.heard.rounds, 1)
    whole = global_features(
        done=round / info.rounds,
        spent=state.spent / spending.budget(info),
        offset=state.offset / math.log(acting.noise_range),
        gain=_gain(state.loss_before, state.loss) * intervals,
        level=_gain(state.first_loss, state.loss),
    )
    return local_features(state.heard, state.scales, math.log(acting.reach), info.blocks(round)), whole


def reward(state: RlState, info: RunInfo, per_spent: bool) -> float:
    """REWARD_SCALE times the fall of the log public loss over an interval; the worst where the loss is no number.

    Args:
        state: with the rounds of the interval heard, before they are forgotten.
        per_spent: per budget spent, as RLDP has it: multiply by the share of the budget that is due to the interval's
            rounds over the share that was spent on them. Else the rewards of a run add up to the fall over the run.
    """
    if not math.isfinite(state.loss):
        return -MOST_REWARD
    gain = REWARD_SCALE * _gain(state.loss_before, state.loss)
    if per_spent:
        spent = (state.spent - state.spent_before) / spending.budget(info)
        gain *= state.heard.rounds / info.rounds / max(spent, 1e-6)
    return min(max(gain, -MOST_REWARD), MOST_REWARD)


def _acted(
    state: Deciding, info: RunInfo, acting: Acting, local: Float[Tensor, "n l"], whole: Float[Tensor, " g"]
) -> Deciding:
    agent = state.agent
    if acting.explores:
        at_random = agent.stored < acting.random_until
        agent, action = sac.explore(agent, acting.learning, local, whole, at_random=at_random)
    else:
        action = sac.act(agent, local, whole)
    *changes, noise = action.tolist()
    reach = math.log(acting.reach)
    scales = tuple(
        min(max(scale + acting.step * change, -reach), reach)
        for scale, change in zip(state.scales, changes, strict=True)
    )
    limit = math.log(acting.noise_range)
    offset = min(max(state.offset + acting.noise_step * noise, -limit), limit)
    if info.order is None or state.spent > FREEZE * spending.budget(info):
        offset = 0.0
    last = state.last | {"local": local, "whole": whole, "action": action}
    return replace(state, agent=agent, scales=scales, offset=offset, last=last, actions=state.actions + 1)


def _gain(before: float, now: float) -> float:
    """Fall of the log loss; 0 where either is no positive number."""
    usable = math.isfinite(before) and math.isfinite(now) and before > 0 and now > 0
    return math.log(before / now) if usable else 0.0
