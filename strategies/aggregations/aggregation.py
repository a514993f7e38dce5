"""The interface of a LoRA aggregation: what each round trains, and how the global adapter is written down afterwards.

Under client-level privacy the server never sees one client's factors: it is given the noisy SUM of the clipped sent
vectors, and that is all an aggregation may use. Everything an aggregation decides (factors, ranks, scales, who has how
many ranks) comes from the configuration, the round and the run's public seed; everything it computes comes from
releases. So the sensitivity of what is released is that of the round's clip map on the sent vector, whatever the
aggregation: one client moves the encoded sum by at most 1, the decoded sum by at most C.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from strategies.adapter.layout import AdapterLayout
from strategies.adapter.trainable import TrainedSubset


@dataclass(frozen=True)
class Adapters:
    """The facts about a run's adapters that its aggregation is told; public.

    Attributes:
        rank: of every adapter, r.
        clients: population N; ids are 0..N-1.
        seed: of the run's simulation randomness, which everybody may know.
    """

    rank: int
    clients: int
    seed: int


@dataclass(frozen=True)
class Rewritten:
    """An adapter that computes the same function in other coordinates.

    Attributes:
        adapter: float32 ``[size]``, B' and A' with B' A' = B A for every pair (heads unchanged).
        turns: by pair, the ``[r, r]`` matrix R with B' = B R: what has the coordinates of B moves along by it.
    """

    adapter: Float[Tensor, " size"]
    turns: Mapping[str, Float[Tensor, "r r"]]


class Aggregation(Protocol):
    """Parameters are the object's frozen fields; it keeps no state but the adapter itself.

    A class that inherits from this one writes ``part``, and of the rest what it decides otherwise.
    """

    individual: ClassVar[bool] = False
    """Whether it needs every client's own factors, which client-level privacy never releases."""

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        """The subset that ``round`` (1..T) trains; the initial release before it trains what round 1 does."""
        ...

    def client_ranks(self, adapters: Adapters, clients: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"] | None:
        """The number of ranks that each of these clients can train, by id alone; None, the default: all of them all."""
        return None

    def rewritten(self, adapter: Float[Tensor, " size"], layout: AdapterLayout) -> Rewritten | None:
        """The adapter after the server's step (and before round 1) as it wants it; None, the default, leaves it."""
        return None
