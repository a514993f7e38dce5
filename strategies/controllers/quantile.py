"""Quantile clipping: C follows a quantile of the clients' update norms through one noisy bit each.

    b_t = clamp(1/2 + (sum_k (1{||Delta_k|| <= C_t} - 1/2) + N(0, sigma_b^2)) / m)
    C_{t+1} = C_t exp(-eta (b_t - gamma))

The bit is centred, so its sensitivity is 1/2 under adding or removing a client, and its noise is part of the round's
joint Gaussian: the update carries z_D = (z^-2 - (2 sigma_b)^-2)^(-1/2) instead of z, which needs z < 2 sigma_b.

Reference: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021
(arXiv 1905.03871v5), Algorithm 1 with the geometric update; defaults are theirs.
Guarantee: each round is one Poisson-sampled Gaussian of multiplier z, bit included; C is post-processing of the bits.
Deviations: C stays within a factor 1e6 of C_0. (Flower's wrappers of this name use the share of clipped clients with
the sign of the unclipped one, bits of sensitivity 1 and the noise of the next threshold; none of it is copied here.)
"""

from dataclasses import dataclass, replace

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from privacy.queries import NormBit
from strategies.controllers.controller import Controller, PublicSignals, RunInfo, check_queries, update_multiplier
from strategies.controllers.released_norms import follow_share, norm_bit, unclipped_share


@dataclass(frozen=True)
class QuantileState:
    """Threshold of the next round, and the last noisy share of unclipped clients (-1 before there is one)."""

    bound: float
    unclipped: float = -1.0


@dataclass(frozen=True)
class Quantile(Controller[QuantileState]):
    """The controller of quantile clipping.

    Attributes:
        clip_norm: C_0, > 0.
        quantile: gamma, the quantile of norms that C follows, in [0, 1]; 0.5 is the median.
        learning_rate: eta, > 0.
        bit_noise: sigma_b, std of the noise on the sum of bits; 0 takes m/20.
    """

    clip_norm: float = 0.1
    quantile: float = 0.5
    learning_rate: float = 0.2
    bit_noise: float = 0.0

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm, learning_rate=self.learning_rate)
        checks.fraction(quantile=self.quantile)
        checks.non_negative(bit_noise=self.bit_noise)

    def init(self, info: RunInfo, public: PublicSignals) -> QuantileState:
        state = QuantileState(self.clip_norm)
        check_queries(info, (self._bit(state, info),))
        return state

    def plan(self, state: QuantileState, info: RunInfo, round: int) -> Plan:
        bit = self._bit(state, info)
        z = update_multiplier(info.noise_multiplier(round), (bit,))
        return Plan(FlatClip(state.bound, info.dimension(round)), z, (bit,))

    def update(self, state: QuantileState, info: RunInfo, released: Release, public: PublicSignals) -> QuantileState:
        share = unclipped_share(released)
        bound = follow_share(state.bound, share, self.quantile, self.learning_rate, self.clip_norm)
        return replace(state, bound=bound, unclipped=share)

    def released_values(self, state: QuantileState, info: RunInfo) -> dict[str, float]:
        values = {"clip-bound": state.bound}
        return values if state.unclipped < 0 else values | {"unclipped-share": state.unclipped}

    def _bit(self, state: QuantileState, info: RunInfo) -> NormBit:
        return norm_bit(state.bound, self.bit_noise, info.sampling.expected_units)
