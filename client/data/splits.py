"""Public validation, test and client records, which never meet.

Whole units of privacy (patients, documents), or else whole natural clients, are held out where there are any. A text
that occurs in the test or validation set is removed from the training records (from the validation set, if it occurs in
the test set), and counted. Canaries are planted into the training records, and then, where that is asked for, the
sensitive spans of the training records are masked, canaries included.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from client.data import sources
from client.data.canaries import Canaries, plant
from client.data.catalog import consultations, notes
from client.data.columns.labels import class_ids, class_names
from client.data.prepared import PARTS
from client.data.sensitive import redact
from client.data.sources import Texts
from client.data.spec import NOTES, DataSpec, Reading
from privacy.randomness.rng import simulation_generator

# Overlapping clients (speed tests) read one pool of notes of this many clients.
_REPEATED_CLIENTS = 1000


@dataclass(frozen=True)
class Held:
    """Texts of the three parts, encoded labels, and what was left out on the way.

    Attributes:
        removed: records by the part that they were no part of, because they are held out; rows by the reason for which
            they became no record.
        read: rows by the source they were read from.
        not_drawn: records of a part beyond those that were asked for.
        noted: what else was seen in the source and how often.
    """

    texts: dict[str, Texts]
    labels: dict[str, NDArray[np.int64]]
    label_names: list[str]
    removed: dict[str, int]
    read: dict[str, int]
    not_drawn: dict[str, int]
    noted: Mapping[str, int] = field(default_factory=dict)


def source_reading(spec: DataSpec) -> Reading:
    """The settings by which the source is read: of a language model's no labels."""
    return Reading.of(spec) if spec.task == "classification" else Reading.of(spec, label_column="")


def public_reading(spec: DataSpec) -> Reading:
    """The settings by which public records are read: they have no clients and no units, and are used as they are."""
    return source_reading(spec).replace(client_column="", unit_column="", least_words=0)


def hold_out(spec: DataSpec) -> Held:
    """Read the sources and split them.

    Raises:
        ValueError: what :mod:`client.data.sources` refuses, or too few records for the parts asked for.
    """
    not_drawn: dict[str, int] = {}
    if spec.source == NOTES:
        texts, left_out = _notes(spec), Counter[str]()
        noted: Mapping[str, int] = {}
        read = {"generated": sum(map(len, texts.values()))}
    else:
        source = sources.read(spec.source, source_reading(spec), task=spec.task)
        read = {"source": len(source) + source.left_out.total()}
        noted = source.noted
        left_out, given = source.left_out, dict[str, Texts]()
        for part, place in public_sources(spec).items():
            whole = sources.read(place, public_reading(spec), f"data.{part}-source", task=spec.task)
            read[f"{part}-source"] = len(whole) + whole.left_out.total()
            given[part] = _limited(whole, spec) if part == "test" else _shuffled(whole, spec)
            not_drawn[part] = len(whole) - len(given[part])
            left_out = left_out + whole.left_out
        texts = _carve(source, given, spec)
    texts, removed = _separate(texts, spec)
    removed |= left_out
    train = _drawn(texts["train"], spec)
    not_drawn["train"] = len(texts["train"]) - len(train)
    texts["train"] = train
    texts["train"] = redact(plant(texts["train"], Canaries.of(spec, spec.seed)), spec, chat=spec.chat)
    if spec.task != "classification":
        return Held(texts, {}, [], removed, read, not_drawn, noted)
    raw = {part: texts[part].labels or [] for part in PARTS}
    places = {} if spec.source == NOTES else public_sources(spec)
    known = [label for part in PARTS if part not in places for label in raw[part]]
    where = dict.fromkeys(PARTS, f"data.source = {spec.source!r}, column {spec.label_column!r}") | {
        part: f"data.{part}-source = {place!r}, column {spec.label_column!r}" for part, place in places.items()
    }
    names = class_names(known, where["train"])
    encoded = {part: class_ids(raw[part], names, where[part]) for part in PARTS}
    names = list(notes.LABELS) if spec.source == NOTES else names
    return Held(texts, encoded, names, removed, read, not_drawn, noted)


def public_sources(spec: DataSpec) -> dict[str, str]:
    """The sources of the parts that have one of their own: `"validation"`, `"test"`."""
    named = {"validation": spec.validation_source, "test": spec.test_source}
    return {part: place for part, place in named.items() if place}


def _shuffled(public: Texts, spec: DataSpec) -> Texts:
    """As many public records as are asked for, in an order drawn by the seed: the first may be trained on."""
    rows = simulation_generator(spec.seed, "validation-source").permutation(len(public))
    return public.select(rows[: spec.validation_records])


