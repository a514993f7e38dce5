"""The part of the adapter that a round trains, and the vector of it that is clipped and sent.

A client of a round trains in three spaces: the *full* vector, the engine's trainable vector (chosen factors, all
ranks), and the *sent* vector `[d]`: chosen factors, first ranks, each factor times its public scale. All of it is
decided before the round from public things, so it changes nothing of the guarantee: what is clipped is the sent vector.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks
from strategies.adapter.layout import AdapterLayout


@dataclass(frozen=True)
class TrainedSubset:
    """The factors and ranks that a round trains; heads are always trained, and sent unless clients keep theirs.

    Attributes:
        factors: `"both"`, `"a"` or `"b"`.
        ranks: only the first so many ranks of every adapter, trained as if there were no others; None: all.
        scale_a, scale_b: public factors on the update of A and of B before it is clipped, undone after the release.
            With one threshold C for the sent vector, the update of A is clipped as if by C / scale_a, and its noise has
            standard deviation z C / scale_a on the sum.
        heads: whether the update of the heads is sent.
    """

    factors: str = "both"
    ranks: int | None = None
    scale_a: float = 1.0
    scale_b: float = 1.0
    heads: bool = True

    def __post_init__(self) -> None:
        checks.one_of(("both", "a", "b"), factors=self.factors)
        checks.within(1e-6, 1e6, scale_a=self.scale_a, scale_b=self.scale_b)
        if self.ranks is not None:
            checks.integer_at_least(1, ranks=self.ranks)

    def layout(self, whole: AdapterLayout) -> AdapterLayout:
        """The layout whose trainable vector is the sent one (but for the scales). ValueError for too many ranks."""
        return whole.training(self.factors, self.ranks, self.heads)

    def scales(self, whole: AdapterLayout) -> Float[Tensor, " d"] | None:
        """The scale of every value of the sent vector; None where all are 1."""
        if self.scale_a == self.scale_b == 1.0:
            return None
        layout, of = self.layout(whole), {"A": self.scale_a, "B": self.scale_b, "head": 1.0}
        return torch.cat([torch.full((e.trained_size,), of[e.factor]) for e, _ in layout.trainable_entries()])

    def sent_rows(self, engine: AdapterLayout, updates: Float[Tensor, "clients dim"]) -> Float[Tensor, "clients d"]:
        """Updates in the engine's trainable vector, as sent. `engine` is its layout after `switch(factors)`."""
        rows = updates
        if self.ranks is not None or not self.heads:
            full = engine.with_trainable(updates.new_zeros(*updates.shape[:-1], engine.size), updates)
            rows = self.layout(engine).trainable_values(full)
        scales = self.scales(engine)
        return rows if scales is None else rows * scales

    def engine_rows(
        self, engine: AdapterLayout, rows: Float[Tensor, "... d"], ranks: int | None = None
    ) -> Float[Tensor, "... dim"]:
        """Turn rows as they are sent into the engine's trainable vector; 0 for what is not sent, or for ranks beyond
        the first `ranks` of a client.
        """
        scales = self.scales(engine)
        updates = rows if scales is None else rows / scales
        most = self.ranks if ranks is None else ranks
        if most is None and self.heads:
            return updates
        full = self.layout(engine).with_trainable(rows.new_zeros(*rows.shape[:-1], engine.size), updates)
        return engine.trainable_values(full if most is None else engine.truncate_ranks(full, most))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "TrainedSubset":
        """Read a subset from the values of :meth:`to_json`; ValueError or TypeError for anything else."""
        return TrainedSubset(**values)
