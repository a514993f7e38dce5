"""Reading labelled text from where ``data.source`` says: a parquet, csv or jsonl file, or a data set of the hub.

``parquet:PATH``, ``csv:PATH`` (``.tsv`` files are split at tabs), ``jsonl:PATH``; ``KIND:FOLDER`` for the data sets of
:mod:`client.data.catalog.corpora`; anything else is a Hugging Face id, ``owner/name``, with an optional configuration
and split: ``nyu-mll/glue:sst2@train``. (``notes`` is generated, see :mod:`client.data.catalog.notes`.) A source is
opened as a table of pyarrow; everything that cannot work is refused with what the file does hold and what to set.
"""

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from numpy.typing import NDArray

from client.data import conversations
from client.data.catalog import corpora
from client.data.labels import INTEGER, missing
from client.data.spec import NOTES, Reading
from client.settings import kebab

FILE_KINDS = ("parquet", "csv", "jsonl")

PATH_KINDS = (*FILE_KINDS, *corpora.CORPORA)
"""Kinds of sources that name a path."""
_FORMS = (
    f"sources are '{NOTES}', {', '.join(f'{kind}:PATH' for kind in PATH_KINDS)}, or a hub id "
    "owner/name[:config][@split]"
)
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/@]*)?(@.*)?")

# A row must fit into two blocks, and the type of a column is guessed from the first one.
_BLOCK = 64 << 20

_NOT_UTF8 = "its text is not UTF-8; save it as UTF-8, or (CSV) set data.encoding to what it is, such as 'latin-1'"


def columns(reading: Reading) -> list[tuple[str, str]]:
    """The key of every column that is asked for, and its name."""
    return [(kebab(field), str(name)) for field, name in reading if field.endswith("_column") and name]


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


def read_file(source: str, reading: Reading, option: str) -> pyarrow.Table:
    """The table in the file of a ``kind:PATH`` source.

    Raises:
        ValueError: no such file, or not one of that kind.
    """
    kind, path = source.partition(":")[0], existing_file(source, option)
    try:
        match kind:
            case "parquet":
                names = pyarrow.parquet.read_schema(path).names
                if len(set(names)) < len(names):
                    return pyarrow.parquet.ParquetFile(path).read()  # read_table does not open it
                return pyarrow.parquet.read_table(path)
            case "csv":
                return _read_csv(path, reading)
            case _:
                return pyarrow.json.read_json(path, read_options=pyarrow.json.ReadOptions(block_size=_BLOCK))
    except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
        reason = _NOT_UTF8 if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error) else str(error)
        raise ValueError(f"{option}: {path} is not a readable {kind} file: {reason}") from error


def _read_csv(path: Path, reading: Reading) -> pyarrow.Table:
    """Labels and ids are read as text, so that what one file holds does not decide how another's are spelled."""
    delimiter = reading.separator or ("\t" if ".tsv" in path.suffixes else ",")
    names = [name.strip() for name in reading.columns.split(",")] if reading.columns else None
    as_text = [name for name in (reading.label_column, reading.client_column, reading.unit_column) if name]
    try:
        table = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK, column_names=names, encoding=reading.encoding),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(as_text, pyarrow.string())),
        )
    except pyarrow.ArrowInvalid as error:
        raise ValueError(_misread(path, delimiter, reading.encoding) or str(error)) from error
    found = table.column_names
    needed = [name for _, name in columns(reading)]
    if not set(needed) <= set(found) and (reason := _misread(path, delimiter, reading.encoding)):
        raise ValueError(reason)
    once = [name for name in needed if found.count(name) == 1]  # the others are refused by whoever takes columns
    if any(pyarrow.types.is_binary(table.column(name).type) for name in once):
        raise ValueError(_NOT_UTF8)
    label = reading.label_column
    if label not in once:
        return table
    numbers = _integers(table.column(label))
    return table if numbers is None else table.set_column(found.index(label), label, numbers)


