r"""A server learning rate from the public validation loss: HyFreeDP's quadratic fit along the released update.

    L(x + h p) ~ L_0 - b h + a h^2 / 2,    b = (L(-h) - L(+h)) / 2h,    a = (L(+h) + L(-h) - 2 L_0) / h^2
    eta <- (1 - w) clamp(b / a, eta / jump, jump eta) + w eta,          x_{t+1} = x_t + eta decay^(t-1) scale_t p

p is the released mean update, or its heavy-ball momentum; the three losses are taken at h = eta every ``every`` rounds.
Where a <= 0 < b the loss falls faster than a parabola: eta grows by ``jump``. Where b <= 0 the update does not help:
eta shrinks by ``jump``. A loss that is not finite leaves eta as it is.

Reference: Liu, Bu, "Towards hyperparameter-free optimization with differential privacy" (HyFreeDP, ICLR 2025,
arXiv 2503.00703). There the losses are the clients' own, noised and paid for; with a public validation set they are
free, and nothing is added to the release.
Guarantee: post-processing of the release and of public data, if the validation set really is public.
Deviations: the clamp ``jump`` and the weight ``w`` of the old rate guard a fit through three numbers (the paper's rule
is jump = infinity, w = 0). The decay and the controller's factor shrink the step that the search finds: leave them at 1
to have the search alone.
Cost: three evaluations on the public validation set in every round that searches. The rate is fitted to the very
records that validation reports, which makes the validation loss optimistic; the test set is not touched.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks
from strategies.optimizers.optimizer import ServerStep


@dataclass(frozen=True)
class PublicLineSearch:
    """FedAvg or FedAvgM whose rate is searched on public data.

    Attributes:
        learning_rate: eta before the first search.
        decay: factor on the step after each round, in (0, 1].
        momentum: beta of the direction p, in [0, 1).
        every: rounds between searches, >= 1.
        jump: most a search may change eta by, as a factor > 1.
        smoothing: w, share of the old rate that is kept, in [0, 1).
    """

    reads_public_loss: ClassVar[bool] = True
    moments: ClassVar[Mapping[str, Literal[1, 2]]] = {"momentum": 1}
    learning_rate: float = 1.0
    decay: float = 1.0
    momentum: float = 0.0
    every: int = 1
    jump: float = 2.0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate, jump_minus_one=self.jump - 1)
        checks.positive(one_minus_momentum=1 - self.momentum, one_minus_smoothing=1 - self.smoothing)
        checks.non_negative(momentum=self.momentum, smoothing=self.smoothing)
        checks.probability(decay=self.decay)
        checks.integer_at_least(1, every=self.every)

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """Momentum zero, and the rate in float64."""
        rate = torch.tensor(self.learning_rate, dtype=torch.float64)
        return {"momentum": parameters.new_zeros(parameters.shape), "rate": rate}

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters. ValueError without a public loss."""
        direction = self.momentum * state["momentum"] + step.update
        rate = float(state["rate"])
        if (step.round - 1) % self.every == 0:
            rate = self._searched(rate, parameters, direction, step)
        new = {"momentum": direction, "rate": torch.tensor(rate, dtype=torch.float64)}
        return new, parameters + step.rate(rate, self.decay) * direction

    def _searched(
        self, rate: float, parameters: Float[Tensor, " d"], direction: Float[Tensor, " d"], step: ServerStep
    ) -> float:
        if step.public_loss is None:
            raise ValueError("public_loss must be given, got None; public-line-search reads it in every search")
        here, ahead, behind = (step.public_loss(parameters + h * direction) for h in (0.0, rate, -rate))
        if not all(map(math.isfinite, (here, ahead, behind))):
            return rate
        slope = (behind - ahead) / (2 * rate)
        curvature = (ahead + behind - 2 * here) / rate**2
        if slope <= 0:
            best = rate / self.jump
        elif curvature <= 0:
            best = rate * self.jump
        else:
            best = min(max(slope / curvature, rate / self.jump), rate * self.jump)
        return (1 - self.smoothing) * best + self.smoothing * rate
