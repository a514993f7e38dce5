"""Which records form one unit of privacy, and which of them a step uses.

A unit is a record, or all records of one patient, author or document (``Records.units``). Every unit brings one row to
a step whatever the number of its records, so its whole presence moves the sum by one clipped row. A bound on the
records per unit bounds only the work: a larger unit is represented by a sample, new in every step.

That sample may depend on the unit's own records, the step and the public seed, and on nothing else: if adding another
unit changed which records of this one are used, two rows of the sum would move instead of one. So it is drawn from a
stream named by the content of the unit's records, in an order that is theirs too.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from client.records import Records
from privacy import checks
from privacy.rng import simulation_generator


@dataclass(frozen=True)
class UnitIndex:
    """The units of some records, numbered from 0.

    Attributes:
        records: all of them.
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

    def used(self, unit: int, step: int) -> Int64[np.ndarray, " used"]:
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
