"""Fixed clipping: one threshold C for the whole run.

    S_t = sum_k Delta_k min(1, C / ||Delta_k||) + N(0, z^2 C^2 I)

Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018
(arXiv 1710.06963v3), Algorithm 1 with flat clipping and the fixed-denominator estimator.
Guarantee: each round is one Poisson-sampled Gaussian with multiplier z; C is a public constant.
"""

from dataclasses import dataclass
from typing import ClassVar

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.mechanism import Release
from strategies.controllers.controller import InitialRelease, PublicSignals, RunInfo, constant_profile


@dataclass(frozen=True)
class FixedState:
    """Nothing changes but where the run stands."""

    setting: RunInfo


@dataclass(frozen=True)
class Fixed:
    """Fixed flat clipping.

    Attributes:
        clip_norm: C, L2 threshold of a client's whole update, > 0.
    """

    reads_validation: ClassVar[bool] = False
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return constant_profile(rounds)

    def init(self, setting: RunInfo, public: PublicSignals) -> FixedState:
        return FixedState(setting)

    def plan(self, state: FixedState, round: int) -> Plan:
        return Plan(FlatClip(self.clip_norm, state.setting.dimension(round)), state.setting.noise_multiplier(round))

    def update(self, state: FixedState, released: Release, public: PublicSignals) -> FixedState:
        return state

    def step_scale(self, state: FixedState) -> float:
        return 1.0

    def released_values(self, state: FixedState) -> dict[str, float]:
        return {"clip-bound": self.clip_norm}
