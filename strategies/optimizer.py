"""What a server optimizer is: state and parameters in, a released update, state and parameters out."""

from typing import Protocol

from jaxtyping import Float
from torch import Tensor


class Optimizer(Protocol):
    """Parameters are the object's frozen fields; state is named tensors, so that a checkpoint can hold it."""

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """State before the first round."""
        ...

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], update: Float[Tensor, " d"], round: int
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters after round ``round`` (1..T) released the mean ``update``."""
        ...
