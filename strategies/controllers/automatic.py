"""Automatic clipping (AUTO-S): every update is given about the length C, so that there is no threshold to tune.

    S_t = sum_k C Delta_k / (||Delta_k|| + gamma C) + N(0, z^2 C^2 I)

Reference: Bu, Wang, Zha, Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
NeurIPS 2023 (arXiv 2206.07136v3), AUTO-S.
Guarantee: a scaled update is shorter than C, so each round is one Poisson-sampled Gaussian of multiplier z.
Deviations: gamma is relative to C (theirs is absolute, 0.01, for gradients); updates of clients in place of gradients
of records. C is a step size and no threshold: twice C with half the server's learning rate is the same run.
"""

from dataclasses import dataclass
from typing import ClassVar

from privacy import checks
from privacy.clipping import AutomaticClip
from privacy.events import Poisson
from privacy.mechanism import Plan, Release
from strategies.controller import InitialRelease, PublicSignals, Setting, constant_profile
from strategies.controllers.fixed import FixedState


@dataclass(frozen=True)
class Automatic:
    """Automatic clipping with a fixed length.

    Attributes:
        clip_norm: C, the length of a scaled update, > 0.
        gamma: stability constant in units of C, in [1e-6, 1e6]: updates much shorter than gamma C stay short.
    """

    reads_validation: ClassVar[bool] = False
    clip_norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)
        checks.within(1e-6, 1e6, gamma=self.gamma)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return constant_profile(rounds)

    def init(self, setting: Setting, public: PublicSignals) -> FixedState:
        return FixedState(setting)

    def plan(self, state: FixedState, round: int) -> Plan:
        clip = AutomaticClip(self.clip_norm, state.setting.dimension(round), self.gamma)
        return Plan(clip, state.setting.noise_multiplier(round))

    def update(self, state: FixedState, released: Release, public: PublicSignals) -> FixedState:
        return state

    def step_scale(self, state: FixedState) -> float:
        return 1.0

    def released_values(self, state: FixedState) -> dict[str, float]:
        return {"clip-bound": self.clip_norm}