def _misread(path: Path, delimiter: str, encoding: str) -> str:
    """What is wrong with a header that is not split by `delimiter`; empty if nothing is seen."""
    with path.open("rb") as file:
        header = file.readline(1 << 16)
    if encoding == "utf-8" and header.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _NOT_UTF8
    others = [other for other in (",", ";", "\t", "|") if other.encode() in header]
    if not others or delimiter.encode() in header:
        return ""
    names = {",": "commas", "\t": "tabs"}
    expected, found = (names.get(each, repr(each)) for each in (delimiter, others[0]))
    remedy = "name it .tsv" if others[0] == "\t" else f"set data.separator = {others[0]!r}"
    return f"its separator is {found}, not {expected}; {remedy}"


def _integers(column: pyarrow.ChunkedArray) -> pyarrow.Array | None:
    """A column of texts that all spell integers, as integers; a blank text spells none."""
    integers: list[int | None] = []
    for text in column.to_pylist():
        spelled = INTEGER.fullmatch(text)
        if spelled is None and text.strip():
            return None
        integers.append(None if spelled is None else int(spelled[1]))
    return pyarrow.array(integers, pyarrow.int64())


def read_hub(source: str, option: str) -> pyarrow.Table:
    """The table of ``owner/name[:config][@split]``.

    Raises:
        ValueError: it cannot be that, or cannot be loaded.
    """
    check_hub_id(source, option)
    import datasets  # takes seconds to import, and local files do not need it

    name, _, split = source.partition("@")
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{option} = {source!r}: cannot load it from the Hugging Face hub or its cache: {reason}; {_FORMS}"
        ) from error
    return loaded.with_format(None).data.table if loaded._indices is None else loaded.flatten_indices().data.table


def check_hub_id(source: str, option: str) -> None:
    """Refuse what can only be a path or a misspelled kind, before the hub is asked for it half a minute long."""
    where, (prefix, colon, rest) = f"{option} = {source!r}", source.partition(":")
    prefixed = bool(colon) and not Path(source).expanduser().exists()
    location = rest if prefixed else source
    path = Path(location).expanduser()
    if path.is_dir() and location and not prefixed:  # a configuration may be called as a folder is
        raise ValueError(f"{where}: {path} is a folder here, and no hub id; {_FORMS}")
    suffixes = Path(location.partition("@")[0]).suffixes[::-1]
    kinds = [_SUFFIXES[suffix] for suffix in suffixes if suffix in _SUFFIXES]
    if prefixed:
        kinds += difflib.get_close_matches(prefix.lower(), PATH_KINDS, n=1, cutoff=0.8)
    if kinds or path.is_file() or prefix == NOTES:
        wrong = f"{prefix!r} takes no path" if prefix == NOTES else f"there is no kind of source {prefix!r}"
        hint = f"did you mean {kinds[0]}:{location}?" if kinds else _FORMS
        raise ValueError(f"{where}: {wrong if prefixed else 'a file needs its kind before it'}; {hint}")
    if not _HUB_ID.fullmatch(source):
        raise ValueError(f"{where}: this is no hub id; {_FORMS}")


@dataclass(frozen=True)
class Texts:
    """Records before tokenisation.

    Attributes:
        texts: one per record, never empty.
        pairs: second texts (pair tasks), or None.
        labels: raw labels as the source has them (integers or strings), or None.
        clients: ids of the natural clients as strings, or None.
        units: ids of the units of privacy (patient, author, document) as strings, or None: every record its own.
        left_out: how many rows were left out for which reason: a text was empty, or shorter than asked for.
    """

    texts: list[str]
    pairs: list[str] | None = None
    labels: list[Any] | None = None
    clients: list[str] | None = None
    units: list[str] | None = None
    left_out: Counter[str] = field(default_factory=Counter)

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
            self.left_out,
        )

    def unit_numbers(self) -> NDArray[np.int64] | None:
        """The unit of every record, numbered; None where every record is its own."""
        return None if self.units is None else np.unique(self.units, return_inverse=True)[1].astype(np.int64)

    def keys(self) -> list[tuple[str, str]]:
        """What makes two records the same: their texts without blanks at the ends."""
        return [
            (text.strip(), "" if self.pairs is None else self.pairs[row].strip()) for row, text in enumerate(self.texts)
        ]


