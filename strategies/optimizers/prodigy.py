r"""Prodigy: a learning rate from the distance travelled. Under differential privacy expect it to fail.

    g_t = -u_t        r_t = sqrt(b2) r_{t-1} + (1 - sqrt(b2)) eta d^2 / d_0 <g_t, x_0 - x_t>
    m_t = b1 m_{t-1} + (1 - b1) d g_t,    v_t = b2 v_{t-1} + (1 - b2) d^2 g_t^2
    s_t = sqrt(b2) s_{t-1} + (1 - sqrt(b2)) eta d^2 / d_0 g_t
    x_{t+1} = x_t - eta_t d m_t / (sqrt(v_t) + d eps),   then  d <- max(d, min(coefficient r_t / ||s_t||_1, growth d))

Reference: Mishchenko, Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner" (arXiv 2306.06101),
its Adam form without bias correction.
Guarantee: post-processing of the release.
Why it fails: r is a projection of the noisy gradient on the way travelled, but ||s||_1 sums the absolute noise of all d
values, so r / ||s||_1 stays far below the distance to go and d stays at d_0. HyFreeDP (arXiv 2503.00703) reports the
collapse and DP-LAC compares with it, which is why it is here; ``initial-distance`` and ``growth`` bound the harm.
Inner products and norms run over the values that the round trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks
from strategies.optimizers.optimizer import ServerStep


@dataclass(frozen=True)
class Prodigy:
    """Prodigy on the server.

    Attributes:
        learning_rate: eta, a factor on the estimated rate.
        decay: factor on eta after each round, in (0, 1].
        beta1, beta2: b1 and b2, in [0, 1).
        initial_distance: d_0.
        coefficient: factor on every estimate.
        growth: most by which d may grow in a round, as a factor > 1.
        eps: relative to d.
    """

    reads_public_loss: ClassVar[bool] = False
    moments: ClassVar[Mapping[str, Literal[1, 2]]] = {"first": 1, "second": 2, "gradients": 1, "start": 1}
    learning_rate: float = 1.0
    decay: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    initial_distance: float = 1e-4
    coefficient: float = 1.0
    growth: float = 1.02
    eps: float = 1e-8

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate, initial_distance=self.initial_distance, eps=self.eps)
        checks.positive(coefficient=self.coefficient, growth_minus_one=self.growth - 1)
        checks.positive(one_minus_beta1=1 - self.beta1, one_minus_beta2=1 - self.beta2)
        checks.non_negative(beta1=self.beta1, beta2=self.beta2)
        checks.probability(decay=self.decay)

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """Moments zero; the start of the way is where the run starts."""
        scalars = {"distance": self.initial_distance, "projection": 0.0}
        state = {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
        zeros = {name: parameters.new_zeros(parameters.shape) for name in ("first", "second", "gradients")}
        return {**state, **zeros, "start": parameters.clone()}

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters."""
        gradient, rate = -step.update, step.rate(self.learning_rate, self.decay)
        distance, beta3 = float(state["distance"]), self.beta2**0.5
        weight = (1 - beta3) * rate * distance**2 / self.initial_distance
        travelled = torch.dot(gradient.double(), (state["start"] - parameters).double())
        projection = beta3 * state["projection"] + weight * travelled
        gradients = beta3 * state["gradients"] + weight * gradient
        first = self.beta1 * state["first"] + (1 - self.beta1) * distance * gradient
        second = self.beta2 * state["second"] + (1 - self.beta2) * distance**2 * gradient.square()
        length = float(gradients.double().abs().sum())
        estimate = self.coefficient * float(projection) / length if length else 0.0
        grown = max(distance, min(estimate, self.growth * distance))
        new = {
            "distance": torch.tensor(grown, dtype=torch.float64),
            "projection": projection,
            "first": first,
            "second": second,
            "gradients": gradients,
            "start": state["start"],
        }
        return new, parameters - rate * distance * first / (second.sqrt() + distance * self.eps)
