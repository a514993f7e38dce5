"""Schedules of noise that are known before the first round: Dynamic DP-SGD's fall, and ATDP's rise with resets.

    dynamic:     C_t = C_0 rho_C^(t/T),   sigma_t = sigma_0 rho_mu^(t/T)   (mu_t = 1/sigma_t grows),   t = 1..T
    rise-reset:  sigma <- sigma gamma rho,  rho ~ U(low, high);   sigma <- sigma_0 where it exceeds sigma_max;   C fixed

The random factors of rise-reset come from a public seed and from nothing else. sigma_0 is the least for which the whole
schedule costs epsilon, found by bisection over privacy loss distributions (``privacy/accountants/calibration.py``,
``profile``); phases (:mod:`server.runs.phase_plan`) may give sigma_0 instead, and report what that costs.

References: Du, Li, Huang, Xu, Liu, Zhao, "Dynamic Differential-Privacy Preserving SGD" (arXiv 2111.00173v3), with which
DP-LAC (arXiv 2605.10272) compares under the names rho_C and rho_mu (ratios 0.3 and 0.8 are those of its code); Yu,
Singh, Li, Cao, "ATDP" (2025), algorithm 1, for rise-reset.
Guarantee: round t is one Poisson-sampled Gaussian of multiplier sigma_t; the schedule depends on no data, so floor
mode commits to the T different steps and accounts them exactly. Filter mode pays for them too, at Rényi prices.
Deviations: client updates in place of records' gradients. Dynamic: a step of the schedule every round instead of every
epoch; the paper's formula p sqrt(sum_t (e^(mu_t^2) - 1)) is a central-limit approximation and no bound. Rise-reset: a
factor is drawn every ``every`` rounds, where the paper draws one per epoch; sigma_0, gamma, the jitter and sigma_max
are not known to us, the defaults (gamma 1.3, jitter 0.9 to 1.1, sigma_max = 5 sigma_0, as 4 and 20 would be)
are ours.
A schedule of T different steps takes seconds to account (about 20 s to calibrate T = 100).
"""

from dataclasses import dataclass

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from privacy.randomness.rng import simulation_generator
from strategies.controllers.controller import Controller, PublicSignals, RunInfo

LEAST_RATIO = 0.01


@dataclass(frozen=True)
class Done:
    """The place of a run on its schedule."""

    rounds_done: int = 0

    def next_round(self, info: RunInfo) -> int:
        """The number of the next round; the last one when all are done."""
        return min(self.rounds_done + 1, info.rounds)


@dataclass(frozen=True)
class Dynamic(Controller[Done]):
    """The controller of Dynamic DP-SGD's schedule.

    Attributes:
        clip_norm: C_0, > 0.
        clip_ratio: rho_C = C_T / C_0, in [0.01, 1].
        noise_ratio: rho_mu = sigma_T / sigma_0, in [0.01, 1]; 1 keeps the noise multiplier constant.
    """

    clip_norm: float = 1.5
    clip_ratio: float = 0.3
    noise_ratio: float = 0.8

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)
        checks.within(LEAST_RATIO, 1.0, clip_ratio=self.clip_ratio, noise_ratio=self.noise_ratio)

    def profile(self, rounds: int) -> tuple[float, ...]:
        return tuple(self.noise_ratio ** (round / rounds) for round in range(1, rounds + 1))

    def init(self, info: RunInfo, public: PublicSignals) -> Done:
        return Done()

    def plan(self, state: Done, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(self._bound(info, round), info.dimension(round)), info.noise_multiplier(round))

    def update(self, state: Done, info: RunInfo, released: Release, public: PublicSignals) -> Done:
        return Done(public.round)

    def released_values(self, state: Done, info: RunInfo) -> dict[str, float]:
        coming = state.next_round(info)
        return {"clip-bound": self._bound(info, coming), "noise-multiplier": info.noise_multiplier(coming)}

    def _bound(self, info: RunInfo, round: int) -> float:
        return float(self.clip_norm * self.clip_ratio ** (round / info.rounds))


@dataclass(frozen=True)
class RiseReset(Controller[Done]):
    """The rise-reset schedule at a fixed threshold.

    Attributes:
        clip_norm: C, > 0.
        growth: gamma, >= 1.
        low, high: limits of rho, 0 < low <= high.
        reset: sigma_max / sigma_0, > 1.
        every: rounds between two factors, an epoch of the paper.
        seed: of the factors; public.
    """

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

    def profile(self, rounds: int) -> tuple[float, ...]:
        """The ratios sigma_t / sigma_0 of rounds 1..T; round 1 has sigma_0. Never below 1: rho may lower sigma, but not
        so far.
        """
        draws = simulation_generator(self.seed, "rise-reset")
        shares, sigma = [], 1.0
        for round in range(rounds):
            if round and round % self.every == 0:
                sigma *= self.growth * float(draws.uniform(self.low, self.high))
                if not 1.0 <= sigma <= self.reset:
                    sigma = 1.0
            shares.append(sigma)
        return tuple(shares)

    def init(self, info: RunInfo, public: PublicSignals) -> Done:
        return Done()

    def plan(self, state: Done, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(self.clip_norm, info.dimension(round)), info.noise_multiplier(round))

    def update(self, state: Done, info: RunInfo, released: Release, public: PublicSignals) -> Done:
        return Done(public.round)

    def released_values(self, state: Done, info: RunInfo) -> dict[str, float]:
        noise = info.noise_multiplier(state.next_round(info))
        return {"clip-bound": float(self.clip_norm), "noise-multiplier": noise}
