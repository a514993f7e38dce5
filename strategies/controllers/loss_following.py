"""Thresholds that follow a loss down: the two rules of DP-LAC and DP-CLAC, and the vote for where they begin.

    ratio rule (the paper's):  C <- max(C min(1, max(1/2, v_t / v_{t-1})), floor C_0)
    smooth rule (ours):        C <- min(C, C_0 max(e_t / e_0, floor)),   e_t = 0.9 e_{t-1} + 0.1 v_t,  e_0 = v_0

so the smooth threshold is C_0 min_{s<=t} e_s / e_0: noise in v averages out instead of ratcheting C down. Both leave C
alone after a loss that is not a positive finite number. Votes for C_0 live on the public grid 2^(j/2), j = -12..12.
"""

import math
from dataclasses import replace
from typing import Protocol, TypeGuard, TypeVar

from privacy.clipping.norms import NoUpdate
from privacy.contribution import Plan
from privacy.events import Component, Poisson
from privacy.mechanism import Release
from privacy.queries import OneHotVote
from strategies.controllers.controller import InitialRelease, RunInfo

GRID = tuple(2.0 ** (j / 2) for j in range(-12, 13))
SMOOTHING = 0.9
LEAST_RATIO = 0.5


class FollowingState(Protocol):
    """The memory of both rules: the threshold, the first one, and the loss (``loss`` is e_t under the smooth rule).

    Losses are NaN before there is one.
    """

    @property
    def bound(self) -> float: ...
    @property
    def first_bound(self) -> float: ...
    @property
    def loss(self) -> float: ...
    @property
    def first_loss(self) -> float: ...


S = TypeVar("S", bound=FollowingState)


def follow_loss(state: S, loss: float | None, *, smooth: bool, floor: float) -> S:
    """The state after a round whose model had the given loss. The first usable loss is only remembered."""
    if not is_usable(loss):
        return state
    if math.isnan(state.loss):
        return _replaced(state, loss=loss, first_loss=loss)
    if not smooth:
        ratio = min(1.0, max(LEAST_RATIO, loss / state.loss))
        return _replaced(state, bound=max(ratio * state.bound, floor * state.first_bound), loss=loss)
    average = SMOOTHING * state.loss + (1 - SMOOTHING) * loss
    share = max(average / state.first_loss, floor)
    return _replaced(state, bound=min(state.bound, state.first_bound * share), loss=average)


def is_usable(loss: float | None) -> TypeGuard[float]:
    """Whether a ratio of losses may be taken with it."""
    return loss is not None and math.isfinite(loss) and loss > 0


def vote_release(sampling: Poisson, rate: float, noise_std: float) -> InitialRelease:
    """The initial release of votes; ``rate`` 0 takes the rate of ``sampling``."""
    component = Component("vote", 1.0, noise_std, len(GRID))
    return InitialRelease(replace(sampling, rate=rate or sampling.rate), (component,))


def vote_plan(info: RunInfo, noise_std: float, update_multiplier: float) -> Plan:
    """The plan of that release; clients simulate the noise that an update of that multiplier will carry."""
    simulated = update_multiplier / info.sampling.expected_units
    vote = OneHotVote(GRID, noise_std, simulated_noise_std_per_bound=simulated)
    return Plan(NoUpdate(), update_multiplier, (vote,))


def elect_bound(state: S, released: Release) -> S:
    """The state after the vote: C_0 is the mode of the noisy histogram."""
    bound = GRID[int(released.answer("vote").argmax())]
    return _replaced(state, bound=bound, first_bound=bound)


def _replaced(state: S, **changes: float) -> S:
    changed: S = replace(state, **changes)  # type: ignore[type-var]
    return changed
