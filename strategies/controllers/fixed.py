"""Fixed clipping: one threshold C for the whole run.

    S_t = sum_k Delta_k min(1, C / ||Delta_k||) + N(0, z^2 C^2 I)

Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018
(arXiv 1710.06963v3), Algorithm 1 with flat clipping and the fixed-denominator estimator.
Guarantee: each round is one Poisson-sampled Gaussian with multiplier z; C is a public constant.
"""

from dataclasses import dataclass

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from strategies.controllers.controller import Controller, PublicSignals, RunInfo


@dataclass(frozen=True)
class Fixed(Controller[None]):
    """The controller of fixed flat clipping.

    Attributes:
        clip_norm: C, L2 threshold of a client's whole update, > 0.
    """

    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)

    def init(self, info: RunInfo, public: PublicSignals) -> None:
        return None

    def plan(self, state: None, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(self.clip_norm, info.dimension(round)), info.noise_multiplier(round))

    def released_values(self, state: None, info: RunInfo) -> dict[str, float]:
        return {"clip-bound": self.clip_norm}
