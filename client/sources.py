"""Reading labelled text from where ``data.source`` says: a parquet, csv or jsonl file, or a data set of the hub.

``parquet:PATH``, ``csv:PATH`` (``.tsv`` files are split at tabs), ``jsonl:PATH``; ``KIND:FOLDER`` for the data sets of
:mod:`client.corpora`; anything else is a Hugging Face id,
``owner/name``, with an optional configuration and split: ``nyu-mll/glue:sst2@train``. (``notes`` is generated, see
:mod:`client.notes`.) Everything that cannot work is refused with what the file does hold and what to set.
"""

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from client import corpora
from client.labels import missing
from client.source_files import FILE_KINDS, NOTES, Columns, existing_file, read_file, read_hub

__all__ = ["NOTES", "Columns", "Texts", "fingerprint", "read"]


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
        table = read_file(source, columns, option)
    else:
        table = read_hub(source, option)
    return _texts(table, columns, f"{option} = {source!r}")


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


def _texts(table: pyarrow.Table, columns: Columns, where: str) -> Texts:
    for role, name in columns.names():
        _check_column(table, role, name, where)
    texts = _strings(table, columns.text, where)
    pairs = None if columns.pair is None else _strings(table, columns.pair, where)
    labels = None if columns.label is None else table.column(columns.label).to_pylist()
    least = max(1, columns.least_words)
    kept = [
        row
        for row, text in enumerate(texts)
        if len(text.split(maxsplit=least)) >= least and (pairs is None or pairs[row].strip())
    ]
    if not kept:
        short = "all texts are empty" if least == 1 else f"no text has {least} words (data.least-words)"
        raise ValueError(f"{where}: {short if texts else 'it has no rows'}; nothing to train on")
    clients = None if columns.client is None else _ids(table, columns.client, "client", kept, where)
    units = None if columns.unit is None else _ids(table, columns.unit, "unit", kept, where)
    whole = Texts(texts, pairs, labels, skipped=len(texts) - len(kept))
    return replace(whole if len(kept) == len(texts) else whole.select(kept), clients=clients, units=units)


def _check_column(table: pyarrow.Table, role: str, name: str, where: str) -> None:
    option, times = f"data.{'text-pair' if role == 'pair' else role}-column", table.column_names.count(name)
    if times > 1:
        raise ValueError(f"{where}: {times} columns are called {name!r} ({option}); rename all but one")
    if not times:
        near = difflib.get_close_matches(name, table.column_names, n=1)
        raise ValueError(
            f"{where}: there is no column {name!r} ({option}); it has {', '.join(table.column_names)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )


def _ids(table: pyarrow.Table, name: str, what: str, kept: list[int], where: str) -> list[str]:
    """The ids of the rows `kept`, as text without blanks around it.

    A missing id must not pass: all rows without one would be one unit.
    """
    column = table.column(name).to_pylist()
    ids = [column[row] for row in kept]
    absent = missing(ids)
    if absent:
        raise ValueError(f"{where}: {absent} rows have no {what} in column {name!r}; fill them in or remove them")
    return [str(value).strip() for value in ids]


def _strings(table: pyarrow.Table, name: str, where: str) -> list[str]:
    """A column of text; a missing text becomes an empty one."""
    column = table.column(name)
    if pyarrow.types.is_null(column.type):  # no text at all, so nothing that could have another type
        return [""] * len(column)
    if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
        others = [
            field.name for field in table.schema if pyarrow.types.is_large_string(field.type) or field.type == "string"
        ]
        raise ValueError(
            f"{where}: column {name!r} holds {column.type}, not text; columns of text: {', '.join(others) or 'none'}"
        )
    return [value or "" for value in column.to_pylist()]
