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
from typing import ClassVar

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.mechanism import Release
from privacy.queries import NormHistogram
from strategies.controllers import released_norms
from strategies.controllers.controller import (
    InitialRelease,
    PublicSignals,
    RunInfo,
    check_queries,
    constant_profile,
    update_multiplier,
)


@dataclass(frozen=True)
class DcSgdState:
    """Threshold of the next round, the averaged histogram (empty before the first) and how many went into it."""

    setting: RunInfo
    bound: float
    history: tuple[float, ...] = ()
    histograms: int = 0


@dataclass(frozen=True)
class DcSgdP:
    """DC-SGD-P: a quantile of the noisy histogram.

    Attributes:
        clip_norm: C before the first significant histogram, > 0.
        share: p, in [0, 1): C is the first edge below which more than this share of clients lie.
        histogram_noise: sigma_H, std of the noise on each count; 0 takes m/10.
        history: factor b of the average over rounds, in [0, 0.99].
        lowest: the smallest edge, > 0.
        highest: the largest edge, at least twice and at most 2^20 times the smallest.
    """

    reads_validation: ClassVar[bool] = False
    clip_norm: float = 1.0
    share: float = 0.3
    histogram_noise: float = 0.0
    history: float = 0.9
    lowest: float = 1 / 256
    highest: float = 64.0

    def __post_init__(self) -> None:
        _check(self)
        checks.within(0.0, 0.999, share=self.share)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return constant_profile(rounds)

    def init(self, setting: RunInfo, public: PublicSignals) -> DcSgdState:
        return _initial(self, setting)

    def plan(self, state: DcSgdState, round: int) -> Plan:
        return _plan(self, state, round)

    def update(self, state: DcSgdState, released: Release, public: PublicSignals) -> DcSgdState:
        state, parts = _with_histogram(self, state, released)
        if parts is None:
            return state
        return replace(state, bound=released_norms.upper_edge(_edges(self), parts, self.share))

    def step_scale(self, state: DcSgdState) -> float:
        return 1.0

    def released_values(self, state: DcSgdState) -> dict[str, float]:
        return {"clip-bound": state.bound}


@dataclass(frozen=True)
class DcSgdE:
    """DC-SGD-E: the least expected error of the mean.

    Attributes:
        clip_norm: C before the first significant histogram, > 0.
        histogram_noise: sigma_H, std of the noise on each count; 0 takes m/10.
        history: factor b of the average over rounds, in [0, 0.99].
        lowest: the smallest edge, > 0; C never falls below it.
        highest: the largest edge, at least twice and at most 2^20 times the smallest.
    """

    reads_validation: ClassVar[bool] = False
    clip_norm: float = 1.0
    histogram_noise: float = 0.0
    history: float = 0.9
    lowest: float = 1 / 256
    highest: float = 64.0

    def __post_init__(self) -> None:
        _check(self)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return constant_profile(rounds)

    def init(self, setting: RunInfo, public: PublicSignals) -> DcSgdState:
        return _initial(self, setting)

    def plan(self, state: DcSgdState, round: int) -> Plan:
        return _plan(self, state, round)

    def update(self, state: DcSgdState, released: Release, public: PublicSignals) -> DcSgdState:
        state, parts = _with_histogram(self, state, released)
        if parts is None:
            return state
        setting, coming = state.setting, min(public.round + 1, state.setting.rounds)
        noise_on_mean = _plan(self, state, coming).noise_multiplier / setting.sampling.expected_units
        price = noise_on_mean**2 * setting.dimension(coming)
        bound = least_error(released_norms.representatives(_edges(self)), parts, price)
        return replace(state, bound=max(self.lowest, bound))

    def step_scale(self, state: DcSgdState) -> float:
        return 1.0

    def released_values(self, state: DcSgdState) -> dict[str, float]:
        return {"clip-bound": state.bound}


def least_error(norms: tuple[float, ...], parts: tuple[float, ...], price: float) -> float:
    """argmin over C > 0 of price C^2 + sum_j parts_j max(0, norms_j - C)^2; ``norms`` increasing, ``price`` > 0.

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


def _check(controller: DcSgdP | DcSgdE) -> None:
    checks.positive(clip_norm=controller.clip_norm, lowest=controller.lowest)
    checks.non_negative(histogram_noise=controller.histogram_noise)
    checks.within(0.0, 0.99, history=controller.history)
    checks.within(2.0 * controller.lowest, 2.0**20 * controller.lowest, highest=controller.highest)


def _edges(controller: DcSgdP | DcSgdE) -> tuple[float, ...]:
    return released_norms.norm_edges(controller.lowest, controller.highest)


def _query(controller: DcSgdP | DcSgdE, setting: RunInfo) -> NormHistogram:
    noise_std = controller.histogram_noise or released_norms.DEFAULT_SHARE * setting.sampling.expected_units
    return NormHistogram(_edges(controller), noise_std)


def _initial(controller: DcSgdP | DcSgdE, setting: RunInfo) -> DcSgdState:
    check_queries(setting, (_query(controller, setting),))
    return DcSgdState(setting, controller.clip_norm)


def _plan(controller: DcSgdP | DcSgdE, state: DcSgdState, round: int) -> Plan:
    query = _query(controller, state.setting)
    z = update_multiplier(state.setting.noise_multiplier(round), (query,))
    return Plan(FlatClip(state.bound, state.setting.dimension(round)), z, (query,))


def _with_histogram(
    controller: DcSgdP | DcSgdE, state: DcSgdState, released: Release
) -> tuple[DcSgdState, tuple[float, ...] | None]:
    """The state with one more histogram, and the share of clients per bin where it says anything."""
    history = released_norms.blended(state.history, released.answer("norm-histogram"), controller.history)
    state = replace(state, history=history, histograms=state.histograms + 1)
    noise_std = _query(controller, state.setting).noise_std
    return state, released_norms.shares(history, controller.history, state.histograms, noise_std)
