"""The units that an attack on a finished run is about: some it trained on, and some that were held out.

Held-out units are whole clients, patients or documents of the test set where the source names them. Clients that were
dealt their records have no like among held-out ones, so one is made for each of some members: as many records, of the
same labels, every held-out record used once. Where records are drawn alike given their label, as dealing does it, such
a client is one that might have been dealt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.data import canaries
from client.data.prepared import PreparedData
from client.data.records import Records
from client.data.spec import NOTES, DataSpec
from client.data.splits import hold_out
from client.data.tokenise import tokenise
from client.models.base import load_tokenizer
from client.record_level.units import UnitIndex
from privacy.randomness.rng import simulation_generator
from server.config.schema import RunConfig
from server.runs.assembly import data_spec

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Members and held-out units of an attack, as rows of the training and of the test set.

    Attributes:
        level: what one unit is: client, record, patient, ...
        protected: whether it is what the run's guarantee protects.
        origin: of the held-out units, in words.
    """

    level: str
    protected: bool
    origin: str
    members: tuple[Rows, ...]
    others: tuple[Rows, ...]

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """All training and all test rows that are needed, each once."""
        return np.unique(np.concatenate(self.members)), np.unique(np.concatenate(self.others))


def audited_units(config: RunConfig, data: PreparedData, most: int, canary_units: int = 0) -> list[Units]:
    """Choose the protected units and, where these hold several records, single records too.

    Args:
        most: records of either side.
        canary_units: how many of the last units brought nothing of their own.

    Raises:
        ValueError: nobody's records can be attacked.
    """
    draws = simulation_generator(config.seed, "audited units")
    clean = _without_secrets(config, data)
    index = None if config.unit == "client" else UnitIndex.of(data.train, grouped=config.privacy.unit == "group")
    count = data.num_clients if index is None else len(index)
    own = range(count - canary_units)
    if index is None:
        members = [np.arange(data.starts[client], data.stops[client]) for client in own]
    else:
        members = [index.order[index.starts[unit] : index.starts[unit + 1]] for unit in own]
    usable = np.zeros(len(data.train), dtype=np.bool_)
    usable[clean] = True
    members = [rows[usable[rows]] for rows in members]
    clean = np.sort(np.concatenate(members))
    records = _records(config, data, clean, most, draws)
    if config.unit == "record":
        return [records]
    members = [rows for at in draws.permutation(len(members)) if len(rows := members[at])]
    level, owners = config.unit.removeprefix("group:"), owners_of_test(config, data)
    if owners is None:
        members, others = _matched(members, data, draws)
    else:
        others = [np.flatnonzero(owners == owner) for owner in draws.permutation(np.unique(owners))]
    origin = "put together from records of the test set" if owners is None else "of the test set"
    found = Units(level, True, origin, _within(members, most), _within(others, most))
    return [found, replace(records, protected=False)]


def owners_of_test(config: RunConfig, data: PreparedData) -> Rows | None:
    """The client or group of every test record, numbered; None where the test set does not say.

    The prepared data set does not keep them, so its sources are split again.
    """
    spec: DataSpec = data_spec(config)
    dealt = config.unit == "client" and spec.partition != "natural"
    if dealt or (spec.test_source and spec.source != NOTES):
        return None
    held = hold_out(spec)
    texts = held.texts["test"]
    made = tokenise(
        texts,
        held.labels.get("test"),
        load_tokenizer(spec.tokenizer),
        spec.task,
        spec.max_length,
        None,
        spec.chat_template,
    )
    kept = made.of(texts)
    named = kept.clients if config.unit == "client" else kept.units
    if named is None or len(named) != len(data.test):
        return None
    return np.unique(named, return_inverse=True)[1].astype(np.int64)


def _records(config: RunConfig, data: PreparedData, clean: Rows, most: int, draws: np.random.Generator) -> Units:
    members = np.sort(draws.permutation(clean)[:most])
    others = np.sort(draws.permutation(len(data.test))[:most])
    if not len(members) or not len(others):
        raise ValueError(
            f"the run has {len(clean)} training records without a planted secret and {len(data.test)} test records; "
            "membership inference needs some of both"
        )
    return Units("record", True, "of the test set", tuple(members[:, None]), tuple(others[:, None]))


def _matched(members: Sequence[Rows], data: PreparedData, draws: np.random.Generator) -> tuple[list[Rows], list[Rows]]:
    """Members for whom the test set has records of the same labels, and a held-out unit made like each."""
    labels = np.zeros(len(data.test), dtype=np.int64) if data.test.labels is None else np.asarray(data.test.labels)
    order = draws.permutation(len(labels))
    pools = {int(label): list(order[labels[order] == label]) for label in np.unique(labels)}
    found: list[Rows] = []
    kept: list[Rows] = []
    for rows in members:
        own = np.zeros(len(rows), dtype=np.int64) if data.train.labels is None else np.asarray(data.train.labels)[rows]
        wanted = {int(label): int(count) for label, count in zip(*np.unique(own, return_counts=True), strict=True)}
        if any(len(pools.get(label, ())) < count for label, count in wanted.items()):
            continue
        drawn = [pools[label].pop() for label, count in wanted.items() for _ in range(count)]
        found.append(np.array(drawn, dtype=np.int64))
        kept.append(rows)
    return kept, found


def _within(units: Sequence[Rows], most: int) -> tuple[Rows, ...]:
    """The first units that have at most so many records together; at least one."""
    total = np.cumsum([len(rows) for rows in units])
    return tuple(units[: max(1, int(np.searchsorted(total, most, side="right")))])


def _without_secrets(config: RunConfig, data: PreparedData) -> Rows:
    """Training rows without a planted text canary: the test set has none, so they would not be exchangeable."""
    rows = np.arange(len(data.train))
    if not config.data.canaries:
        return rows
    tokenizer: Any = load_tokenizer(config.model.name)
    planted = [secret.casefold() for secret in canaries.Canaries.of(config.data, config.seed).secrets]

    def text(records: Records, row: int) -> str:
        tokens = records.tokens[records.offsets[row] : records.offsets[row + 1]]
        return str(tokenizer.decode(tokens)).casefold().replace(" ", "")

    texts = (text(data.train, int(row)) for row in rows)
    return rows[[not any(secret in said for secret in planted) for said in texts]]
