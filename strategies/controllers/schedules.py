"""Dynamic DP-SGD: threshold and noise fall on a schedule that is known before the first round.

    C_t = C_0 rho_C^(t/T),   sigma_t = sigma_0 rho_mu^(t/T)   (mu_t = 1/sigma_t grows),   t = 1..T

sigma_0 is the least for which the whole schedule costs epsilon, found by bisection over privacy loss distributions
(``privacy/accountants/calibration.py``, ``profile``); the paper's formula p sqrt(sum_t (e^(mu_t^2) - 1)) is a
central-limit approximation and no bound.

Reference: Du, Li, Huang, Xu, Liu, Zhao, "Dynamic Differential-Privacy Preserving SGD" (arXiv 2111.00173v3); DP-LAC
(arXiv 2605.10272) compares with it under the names rho_C and rho_mu. Ratios 0.3 and 0.8 are those of its code.
Guarantee: round t is one Poisson-sampled Gaussian of multiplier sigma_t; the schedule depends on no data, so floor
mode commits to the T different steps and accounts them exactly. Filter mode pays for them too, at Rényi prices.
Deviations: client updates in place of records' gradients, a step of the schedule every round instead of every epoch.
A schedule of T different steps takes seconds to account (about 20 s to calibrate T = 100).

ATDP's noise: it rises by random steps and falls back, on a schedule drawn before the first round.

    sigma <- sigma * gamma * rho,  rho ~ U(low, high);   sigma <- sigma_0 where it exceeds sigma_max

The random factors come from a public seed and from nothing else, so the whole schedule is known before the run: floor
mode commits to its T different multipliers and accounts them exactly. sigma_0 is the least for which the whole schedule
costs the asked epsilon; phases (:mod:`server.runs.phase_plan`) may give sigma_0 instead, and report what that costs.

Reference: Yu, Singh, Li, Cao, "ATDP" (2025), algorithm 1. Guarantee: round t is one Poisson-sampled Gaussian of
multiplier sigma_t >= sigma_0, fixed in advance. The values of sigma_0, gamma, the jitter and sigma_max are not in
the copy at hand; the defaults (gamma 1.3, jitter 0.9 to 1.1, sigma_max = 5 sigma_0, as 4 and 20 would be) are ours.
Deviations: a factor is drawn every ``every`` rounds, where the paper draws one per epoch.
"""

from dataclasses import dataclass
from typing import ClassVar

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.mechanism import Release
from privacy.randomness.rng import simulation_generator
from strategies.controllers.controller import InitialRelease, PublicSignals, RunInfo

LEAST_RATIO = 0.01


@dataclass(frozen=True)
class DynamicState:
    """Where the run stands: rounds done."""

    setting: RunInfo
    rounds_done: int = 0


@dataclass(frozen=True)
class Dynamic:
    """Dynamic DP-SGD's schedule.

    Attributes:
        clip_norm: C_0, > 0.
        clip_ratio: rho_C = C_T / C_0, in [0.01, 1].
        noise_ratio: rho_mu = sigma_T / sigma_0, in [0.01, 1]; 1 keeps the noise multiplier constant.
    """

    reads_validation: ClassVar[bool] = False
    clip_norm: float = 1.5
    clip_ratio: float = 0.3
    noise_ratio: float = 0.8

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)
        checks.within(LEAST_RATIO, 1.0, clip_ratio=self.clip_ratio, noise_ratio=self.noise_ratio)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return tuple(self.noise_ratio ** (round / rounds) for round in range(1, rounds + 1))

    def init(self, setting: RunInfo, public: PublicSignals) -> DynamicState:
        return DynamicState(setting)

    def plan(self, state: DynamicState, round: int) -> Plan:
        clip = FlatClip(self._bound(state.setting, round), state.setting.dimension(round))
        return Plan(clip, state.setting.noise_multiplier(round))

    def update(self, state: DynamicState, released: Release, public: PublicSignals) -> DynamicState:
        return DynamicState(state.setting, public.round)

    def step_scale(self, state: DynamicState) -> float:
        return 1.0

    def released_values(self, state: DynamicState) -> dict[str, float]:
        coming = min(state.rounds_done + 1, state.setting.rounds)
        return {
            "clip-bound": self._bound(state.setting, coming),
            "noise-multiplier": state.setting.noise_multiplier(coming),
        }

    def _bound(self, setting: RunInfo, round: int) -> float:
        return float(self.clip_norm * self.clip_ratio ** (round / setting.rounds))


@dataclass(frozen=True)
class RiseResetState:
    """Where the run stands: rounds done."""

    setting: RunInfo
    rounds_done: int = 0


@dataclass(frozen=True)
class RiseReset:
    """The rise-reset schedule at a fixed threshold.

    Attributes:
        clip_norm: C, > 0.
        growth: gamma, >= 1.
        low, high: limits of rho, 0 < low <= high.
        reset: sigma_max / sigma_0, > 1.
        every: rounds between two factors, an epoch of the paper.
        seed: of the factors; public.
    """

    reads_validation: ClassVar[bool] = False
    clip_norm: float = 1.0
    growth: float = 1.3
    low: float = 0.9
    high: float = 1.1
    reset: float = 5.0
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm, low=self.low)
        checks.within(self.low, 1e3, high=self.high, remedy="the jitter is drawn from low to high")
        checks.within(1.0, 1e3, growth=self.growth)
        checks.within(1.0, 1e4, reset=self.reset, remedy="it is sigma_max over sigma_0")
        checks.integer_at_least(1, every=self.every)
        checks.integer_at_least(0, seed=self.seed)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        """sigma_t / sigma_0 of rounds 1..T; round 1 has sigma_0. Never below 1: rho may lower sigma, but not so far."""
        draws = simulation_generator(self.seed, "rise-reset")
        shares, sigma = [], 1.0
        for round in range(rounds):
            if round and round % self.every == 0:
                sigma *= self.growth * float(draws.uniform(self.low, self.high))
                if not 1.0 <= sigma <= self.reset:
                    sigma = 1.0
            shares.append(sigma)
        return tuple(shares)

    def init(self, setting: RunInfo, public: PublicSignals) -> RiseResetState:
        return RiseResetState(setting)

    def plan(self, state: RiseResetState, round: int) -> Plan:
        clip = FlatClip(self.clip_norm, state.setting.dimension(round))
        return Plan(clip, state.setting.noise_multiplier(round))

    def update(self, state: RiseResetState, released: Release, public: PublicSignals) -> RiseResetState:
        return RiseResetState(state.setting, public.round)

    def step_scale(self, state: RiseResetState) -> float:
        return 1.0

    def released_values(self, state: RiseResetState) -> dict[str, float]:
        coming = min(state.rounds_done + 1, state.setting.rounds)
        return {"clip-bound": float(self.clip_norm), "noise-multiplier": state.setting.noise_multiplier(coming)}
