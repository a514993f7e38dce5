"""Counts of the records a run read, taken while they are prepared and shown where that gives nobody away.

These are exact counts, taken without noise, so no guarantee covers them. A simulation shows those of its own files,
and the sizes of clients that it dealt itself. Where a site trains on its own records, or every node does, the folder
of the run holds facts of the public records only; whoever starts a run sees all of them in the terminal, since the
records are theirs.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from client.data.prepared import PARTS, PreparedData
from client.data.spec import NOTES
from privacy import durable
from privacy.errors import CorruptRun
from server.config.schema import RunConfig
from server.run_folder.names import DATA_FILE, FACTS_FILE, ORIGIN_FILE, ROSTER_FILE, SOURCE_FILE

SIMULATED = "Facts of the simulation's own files, counted without noise: no guarantee covers them."
PUBLIC = "Public records only: what is trained on under the guarantee is not counted here."


@dataclass(frozen=True)
class DataFacts:
    """Counts of the records that a run has read, kept and left out.

    Attributes:
        note: what these are facts of.
        read: rows, by source.
        left_out: rows that became no record, by reason.
        duplicates: records left out of a part because a part held out holds the same text.
        not_drawn: training records beyond ``data.train-records``, and test records beyond ``data.test-limit``.
        records, truncated: by part; truncated ones were cut to ``model.max-length``.
        clients: those that records are at, and those without any (None: not counted).
        sizes: fewest, median and most records of a client that has any; None where clients are not simulated.
        noted: what else was seen in the records, and how often.
    """

    note: str
    read: Mapping[str, int]
    left_out: Mapping[str, int]
    duplicates: Mapping[str, int]
    not_drawn: Mapping[str, int]
    records: Mapping[str, int]
    truncated: Mapping[str, int]
    clients: int | None = None
    empty_clients: int | None = None
    sizes: tuple[int, float, int] | None = None
    noted: Mapping[str, int] = field(default_factory=dict)

    @property
    def public_facts(self) -> "DataFacts":
        """The facts of the held-out parts alone, which are public."""
        parts = [part for part in PARTS if part != "train"]

        def held_out(counts: Mapping[str, int]) -> dict[str, int]:
            return {part: counts[part] for part in parts if part in counts}

        nothing: dict[str, int] = {}
        return DataFacts(PUBLIC, nothing, nothing, nothing, nothing, held_out(self.records), held_out(self.truncated))


def facts_of(data: PreparedData) -> DataFacts:
    """Count everything that is counted of a prepared data set."""
    meta, sizes = data.meta, data.stops - data.starts
    some = sizes[sizes > 0]
    removed = dict(meta["removed"])
    duplicates = {part: removed.pop(part) for part in ("validation", "train") if part in removed}
    return DataFacts(
        note=SIMULATED,
        read=meta["read"],
        left_out={reason: count for reason, count in removed.items() if count},
        duplicates={part: count for part, count in duplicates.items() if count},
        not_drawn={part: count for part, count in meta["not_drawn"].items() if count},
        records={part: meta["records"][part] for part in PARTS},
        truncated={part: meta["truncated"][part] for part in PARTS},
        clients=data.num_clients,
        empty_clients=int((sizes == 0).sum()),
        sizes=(int(some.min()), float(np.median(some)), int(some.max())) if len(some) else None,
        noted=meta.get("noted", {}),
    )


def may_be_shown(config: RunConfig, facts: DataFacts) -> DataFacts:
    """The part of the facts that the run's folder may hold, which others are shown."""
    if config.is_deployed:
        return facts.public_facts
    if config.data.source == NOTES:  # nobody's records
        return facts
    if config.is_single_site:
        return facts.public_facts
    if config.data.partition == "natural":  # the sizes of somebody's own records
        return replace(facts, sizes=None, empty_clients=None, noted={})
    return facts


def write_facts(folder: Path, config: RunConfig, data: PreparedData) -> None:
    """Write the facts that may be shown into a run's folder."""
    facts = asdict(may_be_shown(config, facts_of(data)))
    durable.write(folder / FACTS_FILE, json.dumps(facts, indent=2) + "\n")


def read_facts(folder: Path) -> DataFacts | None:
    """Read the facts that :func:`write_facts` wrote; None where there are none.

    Raises:
        CorruptRun: the file holds something else.
    """
    path = folder / FACTS_FILE
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if values["sizes"] is not None:
            values["sizes"] = tuple(values["sizes"])
        return DataFacts(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptRun(f"{path} holds no facts of a data set: {error}; delete it") from error


def data_digest(folder: Path) -> str | None:
    """The digest of a run's data; None where it did not come to reading any, or the note is gone."""
    roster = folder / ROSTER_FILE
    if roster.is_file():  # records are at the nodes
        return "nodes-" + hashlib.sha256(roster.read_bytes()).hexdigest()
    # A run that has begun has noted its source; one of version 0.1 only what was prepared of it.
    source, data = folder / SOURCE_FILE, folder / DATA_FILE
    note = source if source.is_file() or (folder / ORIGIN_FILE).is_file() else data
    return note.read_text(encoding="utf-8", errors="replace").strip() if note.is_file() else None
