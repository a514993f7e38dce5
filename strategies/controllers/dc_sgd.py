"""DC-SGD-P and DC-SGD-E: the threshold is read off a noisy histogram of the clients' update norms.

    H_t = histogram of ||Delta_k|| + N(0, sigma_H^2 I),   sigma_T = (sigma^-2 - sigma_H^-2)^(-1/2) for the update
    P:  C = the first edge below which more than a share p of the clients lie
    E:  C = argmin_C  sigma_T^2 C^2 d / m^2  +  sum_j h_j max(0, x_j - C)^2        (noise + clipping error of the mean)

h_j is the share of clients in bin j of the noisy histogram and x_j the norm that stands for the bin.

Reference: Wei et al., "DC-SGD" (arXiv 2503.22988), defined for gradients of records; p = 0.3 is that of published code.
Guarantee: histogram and update of a round are one Poisson-sampled Gaussian of multiplier z (sigma here), add or remove
one client; C is post-processing of histograms. True norms are used nowhere.
Deviations: log-spaced bins half an octave wide in place of 20 linear bins of adaptive width, because norms of client
updates differ by orders of magnitude between tasks; the histogram is averaged over rounds and cleaned of bins that are
noise (``released_norms.py``; with cohorts of a hundred the paper's single histogram is mostly noise), and C stays as
it is until something significant was seen; E is minimised exactly, it is convex and piecewise quadratic, in place of
the paper's grid search around the last C. ``history = 0`` reads each round's histogram by itself.
"""

from dataclasses import dataclass, replace

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from privacy.queries import NormHistogram
from strategies.controllers import released_norms
from strategies.controllers.controller import Controller, PublicSignals, RunInfo, check_queries, update_multiplier


@dataclass(frozen=True)
class DcSgdState:
    """Threshold of the next round, the averaged histogram (empty before the first) and how many went into it."""

    bound: float
    history: tuple[float, ...] = ()
    histograms: int = 0


@dataclass(frozen=True)
class _FromHistogram(Controller[DcSgdState]):
    """What both rules share: the histogram asked in every round, and what is kept of it."""

    clip_norm: float = 1.0
    histogram_noise: float = 0.0
    history: float = 0.9
    lowest: float = 1 / 256
    highest: float = 64.0

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm, lowest=self.lowest)
        checks.non_negative(histogram_noise=self.histogram_noise)
        checks.within(0.0, 0.99, history=self.history)
        checks.within(2.0 * self.lowest, 2.0**20 * self.lowest, highest=self.highest)

    def init(self, info: RunInfo, public: PublicSignals) -> DcSgdState:
        check_queries(info, (self._query(info),))
        return DcSgdState(self.clip_norm)

    def plan(self, state: DcSgdState, info: RunInfo, round: int) -> Plan:
        query = self._query(info)
        z = update_multiplier(info.noise_multiplier(round), (query,))
        return Plan(FlatClip(state.bound, info.dimension(round)), z, (query,))

    def update(self, state: DcSgdState, info: RunInfo, released: Release, public: PublicSignals) -> DcSgdState:
        query = self._query(info)
        history = released_norms.blend_histogram(state.history, released.answer(query.name), self.history)
        state = replace(state, history=history, histograms=state.histograms + 1)
        parts = released_norms.shares(history, self.history, state.histograms, query.noise_std)
        if parts is None:
            return state
        coming = min(public.round + 1, info.rounds)
        noise_on_mean = self.plan(state, info, coming).noise_multiplier / info.sampling.expected_units
        return replace(state, bound=self._bound(parts, noise_on_mean**2 * info.dimension(coming)))

    def released_values(self, state: DcSgdState, info: RunInfo) -> dict[str, float]:
        return {"clip-bound": state.bound}

    def _bound(self, parts: tuple[float, ...], price: float) -> float:
        """C from the share of clients per bin and sigma_T^2 d / m^2 of the next round."""
        raise NotImplementedError

    def _edges(self) -> tuple[float, ...]:
        return released_norms.norm_edges(self.lowest, self.highest)

    def _query(self, info: RunInfo) -> NormHistogram:
        noise_std = self.histogram_noise or released_norms.DEFAULT_SHARE * info.sampling.expected_units
        return NormHistogram(self._edges(), noise_std)


@dataclass(frozen=True)
class DcSgdP(_FromHistogram):
    """DC-SGD-P: a quantile of the noisy histogram.

    Attributes:
        clip_norm: C before the first significant histogram, > 0.
        histogram_noise: sigma_H, std of the noise on each count; 0 takes m/10.
        history: factor b of the average over rounds, in [0, 0.99].
        lowest: the smallest edge, > 0.
        highest: the largest edge, at least twice and at most 2^20 times the smallest.
        share: p, in [0, 1): C is the first edge below which more than this share of clients lie.
    """

    share: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.within(0.0, 0.999, share=self.share)

    def _bound(self, parts: tuple[float, ...], price: float) -> float:
        return released_norms.upper_edge(self._edges(), parts, self.share)


@dataclass(frozen=True)
class DcSgdE(_FromHistogram):
    """DC-SGD-E: the least expected error of the mean.

    Attributes:
        clip_norm, histogram_noise, history, lowest, highest: as of :class:`DcSgdP`; C never falls below ``lowest``.
    """

    def _bound(self, parts: tuple[float, ...], price: float) -> float:
        return max(self.lowest, least_error(released_norms.representatives(self._edges()), parts, price))


def least_error(norms: tuple[float, ...], parts: tuple[float, ...], price: float) -> float:
    """The C > 0 with the least price C^2 + sum_j parts_j max(0, norms_j - C)^2; ``norms`` increasing, ``price`` > 0.

    Where the clients above C are the last bins, the derivative vanishes at C = sum parts_j norms_j / (price + sum
    parts_j) over them; bins are taken in from the top until that C lies above the next one.
    """
    mass = moment = bound = 0.0
    for norm, part in sorted(zip(norms, parts, strict=True), reverse=True):
        if bound >= norm:
            break
        mass, moment = mass + part, moment + part * norm
        bound = moment / (price + mass)
    return bound
