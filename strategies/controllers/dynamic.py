"""Dynamic DP-SGD: threshold and noise fall on a schedule that is known before the first round.

    C_t = C_0 rho_C^(t/T),   sigma_t = sigma_0 rho_mu^(t/T)   (mu_t = 1/sigma_t grows),   t = 1..T

sigma_0 is the least for which the whole schedule costs epsilon, found by bisection over privacy loss distributions
(``privacy/calibration.py``, ``profile``); the paper's formula p sqrt(sum_t (e^(mu_t^2) - 1)) is a central-limit
approximation and no bound.

Reference: Du, Li, Huang, Xu, Liu, Zhao, "Dynamic Differential-Privacy Preserving SGD" (arXiv 2111.00173v3); DP-LAC
(arXiv 2605.10272) compares with it under the names rho_C and rho_mu. Ratios 0.3 and 0.8 are those of its code.
Guarantee: round t is one Poisson-sampled Gaussian of multiplier sigma_t; the schedule depends on no data, so floor
mode commits to the T different steps and accounts them exactly. Filter mode pays for them too, at Rényi prices.
Deviations: client updates in place of records' gradients, a step of the schedule every round instead of every epoch.
A schedule of T different steps takes seconds to account (about 20 s to calibrate T = 100).
"""

from dataclasses import dataclass
from typing import ClassVar

from privacy import checks
from privacy.clipping import FlatClip
from privacy.events import Poisson
from privacy.mechanism import Plan, Release
from strategies.controller import InitialRelease, PublicSignals, Setting

LEAST_RATIO = 0.01


@dataclass(frozen=True)
class DynamicState:
    """Where the run stands: rounds done."""

    setting: Setting
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

    def init(self, setting: Setting, public: PublicSignals) -> DynamicState:
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

    def _bound(self, setting: Setting, round: int) -> float:
        return float(self.clip_norm * self.clip_ratio ** (round / setting.rounds))
