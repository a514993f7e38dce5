"""Momentum over updates whose values are moved towards zero by a part of their noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from privacy import checks
from strategies.optimizers.optimizer import ServerStep


@dataclass(frozen=True)
class SoftThreshold:  # fields are options: strategy.optimizer-options.threshold = 0.5
    moments: ClassVar[Mapping[str, Literal[1, 2]]] = {"momentum": 1}  # if an aggregation turns the adapter, this too
    learning_rate: float = 1.0
    momentum: float = 0.9
    threshold: float = 0.5  # in standard deviations of the noise

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate, one_minus_momentum=1 - self.momentum)
        checks.non_negative(momentum=self.momentum, threshold=self.threshold)

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(parameters)}

    def step(self, state: dict[str, Tensor], parameters: Tensor, step: ServerStep) -> tuple[dict[str, Tensor], Tensor]:
        size = (step.update.abs() - self.threshold * step.noise_std.float()).clamp_min(0.0)
        momentum = self.momentum * state["momentum"] + step.update.sign() * size
        rate = step.rate(self.learning_rate, decay=1.0)  # with the controller's factor on the step
        return {"momentum": momentum}, parameters + rate * momentum
