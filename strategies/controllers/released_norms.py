"""Readings of released statistics of update norms: histograms averaged over rounds, and the one-bit quantile rule.

Histograms. Edges are public and log-spaced, half an octave apart: client updates differ by orders of magnitude between
tasks, and a grid with a width fitted to the data would have to be released first. Counts carry Gaussian noise of std s,
and the many bins that are really empty would, once their negative counts are set to 0, add up to a mass of about 0.4 s
each. So

- histograms are averaged over rounds, H_n = (1 - b) sum_i b^(n-i) h_i / (1 - b^n), which leaves noise of std
  s_n = s sqrt((1 - b)/(1 + b) (1 + b^n)/(1 - b^n)) on each count (s/4.4 in the long run at b = 0.9);
- a bin is significant if it holds more than 3.5 s_n (an empty one passes with probability 2e-4); all bins outside the
  range of the significant ones, widened by one bin on either side, count as empty, and negative counts as 0.

Where nothing is significant nothing is read off.

Bits (:class:`~privacy.queries.NormBit`). With S the noisy sum of the bits +-1/2 and m the expected cohort,
b = clamp(1/2 + S/m, 0, 1) estimates the share of clients whose update was NOT longer than C; a client who stayed away
adds nothing to S. Then

    C <- C exp(-eta (b - target)),

so C falls while more clients than ``target`` are unclipped, and its fixed point is the ``target``-quantile of the
norms (Andrew et al. 2021, arXiv 1905.03871v5, section 2). The same rule with the share of CLIPPED clients in place of
b has the wrong sign: C then runs away from the quantile.

All of it is post-processing of releases.
"""

import math
from bisect import bisect_right
from itertools import accumulate

from torch import Tensor

from privacy.mechanism import Release
from privacy.queries import NormBit

SIGNIFICANT = 3.5
"""Standard deviations of noise that a bin must exceed."""

DEFAULT_SHARE = 1 / 10
"""Default std of the noise on a count, as a share of the expected cohort."""


def norm_edges(lowest: float, highest: float) -> tuple[float, ...]:
    """Edges from ``lowest`` to at least ``highest``, half an octave apart."""
    steps = math.ceil(2.0 * math.log2(highest / lowest) - 1e-9)
    return tuple(lowest * 2.0 ** (j / 2) for j in range(max(1, steps) + 1))


def blend_histogram(history: tuple[float, ...], counts: Tensor, factor: float) -> tuple[float, ...]:
    """The running sum b H' + (1 - b) h per bin, which :func:`shares` divides by 1 - b^n."""
    before = history or (0.0,) * len(counts)
    return tuple(factor * old + (1.0 - factor) * new for old, new in zip(before, counts.tolist(), strict=True))


def noise_left(noise_std: float, factor: float, rounds: int) -> float:
    """The standard deviation s_n of the noise on each averaged count."""
    power = factor**rounds
    return noise_std * math.sqrt((1.0 - factor) / (1.0 + factor) * (1.0 + power) / (1.0 - power))


def shares(history: tuple[float, ...], factor: float, rounds: int, noise_std: float) -> tuple[float, ...] | None:
    """Share of clients per bin, adding up to 1; None where no bin is significant."""
    counts = [count / (1.0 - factor**rounds) for count in history]
    limit = SIGNIFICANT * noise_left(noise_std, factor, rounds)
    significant = [i for i, count in enumerate(counts) if count > limit]
    if not significant:
        return None
    first, last = significant[0] - 1, significant[-1] + 1
    kept = [max(0.0, count) if first <= i <= last else 0.0 for i, count in enumerate(counts)]
    return tuple(count / sum(kept) for count in kept)


def upper_edge(edges: tuple[float, ...], parts: tuple[float, ...], share: float) -> float:
    """The first edge below which more than ``share`` of the clients lie; the last edge if none does."""
    below = list(accumulate(parts))[: len(edges)]
    return next((edge for edge, mass in zip(edges, below, strict=True) if mass > share), edges[-1])


def quantile(edges: tuple[float, ...], parts: tuple[float, ...], share: float) -> float:
    """The ``share``-quantile, interpolated on a log scale within its bin; the first or last edge where it is open."""
    below = list(accumulate(parts))
    place = next((i for i, mass in enumerate(below) if mass >= share), len(edges))
    if place == 0:
        return edges[0]
    if place >= len(edges):
        return edges[-1]
    inside = (share - below[place - 1]) / parts[place]
    return float(edges[place - 1] * (edges[place] / edges[place - 1]) ** inside)


def share_above(edges: tuple[float, ...], parts: tuple[float, ...], norm: float) -> float:
    """Share of clients whose norm exceeds ``norm``, interpolated as :func:`quantile` does."""
    place = bisect_right(edges, norm)
    if place == 0:
        return 1.0 - parts[0]
    if place == len(edges):
        return parts[-1]
    inside = math.log(norm / edges[place - 1]) / math.log(edges[place] / edges[place - 1])
    return sum(parts[place + 1 :]) + (1.0 - inside) * parts[place]


def representatives(edges: tuple[float, ...]) -> tuple[float, ...]:
    """One norm for every bin: the geometric middle, and beyond the ends half a bin further."""
    ratio = math.sqrt(edges[1] / edges[0])
    return (edges[0] / ratio, *(edge * ratio for edge in edges))


BIT_SHARE = 1 / 20
"""Default std of the noise on the sum of bits, as a share of the expected cohort (Andrew et al. 2021: m/20)."""

FARTHEST = 1e6
"""C stays within this factor of where it began, so that no run of equal bits ends outside what can be clipped with."""


def norm_bit(bound: float, noise_std: float, expected_units: float) -> NormBit:
    """The bit at threshold ``bound``; ``noise_std`` 0 is the default of the paper."""
    return NormBit(bound, noise_std or BIT_SHARE * expected_units)


def unclipped_share(released: Release) -> float:
    """Noisy share of clients whose norm was at most the threshold, in [0, 1]."""
    total = float(released.answer("norm-bit")[0])
    return min(1.0, max(0.0, 0.5 + total / released.expected_units))


def follow_share(bound: float, share: float, target: float, rate: float, first_bound: float) -> float:
    """The next threshold after a round at ``bound`` in which ``share`` of the clients were not clipped."""
    moved = bound * math.exp(-rate * (share - target))
    return min(FARTHEST * first_bound, max(first_bound / FARTHEST, moved))