def _limited(test: Texts, spec: DataSpec) -> Texts:
    """As many of a test source as are tested on, drawn with a fixed seed, so that runs stay comparable."""
    if not 0 < spec.test_limit < len(test):
        return test
    return test.select(np.sort(simulation_generator(0, "test-limit").permutation(len(test))[: spec.test_limit]))


def _notes(spec: DataSpec) -> dict[str, Texts]:
    clients = min(spec.clients, _REPEATED_CLIENTS) if spec.partition == "repeated" else spec.clients
    if spec.chat or spec.task == "preference":
        return _consultations(spec, clients)
    sizes = (clients * spec.records_per_client, spec.validation_records, spec.test_records)
    texts = {}
    for name, part in zip(PARTS, notes.split(*sizes, spec.seed), strict=True):
        patients = [str(note.patient.number) for note in part]
        texts[name] = Texts([note.text for note in part], None, [str(note.label) for note in part], patients, patients)
    return texts


def _consultations(spec: DataSpec, clients: int) -> dict[str, Texts]:
    """Every client is a user with as many consultations; held-out ones are of further users."""
    each, start, texts = spec.records_per_client, 0, {}
    for name, records in zip(PARTS, (clients * each, spec.validation_records, spec.test_records), strict=True):
        users = -(-records // each)
        part = consultations.generate(users, each, spec.seed, start)[:records]
        start += users
        ids = [str(item.user) for item in part]
        lines = [item.text if spec.chat else item.pair for item in part]
        texts[name] = Texts(lines, None, None, ids, ids)
    return texts


def _carve(source: Texts, given: dict[str, Texts], spec: DataSpec) -> dict[str, Texts]:
    """Hold out rows, whole units of privacy or whole natural clients, drawn by the seed, for the parts not given."""
    wanted = {"validation": spec.validation_records, "test": spec.test_records}
    sizes = {part: size for part, size in wanted.items() if part not in given}
    if sum(sizes.values()) >= len(source):
        raise ValueError(
            f"data.source = {spec.source!r} has {len(source)} records and {' + '.join(sizes)} would take "
            f"{sum(sizes.values())} of them; lower {' or '.join(f'data.{part}-records' for part in sizes)}"
        )
    group = np.arange(len(source))
    together = source.units or source.clients
    if together is not None:
        group = np.unique(together, return_inverse=True)[1]
    rank = simulation_generator(spec.seed, "held-out").permutation(int(group.max()) + 1)[group]
    order = np.argsort(rank, kind="stable")  # whole groups one after another, the groups in random order
    ends = np.flatnonzero(np.diff(rank[order], append=-1)) + 1  # where each group ends
    texts, start = dict(given), 0
    for part, size in sizes.items():
        stop = int(ends[min(int(np.searchsorted(ends, start + size)), len(ends) - 1)])
        # The first public records may be trained on: where a source is sorted, they must not be of its first labels.
        rows = order[start:stop]
        texts[part] = source.select(rows if part == "validation" else np.sort(rows))
        start = stop
        if start == len(order):
            raise ValueError(
                f"data.source = {spec.source!r}: whole clients or units as {' and '.join(sizes)} leave none "
                f"to train on; lower {' or '.join(f'data.{part}-records' for part in sizes)}"
            )
    texts["train"] = source.select(np.sort(order[start:]))
    return texts


def _drawn(train: Texts, spec: DataSpec) -> Texts:
    """As many training records as wanted, drawn by the seed, in the order they had."""
    if not 0 < spec.train_records < len(train):
        return train
    rows = simulation_generator(spec.seed, "train-records").permutation(len(train))[: spec.train_records]
    return train.select(np.sort(rows))


def _separate(texts: dict[str, Texts], spec: DataSpec) -> tuple[dict[str, Texts], dict[str, int]]:
    """Remove from validation what is in test, and from training what is in either."""
    taken = set(texts["test"].keys())
    parts, removed = {"test": texts["test"]}, {}
    for part in ("validation", "train"):
        keys = texts[part].keys()
        kept = [row for row, key in enumerate(keys) if key not in taken]
        removed[part] = len(keys) - len(kept)
        if not kept:
            raise ValueError(
                f"data.source = {spec.source!r}: every {part} text also occurs in the held-out data, so none is left; "
                "remove duplicates, or lower data.validation-records and data.test-records"
            )
        parts[part] = texts[part].select(kept) if removed[part] else texts[part]
        if part == "validation":
            taken.update(keys)
    return parts, removed
