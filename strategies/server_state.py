"""What the server carries from round to round."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class ServerState:
    """Everything that changes from round to round; a checkpoint holds exactly this and the ledger.

    Attributes:
        round: the last round done; -1 before the initial release, 0 before round 1.
        adapter: float32 ``[size]``, the global adapter in full (frozen factors included).
        served: float32 ``[size]``, its exponential moving average; the adapter itself where no average is kept.
        optimizer: named tensors of the server optimizer: one number per adapter value ``[size]``, or 0-d.
        controller: the controller's state.
        basis: float32 ``[k, d]``, the public subspace updates are clipped in; None for the whole space.
        basis_round: the round it was made for.
    """

    round: int
    adapter: Float[Tensor, " size"]
    served: Float[Tensor, " size"]
    optimizer: dict[str, Tensor]
    controller: Any
    basis: Float[Tensor, "k d"] | None = None
    basis_round: int = -1
