"""What is read off a released :class:`~privacy.queries.NormBit`, and the threshold that follows it.

With S the noisy sum of the bits +-1/2 and m the expected cohort, b = clamp(1/2 + S/m, 0, 1) estimates the share of
clients whose update was NOT longer than C; a client who stayed away adds nothing to S. Then

    C <- C exp(-eta (b - target)),

so C falls while more clients than ``target`` are unclipped, and its fixed point is the ``target``-quantile of the
norms (Andrew et al. 2021, arXiv 1905.03871v5, section 2). The same rule with the share of CLIPPED clients in place of
b has the wrong sign: C then runs away from the quantile.
"""

import math

from privacy.mechanism import Release
from privacy.queries import NormBit

DEFAULT_SHARE = 1 / 20
"""Default std of the noise on the sum of bits, as a share of the expected cohort (Andrew et al. 2021: m/20)."""

FARTHEST = 1e6
"""C stays within this factor of where it began, so that no run of equal bits ends outside what can be clipped with."""


def norm_bit(bound: float, noise_std: float, expected_units: float) -> NormBit:
    """The bit at threshold ``bound``; ``noise_std`` 0 is the default of the paper."""
    return NormBit(bound, noise_std or DEFAULT_SHARE * expected_units)


def unclipped_share(released: Release) -> float:
    """Noisy share of clients whose norm was at most the threshold, in [0, 1]."""
    total = float(released.answer("norm-bit")[0])
    return min(1.0, max(0.0, 0.5 + total / released.expected_units))


def followed(bound: float, share: float, target: float, rate: float, first_bound: float) -> float:
    """The next threshold after a round at ``bound`` in which ``share`` of the clients were not clipped."""
    moved = bound * math.exp(-rate * (share - target))
    return min(FARTHEST * first_bound, max(first_bound / FARTHEST, moved))
