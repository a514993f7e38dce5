"""Reading labelled text from where ``data.source`` says: a parquet, csv or jsonl file, or a data set of the hub.

``parquet:PATH``, ``csv:PATH`` (``.tsv`` files are split at tabs), ``jsonl:PATH``; ``KIND:FOLDER`` for the data sets of
:mod:`client.corpora`; anything else is a Hugging Face id,
``owner/name``, with an optional configuration and split: ``nyu-mll/glue:sst2@train``. (``notes`` is generated, see
:mod:`client.notes`.) Everything that cannot work is refused with what the file does hold and what to set.
"""

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from numpy.typing import NDArray

from client import corpora

FILE_KINDS = ("parquet", "csv", "jsonl")
NOTES = "notes"


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read, None for those the task does not need; texts of fewer words are left out."""

    text: str
    pair: str | None = None
    label: str | None = None
    client: str | None = None
    unit: str | None = None
    least_words: int = 0

    def names(self) -> list[tuple[str, str]]:
        """What a column is for, and its name."""
        return [(role, name) for role, name in vars(self).items() if isinstance(name, str)]


@dataclass(frozen=True)
class Texts:
    """Records before tokenisation.

    Attributes:
        texts: one per record, never empty.
        pairs: second texts (pair tasks), or None.
        labels: raw labels as the source has them (integers or strings), or None.
        clients: ids of the natural clients as strings, or None.
        units: ids of the units of privacy (patient, author, document) as strings, or None: every record its own.
        skipped: rows left out because a text was empty, or shorter than asked for.
    """

    texts: list[str]
    pairs: list[str] | None = None
    labels: list[Any] | None = None
    clients: list[str] | None = None
    units: list[str] | None = None
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: Sequence[int] | NDArray[np.int64]) -> "Texts":
        """The records at `rows`."""

        def chosen(column: list[Any] | None) -> list[Any] | None:
            return None if column is None else [column[row] for row in rows]

        return Texts(
            [self.texts[row] for row in rows],
            chosen(self.pairs),
            chosen(self.labels),
            chosen(self.clients),
            chosen(self.units),
            self.skipped,
        )

    def keys(self) -> list[tuple[str, str]]:
        """What makes two records the same: their texts without blanks at the ends."""
        return [
            (text.strip(), "" if self.pairs is None else self.pairs[row].strip()) for row, text in enumerate(self.texts)
        ]


def read(source: str, columns: Columns, option: str = "data.source") -> Texts:
    """The records of `source`; `option` is the key named in messages.

    Raises:
        ValueError: missing or unreadable file, absent column, wrong type, no usable rows, hub out of reach.
    """
    kind = source.partition(":")[0]
    if kind in corpora.CORPORA:
        table = corpora.read(source, option)
    elif kind in FILE_KINDS:
        table = _read_file(kind, existing_file(source, option), option)
    else:
        table = _read_hub(source, option)
    return _texts(table, columns, f"{option} = {source!r}")


def existing_file(source: str, option: str = "data.source") -> Path:
    """The file a ``kind:PATH`` source names.

    Raises:
        ValueError: there is no such file.
    """
    location = source.partition(":")[2]
    path = Path(location).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        inside = ", ".join(sorted(item.name for item in path.iterdir())[:5])
        raise ValueError(f"{option} = {source!r}: {path} is a folder; name one file of it ({inside or 'it is empty'})")
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else "check the path; it is relative to where you started"
    raise ValueError(f"{option} = {source!r}: there is no file {path}; {hint}")


def fingerprint(source: str, columns: Columns, option: str = "data.source") -> str:
    """SHA-256 of what `source` holds: of its files, or of the records read from the hub."""
    if source.partition(":")[0] in FILE_KINDS:
        with existing_file(source, option).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if source.partition(":")[0] in corpora.CORPORA:
        digest = hashlib.sha256()
        for path in corpora.files(source, option):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()
    records = read(source, columns, option)
    return hashlib.sha256(
        repr((records.texts, records.pairs, records.labels, records.clients, records.units)).encode()
    ).hexdigest()


def encode_labels(
    train: list[Any], others: Sequence[list[Any]], where: str
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]], list[str]]:
    """Class ids ``0..L-1`` in the sorted order of the labels in `train`, for `train` and each of `others`; label names.

    Integers sort as numbers, strings as strings. `train` is all labels of the source, held-out rows included.

    Raises:
        ValueError: missing, negative, fractional or mixed labels, a single class, a label absent from `train`.
    """
    values = [_clean_labels(labels, where) for labels in (train, *others)]
    classes = sorted(set(values[0]))
    if len(classes) < 2:
        raise ValueError(f"{where}: there are {len(classes)} different labels; classification needs at least 2")
    ids = {value: index for index, value in enumerate(classes)}
    unknown = {value for part in values[1:] for value in part} - set(classes)
    if unknown:
        raise ValueError(
            f"{where}: labels {sorted(map(str, unknown))[:5]} never occur in the training data, whose labels are "
            f"{[str(value) for value in classes[:20]]}; are both files labelled the same way?"
        )
    encoded = [np.array([ids[value] for value in part], dtype=np.int64) for part in values]
    return encoded[0], encoded[1:], [str(value) for value in classes]


def _clean_labels(labels: list[Any], where: str) -> list[Any]:
    missing = sum(value is None or value != value for value in labels)
    if missing:
        raise ValueError(f"{where}: {missing} of {len(labels)} rows have no label; remove them or fill them in")
    kinds = {type(value) for value in labels}
    if kinds <= {str}:
        return labels
    if kinds <= {int, bool, float} and all(float(value).is_integer() for value in labels):
        integers = [int(value) for value in labels]
        if min(integers, default=0) < 0:
            raise ValueError(f"{where}: label {min(integers)} is negative; this looks like an unlabelled test file")
        return integers
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(
        f"{where}: labels must be integers or strings, got {names}; is data.label-column the right column?"
    )


def _read_file(kind: str, path: Path, option: str) -> pyarrow.Table:
    try:
        match kind:
            case "parquet":
                return pyarrow.parquet.read_table(path)
            case "csv":
                delimiter = "\t" if ".tsv" in path.suffixes else ","
                parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
                return pyarrow.csv.read_csv(path, parse_options=parsing)
            case _:
                return pyarrow.json.read_json(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{option}: {path} is not a readable {kind} file: {error}") from error


def _read_hub(source: str, option: str) -> pyarrow.Table:
    import datasets  # takes seconds to import, and local files do not need it

    name, _, split = source.partition("@")
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{option} = {source!r}: cannot load it from the Hugging Face hub or its cache: {reason}; sources are "
            f"'notes', {', '.join(f'{kind}:PATH' for kind in (*FILE_KINDS, *corpora.CORPORA))}, or a hub id "
            "owner/name[:config][@split]"
        ) from error
    return loaded.with_format(None).data.table if loaded._indices is None else loaded.flatten_indices().data.table


def _texts(table: pyarrow.Table, columns: Columns, where: str) -> Texts:
    for role, name in columns.names():
        if name not in table.column_names:
            near = difflib.get_close_matches(name, table.column_names, n=1)
            raise ValueError(
                f"{where}: there is no column {name!r} (data.{'text-pair' if role == 'pair' else role}-column); "
                f"it has {', '.join(table.column_names)}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    texts = _strings(table, columns.text, where)
    pairs = None if columns.pair is None else _strings(table, columns.pair, where)
    labels = None if columns.label is None else table.column(columns.label).to_pylist()
    clients = None if columns.client is None else _ids(table, columns.client, "client", where)
    units = None if columns.unit is None else _ids(table, columns.unit, "unit", where)
    least = max(1, columns.least_words)
    kept = [
        row
        for row, text in enumerate(texts)
        if len(text.split(maxsplit=least)) >= least and (pairs is None or pairs[row].strip())
    ]
    if not kept:
        short = "all texts are empty" if least == 1 else f"no text has {least} words (data.least-words)"
        raise ValueError(f"{where}: {short if texts else 'it has no rows'}; nothing to train on")
    records = Texts(texts, pairs, labels, clients, units, skipped=len(texts) - len(kept))
    return records if len(kept) == len(texts) else records.select(kept)


def _ids(table: pyarrow.Table, name: str, what: str, where: str) -> list[str]:
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"{where}: {column.null_count} rows have no {what} in column {name!r}; fill them in")
    return [str(value) for value in column.to_pylist()]


def _strings(table: pyarrow.Table, name: str, where: str) -> list[str]:
    """A column of text; a missing text becomes an empty one."""
    column = table.column(name)
    if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
        others = [
            field.name for field in table.schema if pyarrow.types.is_large_string(field.type) or field.type == "string"
        ]
        raise ValueError(
            f"{where}: column {name!r} holds {column.type}, not text; columns of text: {', '.join(others) or 'none'}"
        )
    return [value or "" for value in column.to_pylist()]