def read(source: str, reading: Reading, option: str = "data.source", *, chat: bool = False) -> Texts:
    """The records of `source`; `option` is the key named in messages; with `chat` they are conversations.

    Raises:
        ValueError: missing or unreadable file, absent column, wrong type, no usable rows, hub out of reach.
    """
    kind = source.partition(":")[0]
    if kind in corpora.CORPORA:
        table = corpora.read(source, option)
    elif kind in FILE_KINDS:
        table = read_file(source, reading, option)
    else:
        table = read_hub(source, option)
    return _texts(table, reading, f"{option} = {source!r}", chat)


def fingerprint(source: str, reading: Reading, option: str = "data.source", *, chat: bool = False) -> str:
    """SHA-256 of what `source` holds: of its files, or of the records read from the hub."""
    if source.partition(":")[0] in FILE_KINDS:
        with existing_file(source, option).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if source.partition(":")[0] in corpora.CORPORA:
        digest = hashlib.sha256()
        for path in corpora.files(source, option):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()
    records = read(source, reading, option, chat=chat)
    return hashlib.sha256(
        repr((records.texts, records.pairs, records.labels, records.clients, records.units)).encode()
    ).hexdigest()


def _texts(table: pyarrow.Table, reading: Reading, where: str, chat: bool) -> Texts:
    named = columns(reading)
    if chat:
        named = [(key, name) for key, name in named if key not in ("text-column", "text-pair-column")]
    for key, name in named:
        _check_column(table, f"data.{key}", name, where)
    labels = table.column(reading.label_column).to_pylist() if reading.label_column else None
    least = max(1, reading.least_words)
    left_out: Counter[str] = Counter()
    pairs = None
    if chat:
        found, left_out = conversations.read_column(table, reading.text_column, reading.text_pair_column, where)
        kept = [row for row, text in enumerate(found) if text and conversations.words(text) >= least]
        texts = [text or "" for text in found]
    else:
        texts = _strings(table, reading.text_column, where)
        pairs = _strings(table, reading.text_pair_column, where) if reading.text_pair_column else None
        kept = [
            row
            for row, text in enumerate(texts)
            if len(text.split(maxsplit=least)) >= least and (pairs is None or pairs[row].strip())
        ]
    if rest := len(texts) - len(kept) - left_out.total():
        left_out["empty"] = rest
    if not kept:
        short = "all texts are empty" if least == 1 else f"no text has {least} words (data.least-words)"
        if left_out.total() > left_out["empty"]:
            short = f"no row can be used ({', '.join(f'{count} {reason}' for reason, count in left_out.items())})"
        raise ValueError(f"{where}: {short if texts else 'it has no rows'}; nothing to train on")
    clients = _ids(table, reading.client_column, "client", kept, where) if reading.client_column else None
    units = _ids(table, reading.unit_column, "unit", kept, where) if reading.unit_column else None
    whole = Texts(texts, pairs, labels, left_out=left_out)
    return replace(whole if len(kept) == len(texts) else whole.select(kept), clients=clients, units=units)


def _check_column(table: pyarrow.Table, option: str, name: str, where: str) -> None:
    times = table.column_names.count(name)
    if times > 1:
        raise ValueError(f"{where}: {times} columns are called {name!r} ({option}); rename all but one")
    if not times:
        near = difflib.get_close_matches(name, table.column_names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if not near and "= 'csv:" in where:
            hint = "; if that is a record, the file has no header: name its columns in data.columns"
        raise ValueError(
            f"{where}: there is no column {name!r} ({option}); it has {', '.join(table.column_names)}{hint}"
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
