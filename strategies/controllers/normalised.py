"""Automatic clipping (AUTO-S): every update is given about the length C, so that there is no threshold to tune.

    S_t = sum_k C Delta_k / (||Delta_k|| + gamma C) + N(0, z^2 C^2 I)

Reference: Bu, Wang, Zha, Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
NeurIPS 2023 (arXiv 2206.07136v3), AUTO-S.
Guarantee: a scaled update is shorter than C, so each round is one Poisson-sampled Gaussian of multiplier z.
Deviations: gamma is relative to C (theirs is absolute, 0.01, for gradients); updates of clients in place of gradients
of records. C is a step size and no threshold: twice C with half the server's learning rate is the same run.

PSAC: per-sample adaptive clipping with a weight that does not blow up short updates.

    S_t = sum_k C x_k / (n_k + r / (n_k + r)) + N(0, z^2 C^2 I),   x_k = Delta_k / C,  n_k = ||x_k||

Reference: Xia, Shen, Yao, Fu, Xu, Xu, Fu, "Differentially Private Learning with Per-Sample Adaptive Clipping", AAAI
2023 (arXiv 2212.00328v2).
Guarantee: n / (n + r/(n + r)) < 1, so each round is one Poisson-sampled Gaussian of multiplier z.
Deviations: norms are taken in units of C before the weight (theirs are absolute, for gradients); updates of clients in
place of gradients of records. The weight 1/(n + r/(n + r)) is 1 at n = 0, largest, 1/(2 sqrt(r) - r), at n =
sqrt(r) - r, and about 1/n for long updates.
"""

from dataclasses import dataclass
from typing import ClassVar

from privacy import checks
from privacy.clipping.norms import AutomaticClip, PsacClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.mechanism import Release
from strategies.controllers.controller import InitialRelease, PublicSignals, RunInfo, constant_profile
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

    def init(self, setting: RunInfo, public: PublicSignals) -> FixedState:
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


@dataclass(frozen=True)
class Psac:
    """PSAC with a fixed length.

    Attributes:
        clip_norm: C, the length that long updates get, > 0.
        r: regularity constant in units of C, in [1e-6, 1]; 0.1 and 0.01 are the paper's values.
    """

    reads_validation: ClassVar[bool] = False
    clip_norm: float = 1.0
    r: float = 0.1

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)
        checks.within(1e-6, 1.0, r=self.r)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return constant_profile(rounds)

    def init(self, setting: RunInfo, public: PublicSignals) -> FixedState:
        return FixedState(setting)

    def plan(self, state: FixedState, round: int) -> Plan:
        clip = PsacClip(self.clip_norm, state.setting.dimension(round), self.r)
        return Plan(clip, state.setting.noise_multiplier(round))

    def update(self, state: FixedState, released: Release, public: PublicSignals) -> FixedState:
        return state

    def step_scale(self, state: FixedState) -> float:
        return 1.0

    def released_values(self, state: FixedState) -> dict[str, float]:
        return {"clip-bound": self.clip_norm}
