"""A public schedule of the learning rate: warm-up from 0, then constant, linear to 0, or half a cosine to 0."""

import math
from dataclasses import dataclass

from privacy import checks

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class StepSchedule:
    """The factor on the learning rate of every step t = 1..T; decided before any data is seen.

    Attributes:
        steps: T.
        shape: one of :data:`SHAPES`.
        warm_up: steps w in which the factor rises as t / w.
    """

    steps: int
    shape: str = "constant"
    warm_up: int = 0

    def __post_init__(self) -> None:
        checks.integer_at_least(1, steps=self.steps)
        checks.integer_at_least(0, warm_up=self.warm_up)
        checks.one_of(SHAPES, schedule=self.shape)
        if self.warm_up >= self.steps:
            raise ValueError(f"warm_up must be < steps ({self.steps}), got {self.warm_up}; the full rate is never used")

    def __call__(self, step: int) -> float:
        """The factor, in (0, 1] within the planned steps."""
        if step <= self.warm_up:
            return step / self.warm_up
        done = min(1.0, (step - self.warm_up - 1) / (self.steps - self.warm_up))
        match self.shape:
            case "linear":
                return 1.0 - done
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * done))
            case _:
                return 1.0
