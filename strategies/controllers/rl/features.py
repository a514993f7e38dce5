"""The policy's input: features of releases, public losses and the budget, and of nothing else.

``add`` adds one :class:`~privacy.mechanism.Release` to the sums of an interval; only the mechanism makes a Release, so
no raw norm, loss or count can get here. Per adapter k, averaged over the interval of rounds:

    u_k   noisy share of clients left unclipped, shrunk towards 1/2 by how noisy it is
    e_k   ||g_k||^2 - E_k, the energy of the released block without that of its noise, E_k = d_k (s_k/m)^2
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from privacy.mechanism import Release
from privacy.queries import AdapterBits

OF_ADAPTER = ("unclipped", "alignment", "signal-to-noise", "position", "size")
OF_RUN = ("progress", "budget-ahead", "noise", "last-gain", "total-gain")
"""Names of the features of one adapter and of the run, in their order."""

_PRIOR = 1 / 12
"""Variance of a share that may be anything between 0 and 1."""


@dataclass(frozen=True)
class IntervalStats:
    """Sums over the rounds of one interval.

    Attributes:
        shares: per adapter, of (share - 1/2) times its weight; divided by rounds it estimates the share.
        excess: per adapter, of e_k / C_k^2.
        energy: per adapter, of E_k / C_k^2.
    """

    rounds: int
    shares: tuple[float, ...]
    excess: tuple[float, ...]
    energy: tuple[float, ...]


def empty_interval(adapters: int) -> IntervalStats:
    """The statistics before the first round of an interval."""
    return IntervalStats(0, *((0.0,) * adapters,) * 3)


def add(stats: IntervalStats, released: Release) -> IntervalStats:
    """The sums with one more release of a plan of this controller."""
    plan, m = released.plan, released.expected_units
    (bits,) = (query for query in plan.queries if isinstance(query, AdapterBits))
    variance = plan.noise_std(m).square().expand(plan.clip.params)
    update = released.update.double().square()
    weight = _PRIOR / (_PRIOR + (bits.noise_std / m) ** 2)
    shares, excess, energy = [], [], []
    blocks = pairwise(accumulate(bits.sizes, initial=0))
    for (start, stop), bound, answer in zip(blocks, bits.thresholds, released.answer(bits.name).tolist(), strict=True):
        noise = float(variance[start:stop].sum()) / bound**2
        shares.append(weight * min(max(answer / m, -1.0), 1.0))
        excess.append(float(update[start:stop].sum()) / bound**2 - noise)
        energy.append(noise)
    return replace(
        stats,
        rounds=stats.rounds + 1,
        shares=_added(stats.shares, shares),
        excess=_added(stats.excess, excess),
        energy=_added(stats.energy, energy),
    )


def local_features(
    stats: IntervalStats, scales: tuple[float, ...], reach: float, sizes: tuple[int, ...]
) -> Float[Tensor, "n l"]:
    """Five features per adapter: share, alignment, signal to noise, position of its threshold, size."""
    n, rows = max(stats.rounds, 1), []
    middle = math.exp(math.fsum(map(math.log, sizes)) / len(sizes))
    for share, excess, energy, scale, size in zip(stats.shares, stats.excess, stats.energy, scales, sizes, strict=True):
        signal = max(excess, 0.0)
        alignment = min(math.sqrt(signal / n), 1.0)  # ||mean update|| / C, at most 1 without noise
        ratio = math.log1p(min(signal / energy, 1e3)) if energy > 0 else 0.0
        rows.append([2 * share / n, alignment, ratio, scale / reach, math.log10(size / middle) / 2])
    return torch.tensor(rows)


def global_features(*, done: float, spent: float, offset: float, gain: float, level: float) -> Float[Tensor, " g"]:
    """Five features of the run: progress, budget ahead of it, noise, last gain and total gain of log public loss."""
    return torch.tensor([2 * done - 1, 4 * (spent - done), offset, _within(gain, 2.0), _within(level, 3.0)])


def _within(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


def _added(before: tuple[float, ...], more: list[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(before, more, strict=True))
