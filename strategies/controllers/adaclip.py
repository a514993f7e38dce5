r"""AdaCliP: every coordinate is centred and rescaled by statistics of earlier releases before the row is clipped.

    w_k = (Delta_k - m) / b,  b_i = sqrt(s_i sum_l s_l),  released g = m + b (sum_k w_k min(1, 1/||w_k||) + z n) / (q N)
    m <- b1 m + (1 - b1) g         s^2 <- b2 s^2 + (1 - b2) q N ((g - m)^2 - (b z / (q N))^2)

Reference: Pichapati, Suresh, Yu, Reddi, Kumar, "AdaCliP: Adaptive Clipping for Private SGD" (arXiv 1908.07643v2),
Algorithm 2; b is their equation for the scale of least expected noise. (Opacus' "AdaClip" is quantile clipping.)
Guarantee: each round is one Poisson-sampled Gaussian of multiplier z; m and s are post-processing of releases.
Deviations:
- The released g is a MEAN of q N rows, so (g - m)^2, less the noise in it, has expectation s^2 / (q N). The factor q N
  is missing from the published rule, whose s is sqrt(q N) too small and clips every row.
- m as it was BEFORE the round is subtracted, which leaves the noise term exactly unbiased. While m is far from the
  mean, q N (g - m)^2 holds q N times the square of that distance: s is too large until m has arrived.
- They clamp each new term to [1e-12, 10]; here the average is kept as it is and its root is bounded where it is used,
  to [lowest, highest] times s_0. Where noise dominates, clamping each term at zero keeps the positive half of it: s
  then grows, b with it, the noise with b, and so on up to the limit.
- ``pool = "blocks"`` takes one s for all values of an (A, B) pair or head. One value carries signal over noise of about
  q N / (d z^2) per round, which for an adapter of 1e5 values and a cohort of a hundred is nothing.
- s_0 = C / sqrt(d), so that round 1 clips as flat clipping with C does.
- In a run whose releases carry no noise (``insecure-zero``) the noise the plan names is taken off s all the same.
Rounds whose updates have other block sizes (DP-DyLoRA) keep statistics of their own, made when they first come.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from privacy import checks
from privacy.clipping.whitening import AdaClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from strategies.controllers.controller import Controller, PublicSignals, RunInfo

POOLS = ("coordinates", "blocks")


@dataclass(frozen=True)
class Moments:
    """Mean and variance of single rows, as far as releases tell: m and s^2, float64 ``[d]``; s^2 may be negative."""

    mean: Float64[Tensor, " d"]
    variance: Float64[Tensor, " d"]


@dataclass(frozen=True)
class AdaclipState:
    """Statistics by the block sizes of the rounds they are of."""

    moments: dict[str, Moments]


@dataclass(frozen=True)
class Adaclip(Controller[AdaclipState]):
    """The AdaCliP controller of this page.

    Attributes:
        clip_norm: C, of round 1, > 0.
        mean_history: b1, in [0, 1).
        variance_history: b2, in [0, 1).
        pool: ``"coordinates"`` as in the paper, or ``"blocks"``.
        lowest, highest: bounds of s in units of C / sqrt(d).
    """

    clip_norm: float = 1.0
    mean_history: float = 0.99
    variance_history: float = 0.9
    pool: str = "coordinates"
    lowest: float = 1e-2
    highest: float = 10.0

    def __post_init__(self) -> None:
        checks.within(1e-9, 1e9, clip_norm=self.clip_norm)
        checks.within(0.0, 0.9999, mean_history=self.mean_history, variance_history=self.variance_history)
        checks.one_of(POOLS, pool=self.pool)
        checks.within(1e-6, 1.0, lowest=self.lowest)
        checks.within(1.0, 1e6, highest=self.highest)

    def init(self, info: RunInfo, public: PublicSignals) -> AdaclipState:
        blocks = info.blocks(1)
        return AdaclipState({_key(blocks): self._fresh(blocks)})

    def plan(self, state: AdaclipState, info: RunInfo, round: int) -> Plan:
        blocks = info.blocks(round)
        moments = state.moments.get(_key(blocks)) or self._fresh(blocks)
        return Plan(self._map(moments, blocks), info.noise_multiplier(round))

    def update(self, state: AdaclipState, info: RunInfo, released: Release, public: PublicSignals) -> AdaclipState:
        blocks, expected = info.blocks(public.round), released.expected_units
        moments = state.moments.get(_key(blocks)) or self._fresh(blocks)
        mean = released.update.double()
        noise = released.plan.noise_std(expected).square()
        variance = expected * ((mean - moments.mean).square() - noise)
        moments = Moments(
            torch.lerp(mean, moments.mean, self.mean_history),
            torch.lerp(variance, moments.variance, self.variance_history),
        )
        return replace(state, moments={**state.moments, _key(blocks): moments})

    def released_values(self, state: AdaclipState, info: RunInfo) -> dict[str, float]:
        blocks = info.blocks(1)
        deviations = self._deviations(state.moments[_key(blocks)], blocks)
        # The norm at which flat clipping cuts rows of these deviations, and the noise as a share of what it would add.
        bound = float(deviations.norm())
        return {"clip-bound": bound, "noise-share": float(deviations.sum()) / bound / len(deviations) ** 0.5}

    def _fresh(self, blocks: tuple[int, ...]) -> Moments:
        size = sum(blocks)
        zero = torch.zeros(size, dtype=torch.float64)
        return Moments(zero, zero + self.clip_norm**2 / size)

    def _deviations(self, moments: Moments, blocks: tuple[int, ...]) -> Float64[Tensor, " d"]:
        """s, bounded."""
        variance = moments.variance
        if self.pool == "blocks":
            parts = torch.split(variance, list(blocks))
            variance = torch.cat([part.mean().expand(len(part)) for part in parts])
        unit = self.clip_norm / len(variance) ** 0.5
        return variance.clamp_min(0.0).sqrt().clamp(self.lowest * unit, self.highest * unit)

    def _map(self, moments: Moments, blocks: tuple[int, ...]) -> AdaClip:
        deviations = self._deviations(moments, blocks)
        scale: Float32[Tensor, " d"] = (deviations * deviations.sum()).sqrt().float()
        return AdaClip(moments.mean.float(), scale)


def _key(blocks: tuple[int, ...]) -> str:
    return "+".join(map(str, blocks))
