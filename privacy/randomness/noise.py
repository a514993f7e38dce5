"""The kinds of noise: integer vectors on the grid of a Contribution, for ``mechanism.charged_release`` alone.

=====================  ====================================================================================  =========
kind                   what it draws, per coordinate of noise multiplier z                                   private
=====================  ====================================================================================  =========
GaussianNoise          round(2^40 z x), x a standard normal in float64 from a CSPRNG                         yes
DiscreteGaussianNoise  exactly the discrete Gaussian of integer parameter ceil(2^40 z): no float involved    yes
CorrelatedNoise        round(2^40 z w), w correlated over the releases of a run (``correlated.py``)         yes
InsecureSeededNoise    round(2^40 z x) from a seeded generator, for tests                                    NO
InsecureZeroNoise      zero, for tests and for runs without privacy                                          NO
=====================  ====================================================================================  =========

Why rounding a Gaussian is no weaker: the data are integers on this grid, so adding a rounded Gaussian equals rounding
(data + Gaussian), which is post-processing of the Gaussian mechanism. What float64 leaves open is only that x itself is
computed, not exact.

Why the discrete Gaussian of parameter S is no weaker: its mass at n is that of the rounded Gaussian up to a factor
exp(+-(n^2 + S^2)/(24 S^4)), a Taylor expansion over one grid step. For |n| <= 40 S that is 1 +- 2^-73 at z = 1, and
1 +- 2^-33 at the least z a Plan allows; beyond 40 S lies a mass of exp(-800). So every (epsilon, delta) of the Gaussian
holds for it up to what no accountant resolves; for concentrated DP it holds without any such factor (Canonne, Kamath
and Steinke 2020, arXiv 2004.00010v5).
"""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from privacy.contribution import GRID
from privacy.randomness.discrete_gaussian import discrete_gaussian
from privacy.randomness.rng import SecureRandom, simulation_generator


@runtime_checkable
class Noise(Protocol):
    """A source of noise vectors. ``insecure`` ones make the mechanism stamp the ledger NOT PRIVATE."""

    @property
    def insecure(self) -> bool:
        """True for test doubles."""

    def draw(self, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
        """Draw that many grid integers for each (noise multiplier, length), concatenated; fresh at every call."""


class GaussianNoise:
    """Rounded Gaussian from ``SecureRandom``; the default."""

    insecure = False

    def __init__(self) -> None:
        self._random = SecureRandom()

    def draw(self, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
        return scale_normals(self._random.normal(sum(length for _, length in blocks)), blocks)


class DiscreteGaussianNoise:
    """Exact discrete Gaussian from ``SecureRandom``; no floating-point attack applies to it, at some cost in speed."""

    insecure = False

    def __init__(self) -> None:
        self._random = SecureRandom()

    def draw(self, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
        # A float64 times a power of two is exact, so ceil gives the least integer parameter that is not too small.
        parts = [discrete_gaussian(math.ceil(multiplier * GRID), length, self._random) for multiplier, length in blocks]
        return torch.from_numpy(np.concatenate(parts))


class InsecureSeededNoise:
    """Rounded Gaussian that can be repeated: whoever knows the seed can subtract it. For tests."""

    insecure = True

    def __init__(self, seed: int) -> None:
        self._generator = simulation_generator(seed, "insecure-noise")

    def draw(self, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
        return scale_normals(self._generator.standard_normal(sum(length for _, length in blocks)), blocks)


class InsecureZeroNoise:
    """No noise at all: the exact sums come out."""

    insecure = True

    def draw(self, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
        return torch.zeros(sum(length for _, length in blocks), dtype=torch.int64)


def scale_normals(normals: np.ndarray, blocks: Sequence[tuple[float, int]]) -> Int64[Tensor, " n"]:
    """Normals as grid integers, each block at its noise multiplier; ``normals`` is overwritten."""
    numbers, start = torch.from_numpy(normals), 0
    for multiplier, length in blocks:
        numbers[start : start + length] *= multiplier * GRID
        start += length
    return numbers.round_().to(torch.int64)
