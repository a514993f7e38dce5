"""Normalised updates: every update is given about the length C, so that there is no threshold to tune.

    AUTO-S:  S_t = sum_k C Delta_k / (||Delta_k|| + gamma C) + N(0, z^2 C^2 I)
    PSAC:    S_t = sum_k C x_k / (n_k + r / (n_k + r)) + N(0, z^2 C^2 I),   x_k = Delta_k / C,  n_k = ||x_k||

AUTO-S (automatic clipping) gives long updates the length C and leaves short ones short in proportion; PSAC (per-sample
adaptive clipping) does so with a weight that does not blow up short updates: it is 1 at n = 0, largest, 1/(2 sqrt(r) -
r), at n = sqrt(r) - r, and about 1/n for long ones.

References: Bu, Wang, Zha, Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
NeurIPS 2023 (arXiv 2206.07136v3); Xia, Shen, Yao, Fu, Xu, Xu, Fu, "Differentially Private Learning with Per-Sample
Adaptive Clipping", AAAI 2023 (arXiv 2212.00328v2).
Guarantee: a scaled update is shorter than C whatever its length, for n / (n + r/(n + r)) < 1 too, so each round is one
Poisson-sampled Gaussian of multiplier z.
Deviations: gamma and r are in units of C (theirs are absolute, for gradients; gamma 0.01); updates of clients in place
of gradients of records. C is a step size and no threshold: twice C with half the server's learning rate is the same
run.
"""

from dataclasses import dataclass

from privacy import checks
from privacy.clipping.norms import AutomaticClip, PsacClip
from privacy.contribution import Plan
from strategies.controllers.controller import Controller, PublicSignals, RunInfo


@dataclass(frozen=True)
class Automatic(Controller[None]):
    """AUTO-S with a fixed length.

    Attributes:
        clip_norm: C, the length of a scaled update, > 0.
        gamma: stability constant in units of C, in [1e-6, 1e6]: updates much shorter than gamma C stay short.
    """

    clip_norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)
        checks.within(1e-6, 1e6, gamma=self.gamma)

    def init(self, info: RunInfo, public: PublicSignals) -> None:
        return None

    def plan(self, state: None, info: RunInfo, round: int) -> Plan:
        return Plan(AutomaticClip(self.clip_norm, info.dimension(round), self.gamma), info.noise_multiplier(round))

    def released_values(self, state: None, info: RunInfo) -> dict[str, float]:
        return {"clip-bound": self.clip_norm}


@dataclass(frozen=True)
class Psac(Controller[None]):
    """PSAC with a fixed length.

    Attributes:
        clip_norm: C, the length that long updates get, > 0.
        r: regularity constant in units of C, in [1e-6, 1]; 0.1 and 0.01 are the paper's values.
    """

    clip_norm: float = 1.0
    r: float = 0.1

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm)
        checks.within(1e-6, 1.0, r=self.r)

    def init(self, info: RunInfo, public: PublicSignals) -> None:
        return None

    def plan(self, state: None, info: RunInfo, round: int) -> Plan:
        return Plan(PsacClip(self.clip_norm, info.dimension(round), self.r), info.noise_multiplier(round))

    def released_values(self, state: None, info: RunInfo) -> dict[str, float]:
        return {"clip-bound": self.clip_norm}
