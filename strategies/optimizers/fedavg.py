"""Federated averaging and its momentum form: the released mean update as a pseudo-gradient.

    FedAvg:   x_{t+1} = x_t + eta_t u_t
    FedAvgM:  m_t = beta m_{t-1} + u_t,   x_{t+1} = x_t + eta_t m_t            eta_t = eta * decay^(t-1) * scale_t

scale_t is the controller's factor, 1 for most. A value that a round does not train keeps its momentum for the next
round that does.

References: McMahan et al. 2017 (arXiv 1602.05629v4), Algorithm 1; Reddi et al. 2021, "Adaptive Federated Optimization"
(arXiv 2003.00295v5), the server form with momentum. Guarantee: post-processing of the release.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from privacy import checks
from strategies.optimizers.optimizer import ServerStep


@dataclass(frozen=True)
class FedAvg:
    """Plain averaging of the clients' updates.

    Attributes:
        learning_rate: eta, 1 adds the mean update as it is.
        decay: factor on eta after each round, in (0, 1].
    """

    moments: ClassVar[Mapping[str, Literal[1, 2]]] = {}
    learning_rate: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate)
        checks.probability(decay=self.decay)

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """State before the first step: none."""
        return {}

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters."""
        return state, parameters + step.rate(self.learning_rate, self.decay) * step.update


@dataclass(frozen=True)
class FedAvgM:
    """Averaging with heavy-ball momentum.

    Attributes:
        learning_rate: eta.
        decay: factor on eta after each round, in (0, 1].
        momentum: beta, in [0, 1); the sum of a constant update grows to 1 / (1 - beta) times it.
    """

    moments: ClassVar[Mapping[str, Literal[1, 2]]] = {"momentum": 1}
    learning_rate: float = 1.0
    decay: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate, one_minus_momentum=1 - self.momentum)
        checks.probability(decay=self.decay)
        checks.non_negative(momentum=self.momentum)

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """Start with a momentum of zero."""
        return {"momentum": parameters.new_zeros(parameters.shape)}

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters."""
        momentum = self.momentum * state["momentum"] + step.update
        return {"momentum": momentum}, parameters + step.rate(self.learning_rate, self.decay) * momentum
