"""Percentile clipping of DP-Adam-AC, its sound form: C aims at a clip rate, and the learning rate is nudged by it.

    target: a share rho* of the clients is clipped, i.e. C -> the (1 - rho*)-quantile of their update norms
    bit:        C_{t+1} = C_t exp(-eta (b_t - (1 - rho*))),  b_t the noisy share of unclipped clients (Andrew et al.)
    histogram:  C_{t+1} = the (1 - rho*)-quantile of the noisy histogram of norms, averaged over rounds
    nudge:      gamma <- min(gamma_max, 1.01 gamma) if rho_t < rho_low,  max(gamma_min, 0.995 gamma) if rho_t > rho_high

gamma multiplies the server optimizer's step; rho_t, the share of clipped clients at C_t, is read off the same release
(1 - b_t, or the histogram's mass above C_t), so the nudge costs nothing. C stays within [``lowest``, ``highest``].

Reference: R. Yang, "DP-Adam-AC", 2025. The bit: Andrew et al. 2021 (arXiv
1905.03871v5); the histogram: as in ``dc_sgd.py``. Adam and the averaged model of the paper are the server optimizer and
``strategy.served-average``; both are post-processing.
Guarantee: each round is one Poisson-sampled Gaussian of multiplier z, bit or histogram included; C and gamma are
post-processing.
Deviations, without which there is no guarantee: the paper takes C and rho from RAW norms and clip counts, and clips
micro-batches of m records to C m under noise for C. Here a unit is one client, clipped to C, and what C follows is
released with noise. Limits of gamma, rho_low and rho_high are ours (the paper's are not known).
"""

from dataclasses import dataclass, replace

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from privacy.queries import NormBit, NormHistogram
from strategies.controllers import released_norms
from strategies.controllers.controller import Controller, PublicSignals, RunInfo, check_queries, update_multiplier
from strategies.controllers.released_norms import follow_share, norm_bit, unclipped_share

SOURCES = ("bit", "histogram")


@dataclass(frozen=True)
class PercentileState:
    """Threshold and step factor of the next round, the last clip rate (-1: none yet), the averaged histogram."""

    bound: float
    scale: float = 1.0
    clip_rate: float = -1.0
    history: tuple[float, ...] = ()
    histograms: int = 0


@dataclass(frozen=True)
class Percentile(Controller[PercentileState]):
    """Percentile clipping with a learning-rate nudge.

    Attributes:
        clip_norm: C_0, in [lowest, highest].
        clip_rate: rho*, the share of clients to be clipped, in (0, 1).
        source: what C follows, "bit" or "histogram".
        learning_rate: eta of the bit's rule, > 0.
        query_noise: std of the noise on the sum of bits or on each count; 0 takes m/20 or m/10.
        history: factor of the histogram's average over rounds, in [0, 0.99].
        lowest: least C, > 0.
        highest: largest C, at least twice and at most 2^20 times the least.
        low_rate: rho_low, below it the step grows; in [0, clip_rate].
        high_rate: rho_high, above it the step shrinks; in [clip_rate, 1].
        up: factor of growth, in [1, 2].
        down: factor of shrinkage, in [0.5, 1].
        least_scale: gamma_min, in (0, 1].
        most_scale: gamma_max, >= 1. ``up = 1`` and ``down = 1`` switch the nudge off.
    """

    clip_norm: float = 3.0
    clip_rate: float = 0.2
    source: str = "bit"
    learning_rate: float = 0.2
    query_noise: float = 0.0
    history: float = 0.9
    lowest: float = 1 / 256
    highest: float = 64.0
    low_rate: float = 0.1
    high_rate: float = 0.3
    up: float = 1.01
    down: float = 0.995
    least_scale: float = 0.5
    most_scale: float = 2.0

    def __post_init__(self) -> None:
        checks.one_of(SOURCES, source=self.source)
        checks.positive(lowest=self.lowest, learning_rate=self.learning_rate)
        checks.non_negative(query_noise=self.query_noise)
        checks.within(2.0 * self.lowest, 2.0**20 * self.lowest, highest=self.highest)
        checks.within(self.lowest, self.highest, clip_norm=self.clip_norm)
        checks.within(0.001, 0.999, clip_rate=self.clip_rate)
        checks.within(0.0, 0.99, history=self.history)
        checks.within(0.0, self.clip_rate, low_rate=self.low_rate)
        checks.within(self.clip_rate, 1.0, high_rate=self.high_rate)
        checks.within(1.0, 2.0, up=self.up)
        checks.within(0.5, 1.0, down=self.down)
        checks.within(0.01, 1.0, least_scale=self.least_scale)
        checks.within(1.0, 100.0, most_scale=self.most_scale)

    def init(self, info: RunInfo, public: PublicSignals) -> PercentileState:
        state = PercentileState(self.clip_norm)
        check_queries(info, (self._query(state, info),))
        return state

    def plan(self, state: PercentileState, info: RunInfo, round: int) -> Plan:
        query = self._query(state, info)
        z = update_multiplier(info.noise_multiplier(round), (query,))
        return Plan(FlatClip(state.bound, info.dimension(round)), z, (query,))

    def update(
        self, state: PercentileState, info: RunInfo, released: Release, public: PublicSignals
    ) -> PercentileState:
        if self.source == "histogram":
            state, rate, bound = self._from_histogram(state, info, released)
        else:
            share = unclipped_share(released)
            rate, bound = (
                1.0 - share,
                follow_share(state.bound, share, 1 - self.clip_rate, self.learning_rate, state.bound),
            )
        if rate < 0:
            return state
        bound = min(self.highest, max(self.lowest, bound))
        return replace(state, bound=bound, clip_rate=rate, scale=self.nudge_scale(state.scale, rate))

    def step_scale(self, state: PercentileState) -> float:
        return state.scale

    def released_values(self, state: PercentileState, info: RunInfo) -> dict[str, float]:
        values = {"clip-bound": state.bound, "step-scale": state.scale}
        return values if state.clip_rate < 0 else values | {"clip-rate": state.clip_rate}

    def _query(self, state: PercentileState, info: RunInfo) -> NormBit | NormHistogram:
        expected = info.sampling.expected_units
        if self.source == "bit":
            return norm_bit(state.bound, self.query_noise, expected)
        edges = released_norms.norm_edges(self.lowest, self.highest)
        return NormHistogram(edges, self.query_noise or released_norms.DEFAULT_SHARE * expected)

    def _from_histogram(
        self, state: PercentileState, info: RunInfo, released: Release
    ) -> tuple[PercentileState, float, float]:
        """The state with one more histogram, the clip rate at C_t and the next C; -1 and C_t while it says nothing."""
        query = self._query(state, info)
        assert isinstance(query, NormHistogram)
        history = released_norms.blend_histogram(state.history, released.answer(query.name), self.history)
        state = replace(state, history=history, histograms=state.histograms + 1)
        parts = released_norms.shares(history, self.history, state.histograms, query.noise_std)
        if parts is None:
            return state, -1.0, state.bound
        rate = released_norms.share_above(query.edges, parts, state.bound)
        return state, rate, released_norms.quantile(query.edges, parts, 1.0 - self.clip_rate)

    def nudge_scale(self, scale: float, rate: float) -> float:
        """The step's scale after a release with such a clip rate."""
        if rate < self.low_rate:
            return min(self.most_scale, self.up * scale)
        if rate > self.high_rate:
            return max(self.least_scale, self.down * scale)
        return scale
