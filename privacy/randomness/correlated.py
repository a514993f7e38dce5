"""Gaussian noise that hangs together over the releases of one run (``privacy.events.correlation``).

Every turn draws fresh normals z_n and solves one row of C w = z from what is kept of the rows before it: the last b - 1
vectors w of a banded strategy, the d buffers of a buffered Toeplitz one. These are kept in the memory of the process
and nowhere else: written down they would have to be kept as secret as the sums of all rounds, and noise that can be
read again can be subtracted. A process that is killed takes them along; the one that goes on starts from none, which
changes no guarantee (``privacy.events.correlation``).

The vectors w are float64 and are not rounded; what is added to the integers of a sum is round(2^40 z w). As with
:class:`~privacy.randomness.noise.GaussianNoise`, rounding after adding is post-processing; what floating point leaves
open is that w is computed, not exact: besides the normals, b (or 2 d) products and sums per coordinate. There is no
exact discrete form: C^{-1} takes integers off the grid.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from jaxtyping import Float64, Int64
from torch import Tensor

from privacy.events import BufferedToeplitz, Correlation, CyclicPoisson, Poisson
from privacy.randomness.noise import scale_normals
from privacy.randomness.rng import SecureRandom

LOUDEST = 16.0
"""Most times the standard deviation of correlated noise may be that of the normals it is made of."""

_HORIZON = 4096

Normals = Callable[[int], Float64[np.ndarray, " n"]]


class _Rows(Protocol):
    """Solves C w = z row by row, the first row first."""

    def solved(self, normals: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """w of the next row, in place of its normals; what is kept of it is kept elsewhere."""


class _Bands:
    """Of a banded strategy: keeps the last b - 1 rows."""

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._first, *self._others = coefficients
        self._before: deque[np.ndarray] = deque(maxlen=len(self._others))

    def solved(self, normals: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        for coefficient, before in zip(self._others, self._before, strict=False):
            normals -= coefficient * before
        normals /= self._first
        self._before.appendleft(normals.copy())
        return normals


class _Buffers:
    """Of a buffered Toeplitz strategy: keeps d sums s_i of all rows, the last of them counted most."""

    def __init__(self, strategy: BufferedToeplitz) -> None:
        self._scales, self._decays = strategy.scales, strategy.decays
        self._buffers: list[np.ndarray] = []

    def solved(self, normals: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        self._buffers = self._buffers or [np.zeros_like(normals) for _ in self._scales]
        for scale, buffer in zip(self._scales, self._buffers, strict=True):
            normals -= scale * buffer
        for decay, buffer in zip(self._decays, self._buffers, strict=True):
            buffer *= decay
            buffer += normals
        return normals


class CorrelatedNoise:
    """Correlated noise of one run; it serves the ledger it is first asked for, and no other.

    Args:
        strategy: how it hangs together; where it starts does not matter.
        normals: makes so many standard normals, for tests: insecure. None is ``SecureRandom``.
    """

    def __init__(self, strategy: Correlation, normals: Normals | None = None) -> None:
        self._strategy = replace(strategy, since=0)
        if not loudness(self._strategy, _HORIZON) <= LOUDEST:
            raise ValueError(
                f"coefficients must not make noise louder than {LOUDEST:g} times as it is drawn, got {strategy}; "
                "no strategy that helps does"
            )
        self._normals = SecureRandom().normal if normals is None else normals
        self.insecure = normals is not None
        self._rows = _rows(self._strategy)
        self._length: int | None = None  # of the vectors since it started
        self._since = self._turn = -1  # of the first and of the last vector
        self._next: int | None = None
        self._ledger: object = None

    def correlation(self, sampling: Poisson, ledger: object) -> Correlation:
        """Describe how the noise of the next :meth:`draw` hangs together with that before it.

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
        return replace(self._strategy, since=since)

    def draw(self, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
        """The noise of the turn :meth:`correlation` was asked about; ValueError without that, or for another length."""
        turn, self._next = self._next, None
        if turn is None:
            raise ValueError("correlated noise is drawn once for every turn; ask for its correlation first")
        length = sum(length for _, length in blocks)
        if self._turn != turn - 1 or self._turn < 0:
            self._since = turn
            self._rows, self._length = _rows(self._strategy), None
        if self._length not in (None, length):
            raise ValueError(f"correlated noise must have the same length in every release, got {length}")
        noise = self._rows.solved(self._normals(length))
        self._turn, self._length = turn, length
        if float(np.abs(noise).max(initial=0.0)) * max(multiplier for multiplier, _ in blocks) >= 2.0**22:
            raise ValueError("correlated noise leaves the range of 64-bit integers; lower the noise multiplier")
        return scale_normals(noise, blocks)


def _rows(strategy: Correlation) -> _Rows:
    return _Buffers(strategy) if isinstance(strategy, BufferedToeplitz) else _Bands(strategy.coefficients)


def loudness(correlation: Correlation, turn: int) -> float:
    """Standard deviation of w at ``turn``; where more than 4,096 turns lie behind it, that at the last of these."""
    return math.hypot(*_inverse(replace(correlation, since=0))[: turn - correlation.since + 1])


@lru_cache(maxsize=16)
def _inverse(strategy: Correlation) -> tuple[float, ...]:
    """The first column of C^{-1}: ``_HORIZON`` entries, or fewer where they run away."""
    rows = _rows(strategy)
    found = [float(rows.solved(np.ones(1))[0])]
    while len(found) < _HORIZON and abs(found[-1]) < 1e3:
        found.append(float(rows.solved(np.zeros(1))[0]))
    return tuple(found)
