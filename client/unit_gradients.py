"""One row per unit of a batch: the gradient of its records at one adapter, in chunks of bounded memory.

    g_i = (1 / |R_i|) sum_{x in R_i} grad l(x)       ("mean"; "sum" leaves out the factor)

with R_i the records of unit i that the step uses. Records are put together BEFORE anything is clipped, so a unit has
one row. They are added in the order of the unit, whatever micro-batch each came from: the row does not depend on how
the work was cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from client.cohort import RecordGradients
from client.layout import AdapterLayout
from client.part import Part
from client.records import Records
from client.unit_index import UnitIndex
from privacy import checks
from privacy.mechanism import Units

COMBINE = ("mean", "sum")

ROW_MEMORY = 256 * 2**20
"""Bytes that gradients of the records of grouped units may take at once."""


class GradientEngine(Protocol):
    """What gives gradients of single records; the engines of `client.engine` do, and `client.opacus_engine`."""

    @property
    def layout(self) -> AdapterLayout: ...
    def switch(self, train: str) -> None: ...
    def per_record_gradients(self, vector: Tensor, records: Records) -> Iterator[RecordGradients]: ...


@dataclass(frozen=True)
class UnitGradients:
    """Rows of units, from an engine.

    Attributes:
        engine: at work on one base model.
        index: which records a unit has.
        combine: how the records of a unit become one row.
        memory: bytes for the rows of grouped records.
    """

    engine: GradientEngine
    index: UnitIndex
    combine: str = "mean"
    memory: int = ROW_MEMORY

    def __post_init__(self) -> None:
        checks.one_of(COMBINE, combine=self.combine)

    def of(
        self, adapter: Float[Tensor, " size"], units: Int64[np.ndarray, " batch"], part: Part, step: int
    ) -> Iterator[Units]:
        """MINUS the gradient of every unit's loss, as `part` sends it, and its loss; chunk by chunk, private.

        The sign makes the released mean a direction of descent, as a client's update is.
        """
        self.engine.switch(part.factors)
        layout = self.engine.layout
        start = adapter if part.ranks is None else layout.truncated(adapter, part.ranks)
        used = [self.index.used(int(unit), step) for unit in units]
        if not used:
            return
        if max(map(len, used)) == 1:
            for chunk in self.engine.per_record_gradients(start, self.index.records.select(np.concatenate(used))):
                yield Units(part.sent(layout, chunk.rows.neg()), chunk.losses)
            return
        for low, high in _cuts([len(records) for records in used], max(1, self.memory // (4 * layout.dim))):
            yield self._together(start, used[low:high], part)

    def _together(self, start: Tensor, used: list[np.ndarray], part: Part) -> Units:
        """One row per list of records."""
        layout, batch = self.engine.layout, self.index.records.select(np.concatenate(used))
        rows: Tensor | None = None
        losses = torch.zeros(len(batch), dtype=torch.float64)
        for chunk in self.engine.per_record_gradients(start, batch):
            if rows is None:
                rows = torch.empty(len(batch), layout.dim, dtype=chunk.rows.dtype, device=chunk.rows.device)
            where = torch.from_numpy(chunk.records)
            rows[where.to(rows.device)] = chunk.rows
            losses[where] = chunk.losses.double().cpu()
        assert rows is not None
        sizes = [len(records) for records in used]
        share = [1.0 if self.combine == "sum" else 1.0 / size for size in sizes]
        sums = torch.stack([part_.sum(dim=0) for part_ in torch.split(rows, sizes)])
        weights = torch.tensor(share, dtype=sums.dtype, device=sums.device)
        means = torch.stack([part_.mean() for part_ in torch.split(losses, sizes)])
        return Units(part.sent(layout, sums * -weights[:, None]), means)


def _cuts(sizes: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive units with at most `most` records together, or one unit with more."""
    start, records = 0, 0
    for position, size in enumerate(sizes):
        if position > start and records + size > most:
            yield start, position
            start, records = position, 0
        records += size
    yield start, len(sizes)
