"""The noise of a round when the ledger filters: a controller may spend unevenly, and must be able to finish.

The run's multipliers z_1..z_T say what it may spend in all: R = sum_t rho(z_t), with rho the Rényi divergence of a
round at the filter's order. Before round t, with R' of it left and n = T - t + 1 rounds to go, ``even`` noise spends
R'/n on each. A wish of exp(offset) times that is granted as far as it leaves every later round the noise ``widest`` z,
the most the controller ever adds:  rho(z_t) <= R' - (n - 1) rho(widest z).  So no round is refused that an even run
would have held. The rule is only prudence; the guarantee is the ledger's, which refuses what the filter does not pay
for.
"""

import math
from collections import Counter
from functools import lru_cache

from scipy.optimize import brentq

from privacy.accountants import renyi
from privacy.contribution import Plan
from privacy.events import Poisson
from strategies.controllers.controller import RunInfo

_LEAST, _MOST = math.log(1e-2), math.log(2.0**15)
_ROUNDING = 1e-9


def budget(info: RunInfo) -> float:
    """The Rényi divergence R of the whole run. The number of rounds where the ledger does not filter."""
    if info.order is None:
        return float(info.rounds)
    return _budget(info.sampling, info.noise_multipliers, info.order)


@lru_cache(maxsize=64)
def _budget(sampling: Poisson, multipliers: tuple[float, ...], order: int) -> float:
    return math.fsum(count * renyi.rho_of(sampling, z, order) for z, count in Counter(multipliers).items())


def after(info: RunInfo, spent: float, plan: Plan, told: float) -> float:
    """The amount spent after a release: as counted here, or as the ledger tells, which charges failed rounds too."""
    return max(spent + cost(info, plan.effective_noise_multiplier), told)


def cost(info: RunInfo, noise_multiplier: float) -> float:
    """The part of the budget that a round of that effective noise multiplier takes."""
    return 1.0 if info.order is None else _rho(info, noise_multiplier)


def multiplier(info: RunInfo, spent: float, round: int, offset: float, widest: float) -> float:
    """Effective noise multiplier of ``round`` after ``spent`` of the budget.

    Args:
        spent: of the budget, by the rounds before.
        round: 1..T.
        offset: logarithm of the noise wished for, relative to spending evenly what is left.
        widest: >= 1; noise stays within this factor of the run's own multipliers.
    """
    own = info.noise_multiplier(round)
    if info.order is None:
        return own  # in floor mode noise above the floor is not given back
    left, rounds = budget(info) - spent, info.rounds - round + 1
    if left <= 0.0:
        return own  # nothing is left: the ledger says so
    most = widest * max(info.noise_multipliers)
    even = _inverse(info, left / rounds)
    reserve = left - (rounds - 1) * _rho(info, most)
    if reserve <= left / rounds:  # the last round, or failed ones cost so much that the rest must share what there is
        return max(even, own / widest)
    wished = min(max(even * math.exp(offset), own / widest), max(most, even))
    return wished if _rho(info, wished) <= reserve else _inverse(info, reserve)


def _rho(info: RunInfo, noise_multiplier: float) -> float:
    assert info.order is not None
    return renyi.rho_of(info.sampling, noise_multiplier, info.order)


def _inverse(info: RunInfo, rho: float) -> float:
    """The multiplier whose divergence is ``rho``, rounded up; none outside what a plan may hold."""

    def excess(log_z: float) -> float:
        return math.log(_rho(info, math.exp(log_z)) / rho)

    low = high = math.log(info.noise_multiplier(1))
    while excess(low) < 0.0 and low > _LEAST:
        low -= 0.7
    while excess(high) > 0.0 and high < _MOST:
        high += 0.7
    if excess(low) < 0.0 or excess(high) > 0.0:
        return math.exp(low if excess(low) < 0.0 else high)
    return math.exp(float(brentq(excess, low, high, xtol=1e-10))) * (1.0 + _ROUNDING)
