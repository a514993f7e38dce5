r"""FedAdam and FedAdamW on the released mean update, with the bias that the noise puts into the second moment removed.

    m_t = b1 m_{t-1} + (1 - b1) u_t        v_t = b2 v_{t-1} + (1 - b2) u_t^2        p_t = b2 p_{t-1} + (1 - b2) s_t^2
    x_{t+1} = (1 - eta_t w) x_t + eta_t mhat_t / sqrt(max(vhat_t - phat_t, floor phat_t, eps_root))

hats divide by 1 - b^n, n being how often the value was trained. u_t = signal + N(0, s_t^2), so E u_t^2 holds s_t^2 on
top of the signal's square, and where noise dominates Adam without correction is noisy momentum with one rate for all.
s_t, the std of the noise in each value, is known: z C_t / (q N) for flat clipping, one number per block for per-adapter
clipping; C_t and z may change from round to round, hence the average p_t with the weights of v_t.

References: Tang, Shpilevskiy, Lecuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)"
(AAAI 2024, arXiv 2312.14334), Algorithm 1, there with constant noise; Reddi et al. 2021 (arXiv 2003.00295v5), FedAdam.
Guarantee: post-processing of the release; s_t is public.
Deviations: ``relative-floor`` bounds the denominator from below by a share of the noise variance itself, because an
absolute eps_root must be retuned with every C, and because after a few rounds vhat - phat is still mostly chance: in
round 1 it is negative for two values of three, which eps_root = 1e-8 alone would move by hundreds of eta. 1, the
default, never divides by less than the noise; 0 is the paper's rule. Even after hundreds of rounds signals below a
third of the noise are beyond what the correction can see.
``bias-correction = false`` is plain FedAdam, eta_t mhat_t / (sqrt(vhat_t) + eps). FedAdamW adds decoupled decay w.
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

_MOMENTS: dict[str, Literal[1, 2]] = {"first": 1, "second": 2, "noise": 2}


@dataclass(frozen=True)
class FedAdam:
    """The server optimizer Adam, without the noise's bias.

    Attributes:
        learning_rate: eta; about how far one round moves a value whose signal is clear.
        decay: factor on eta after each round, in (0, 1].
        beta1, beta2: b1 and b2, in [0, 1).
        bias_correction: subtract the noise from the second moment (DP-AdamBC).
        eps_root: least denominator under the root, in squared units of an update; with bias correction only.
        relative_floor: the same as a share of the averaged noise variance; with bias correction only.
        eps: added to the root; without bias correction only.
    """

    moments: ClassVar[Mapping[str, Literal[1, 2]]] = _MOMENTS
    learning_rate: float = 0.001
    decay: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    bias_correction: bool = True
    eps_root: float = 1e-8
    relative_floor: float = 1.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate, eps_root=self.eps_root, eps=self.eps)
        checks.positive(one_minus_beta1=1 - self.beta1, one_minus_beta2=1 - self.beta2)
        checks.non_negative(beta1=self.beta1, beta2=self.beta2, relative_floor=self.relative_floor)
        checks.probability(decay=self.decay)

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """Moments and the number of times each value was trained, zero."""
        return {name: parameters.new_zeros(parameters.shape) for name in (*_MOMENTS, "steps")}

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters."""
        new = self._averaged(state, step)
        weight1, weight2 = (-torch.expm1(new["steps"] * _log(beta)) for beta in (self.beta1, self.beta2))
        variance = new["second"] / weight2
        if self.bias_correction:
            noise = new["noise"] / weight2
            floor = (self.relative_floor * noise).clamp_(min=self.eps_root)
            root = variance.sub_(noise).maximum(floor).sqrt_()
        else:
            root = variance.sqrt_().add_(self.eps)
        direction = (new["first"] / weight1).div_(root)
        return new, parameters + step.rate(self.learning_rate, self.decay) * direction

    def _averaged(self, state: dict[str, Tensor], step: ServerStep) -> dict[str, Tensor]:
        update, noise = step.update, step.noise_std.to(step.update).square()
        return {
            "first": torch.lerp(state["first"], update, 1 - self.beta1),
            "second": torch.lerp(state["second"], update.square(), 1 - self.beta2),
            "noise": torch.lerp(state["noise"], noise.expand_as(update), 1 - self.beta2),
            "steps": state["steps"] + 1,
        }


@dataclass(frozen=True)
class FedAdamW(FedAdam):
    """Server Adam with decoupled weight decay towards zero.

    Attributes:
        weight_decay: w, >= 0; the rest as in :class:`FedAdam`.
    """

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.non_negative(weight_decay=self.weight_decay)

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters."""
        kept = 1 - step.rate(self.learning_rate, self.decay) * self.weight_decay
        return super().step(state, kept * parameters, step)


def _log(beta: float) -> float:
    """log(beta); at 0 so negative that beta^n is 0 for every n >= 1."""
    return math.log(beta) if beta else -700.0
