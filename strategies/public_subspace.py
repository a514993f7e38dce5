"""Clipping inside a public subspace, as the strategy sees it."""

from dataclasses import replace
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.clipping.subspace import SubspaceClip
from privacy.contribution import Plan
from strategies.adapter.trainable import TrainedSubset


class Subspace(Protocol):
    """Where a public subspace comes from."""

    @property
    def refresh(self) -> int:
        """Rounds a basis is kept, >= 1."""
        ...

    def basis(self, adapter: Float[Tensor, " size"], part: TrainedSubset) -> Float[Tensor, "k d"]:
        """Orthonormal rows in the space of the sent vectors, from public data and the adapter alone."""
        ...


def within(basis: Float[Tensor, "k d"], plan: Plan) -> Plan:
    """The plan with flat clipping moved into the subspace; ValueError for another clip map."""
    match plan.clip:
        case NoUpdate():
            return plan
        case FlatClip(bound=bound):
            return replace(plan, clip=SubspaceClip(basis, bound))
        case other:
            raise ValueError(
                f"a public subspace needs flat clipping, the controller planned {type(other).__name__}; "
                "set public.subspace = 0"
            )
