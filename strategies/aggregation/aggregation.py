"""What a LoRA aggregation is."""

from typing import Literal, Protocol

Factors = Literal["both", "a", "b"]


class Aggregation(Protocol):
    """Decides which factors a round trains; what is released is always the sum of the clipped trained vectors."""

    def train(self, round: int) -> Factors:
        """The factors trained in ``round`` (1..T); heads are always trained."""
        ...
