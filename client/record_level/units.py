"""Units of privacy: which records form one, which of them a step uses, and the one gradient row that a unit brings.

    g_i = (1 / |R_i|) sum_{x in R_i} grad l(x)       ("mean"; "sum" leaves out the factor)

A unit is a record, or all records of one patient, author or document (``Records.units``); R_i are the records of unit i
that a step uses. Records are put together BEFORE anything is clipped, so a unit has one row whatever the number of its
records, and its whole presence moves the sum by one clipped row. They are added in the order of the unit, whatever
micro-batch each came from: the row does not depend on how the work was cut.

A bound on the records per unit bounds only the work: a larger unit is represented by a sample, new in every step. That
sample may depend on the unit's own records, the step and the public seed, and on nothing else: if adding another unit
changed which records of this one are used, two rows of the sum would move instead of one. So it is drawn from a stream
named by the content of the unit's records, in an order that is theirs too.

With example-level sampling the records themselves are the rows (:meth:`UnitIndex.cap_units`): a unit brings one for
each of its records that was drawn, and the account is that of :mod:`privacy.accountants.mixture`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from client.data.records import Records
from client.engine.cohort import RecordGradients
from privacy import checks
from privacy.clipping.units import Units
from privacy.randomness.rng import simulation_generator
from strategies.adapter.layout import AdapterLayout
from strategies.adapter.trainable import TrainedSubset

_ONCE = 0  # in place of a step, which counts from 1


@dataclass(frozen=True)
class UnitIndex:
    """The units of some records, numbered from 0.

    Attributes:
        order: record numbers, unit by unit.
        starts: ``[units + 1]``; unit `u` has the records ``order[starts[u]:starts[u + 1]]``.
        most: most records of one unit in one step; 0 takes all.
        seed: of the samples of larger units.
    """

    records: Records
    order: Int64[np.ndarray, " records"]
    starts: Int64[np.ndarray, " units_and_1"]
    most: int = 0
    seed: int = 0

    @staticmethod
    def of(records: Records, *, grouped: bool, most: int = 0, seed: int = 0) -> "UnitIndex":
        """Group by ``records.units``, or, with `grouped` false, make every record a unit.

        Raises:
            ValueError: there are no records, or none of them says which unit it belongs to.
        """
        checks.integer_at_least(0, records_per_unit=most, seed=seed)
        count = len(records)
        if not count:
            raise ValueError("records must hold at least one record, got none; there is nothing to train on")
        if not grouped:
            return UnitIndex(records, np.arange(count), np.arange(count + 1), most, seed)
        if records.units is None:
            raise ValueError("records do not say which unit they belong to; set data.unit-column, or protect records")
        units = np.asarray(records.units)
        order = np.argsort(units, kind="stable").astype(np.int64)
        ends = np.flatnonzero(np.diff(units[order])) + 1
        return UnitIndex(records, order, np.concatenate([[0], ends, [count]]).astype(np.int64), most, seed)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def kept(self) -> int:
        """The number of records of all units together, each at most ``most``."""
        sizes = np.diff(self.starts)
        return int((np.minimum(sizes, self.most) if self.most else sizes).sum())

    def cap_units(self) -> "UnitIndex":
        """Every record a row of its own, at most ``most`` of each unit: what example-level sampling draws from.

        Which records of a larger unit are kept is settled once for the run, as :meth:`draw_records` settles it for a
        step: by the content of that unit's records and the public seed. A neighbouring data set so differs in at most
        ``most`` rows, and those of every other unit stay what they are.
        """
        checks.integer_at_least(1, records_per_unit=self.most, remedy="without a cap a unit moves a sum without limit")
        kept = np.concatenate([self.draw_records(unit, _ONCE) for unit in range(len(self))])
        return UnitIndex(self.records, kept, np.arange(len(kept) + 1), 1, self.seed)

    def draw_records(self, unit: int, step: int) -> Int64[np.ndarray, " used"]:
        """The records of one unit that a step uses."""
        members = self.order[self.starts[unit] : self.starts[unit + 1]]
        if not self.most or len(members) <= self.most:
            return members
        contents = [self._content(int(record)) for record in members]
        own_order = np.array(sorted(range(len(members)), key=contents.__getitem__))
        name = hashlib.sha256(b"\0".join(sorted(contents))).hexdigest()
        drawn = simulation_generator(self.seed, "records of a unit", step, name).permutation(len(members))[: self.most]
        chosen: Int64[np.ndarray, " used"] = members[own_order[np.sort(drawn)]]
        return chosen

    def _content(self, record: int) -> bytes:
        records = self.records
        low, high = int(records.offsets[record]), int(records.offsets[record + 1])
        parts = [np.asarray(records.tokens[low:high]).tobytes()]
        if records.labels is not None:
            parts.append(np.asarray(records.labels[record]).tobytes())
        return hashlib.sha256(b"\0".join(parts)).digest()


COMBINE = ("mean", "sum")

ROW_MEMORY = 256 * 2**20
"""Bytes that gradients of the records of grouped units may take at once."""

_MADE_UP_TOKENS = 4  # within any model's positions, and enough to predict a next token from


class GradientEngine(Protocol):
    """The interface of what gives gradients of single records, as every engine does."""

    @property
    def layout(self) -> AdapterLayout: ...
    def train_factors(self, train: str) -> None: ...
    def per_record_gradients(self, vector: Tensor, records: Records) -> Iterator[RecordGradients]: ...


@dataclass(frozen=True)
class UnitGradients:
    """Rows of units, from an engine.

    Attributes:
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
        self, adapter: Float[Tensor, " size"], units: Int64[np.ndarray, " batch"], part: TrainedSubset, step: int
    ) -> Iterator[Units]:
        """MINUS the gradient of every unit's loss, as `part` sends it, and its loss; chunk by chunk, private.

        The sign makes the released mean a direction of descent, as a client's update is.
        """
        self.engine.train_factors(part.factors)
        layout = self.engine.layout
        start = adapter if part.ranks is None else layout.truncate_ranks(adapter, part.ranks)
        used = [self.index.draw_records(int(unit), step) for unit in units]
        if not used:
            return
        if max(map(len, used)) == 1:
            for chunk in self.engine.per_record_gradients(start, self.index.records.select(np.concatenate(used))):
                yield Units(part.sent_rows(layout, chunk.rows.neg()), chunk.losses)
            return
        for low, high in _cuts([len(records) for records in used], max(1, self.memory // (4 * layout.dim))):
            yield self._together(start, used[low:high], part)

    def of_made_up(self, adapter: Float[Tensor, " size"], part: TrainedSubset, step: int) -> Iterator[Units]:
        """The rows that :meth:`of` gives for one made-up record, in the form of the records there are; public.

        Whatever it raises, it raises with any records.
        """
        records = self.index.records
        made_up = Records(
            tokens=np.zeros(_MADE_UP_TOKENS, dtype=np.int32),
            offsets=np.array([0, _MADE_UP_TOKENS], dtype=np.int64),
            labels=None if records.labels is None else np.zeros(1, dtype=np.int64),
            token_weights=None if records.token_weights is None else np.ones(_MADE_UP_TOKENS, dtype=np.float32),
            splits=None if records.splits is None else np.array([_MADE_UP_TOKENS // 2], dtype=np.int64),
        )
        index = UnitIndex.of(made_up, grouped=False)
        return replace(self, index=index).of(adapter, np.zeros(1, dtype=np.int64), part, step)

    def _together(self, start: Tensor, used: list[np.ndarray], part: TrainedSubset) -> Units:
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
        return Units(part.sent_rows(layout, sums * -weights[:, None]), means)


def _cuts(sizes: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive units with at most `most` records together, or one unit with more."""
    start, records = 0, 0
    for position, size in enumerate(sizes):
        if position > start and records + size > most:
            yield start, position
            start, records = position, 0
        records += size
    yield start, len(sizes)
