"""Gaussian noise that hangs together over the releases of one run (:class:`privacy.events.Banded`).

Every turn draws fresh normals z_n and solves one row of C w = z from the b - 1 vectors w before it. These are kept in
the memory of the process and nowhere else: written down they would have to be kept as secret as the sums of all
rounds, and noise that can be read again can be subtracted. A process that is killed takes them along; the one that
goes on starts from none, which changes no guarantee (:class:`privacy.events.Banded`).

The vectors w are float64 and are not rounded; what is added to the integers of a sum is round(2^40 z w). As with
:class:`~privacy.randomness.noise.GaussianNoise`, rounding after adding is post-processing; what floating point leaves
open is that w is computed, not exact: besides the normals, b products and sums per coordinate. There is no
exact discrete form: C^{-1} takes integers off the grid.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float64, Int64
from torch import Tensor

from privacy.events import Banded, CyclicPoisson, Poisson
from privacy.randomness.noise import scaled
from privacy.randomness.rng import SecureRandom

LOUDEST = 16.0
"""Most times the standard deviation of correlated noise may be that of the normals it is made of."""

_HORIZON = 4096

Normals = Callable[[int], Float64[np.ndarray, " n"]]


class BandedNoise:
    """Correlated noise of one run; it serves the ledger it is first asked for, and no other.

    Args:
        coefficients: c_0, ..., c_{b-1} of the strategy.
        normals: makes so many standard normals, for tests: insecure. None is ``SecureRandom``.
    """

    def __init__(self, coefficients: Sequence[float], normals: Normals | None = None) -> None:
        self._strategy = Banded(tuple(map(float, coefficients)))
        if not loudness(self._strategy, _HORIZON) <= LOUDEST:
            raise ValueError(
                f"coefficients must not make noise louder than {LOUDEST:g} times as it is drawn, got {coefficients}; "
                "no strategy that helps does"
            )
        self._normals = SecureRandom().normal if normals is None else normals
        self.insecure = normals is not None
        self._before: deque[np.ndarray] = deque(maxlen=self._strategy.bands - 1)
        self._since = self._turn = -1  # of the first and of the last vector
        self._next: int | None = None
        self._ledger: object = None

    def correlation(self, sampling: Poisson, ledger: object) -> Banded:
        """How the noise of the next :meth:`draw` hangs together with that before it.

        Args:
            sampling: of its cohort.
            ledger: that is about to be charged.

        Raises:
            ValueError: the sampling is not cyclic or has no turn, or earlier noise was charged to another ledger.
        """
        if not isinstance(sampling, CyclicPoisson) or sampling.turn is None:
            raise ValueError(f"correlated noise needs cyclic sampling with a turn, got {sampling}; draw such a cohort")
        if self._ledger is not None and self._ledger is not ledger:
            raise ValueError("correlated noise must serve one ledger only, got another; make new noise for every run")
        self._ledger, self._next = ledger, sampling.turn
        since = self._since if self._turn == sampling.turn - 1 and self._turn >= 0 else sampling.turn
        return Banded(self._strategy.coefficients, since)

    def draw(self, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
        """The noise of the turn :meth:`correlation` was asked about; ValueError without that, or for another length."""
        turn, self._next = self._next, None
        if turn is None:
            raise ValueError("correlated noise is drawn once for every turn; ask for its correlation first")
        length = sum(length for _, length in blocks)
        if self._turn != turn - 1 or self._turn < 0:
            self._since = turn
            self._before.clear()
        if self._before and len(self._before[0]) != length:
            raise ValueError(f"correlated noise must have the same length in every release, got {length}")
        first, *others = self._strategy.coefficients
        noise = self._normals(length)
        for coefficient, before in zip(others, self._before, strict=False):
            noise -= coefficient * before
        noise /= first
        self._turn = turn
        self._before.appendleft(noise)
        if float(np.abs(noise).max(initial=0.0)) * max(multiplier for multiplier, _ in blocks) >= 2.0**22:
            raise ValueError("correlated noise leaves the range of 64-bit integers; lower the noise multiplier")
        return scaled(noise.copy(), blocks)


def loudness(correlation: Banded, turn: int) -> float:
    """Standard deviation of w at ``turn``; where more than 4,096 turns lie behind it, that at the last of these."""
    return math.hypot(*_inverse(correlation.coefficients)[: turn - correlation.since + 1])


@lru_cache(maxsize=16)
def _inverse(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """The first column of C^{-1}: ``_HORIZON`` entries, or fewer where they run away."""
    first, *others = coefficients
    found = [1.0 / first]
    while len(found) < _HORIZON and abs(found[-1]) < 1e3:
        recent = found[-len(others) :][::-1] if others else []
        found.append(-sum(c * w for c, w in zip(others, recent, strict=False)) / first)
    return tuple(found)
