"""Files of records as columns of cells, each cell the text in the file: no type of a column is guessed.

What a number was written as in CSV or JSON is kept, digit by digit; values that parquet and Arrow hold in types of
their own are written out. Lists and objects inside a cell stay what they are.
"""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
from pyarrow import types as _types

from client.data.columns.normal_form import normal_form
from client.data.spec import Reading
from client.settings import kebab

SUFFIXES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
}
"""Kinds of files by their endings."""
KINDS = tuple(dict.fromkeys(SUFFIXES.values()))

# A row must fit into two blocks.
_BLOCK = 64 << 20

_NOT_UTF8 = "its text is not UTF-8; save it as UTF-8, or (CSV) set data.encoding to what it is, such as 'latin-1'"
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Columns:
    """A table of cells: texts, None, or (of JSON and parquet) lists and dictionaries.

    Attributes:
        names: of the columns; a name may occur twice.
        rows: how many.
    """

    names: list[str]
    rows: int
    _cells: pyarrow.Table | dict[str, list[Any]]

    @staticmethod
    def of(table: pyarrow.Table) -> "Columns":
        """The columns of an Arrow table."""
        return Columns(table.column_names, table.num_rows, table)

    def cells(self, name: str) -> list[Any]:
        """The cells of one column; its name must occur once.

        Raises:
            ValueError: bytes that are no UTF-8.
        """
        if isinstance(self._cells, dict):
            return self._cells[name]
        column = self._cells.column(name)
        kind = column.type
        try:
            written = any(holds(kind) for holds in (_types.is_nested, _types.is_string, _types.is_large_string))
            cells: list[Any] = (column if written else column.cast(pyarrow.string())).to_pylist()
            if _types.is_floating(kind):  # Arrow writes 5e+11, Python (and pandas, into CSV) 500000000000.0
                cells = [None if cell is None else repr(float(cell)) for cell in cells]
        except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowTypeError):  # a type with no text of its own, as uuid
            return [None if value is None else str(value) for value in column.to_pylist()]
        except (UnicodeDecodeError, pyarrow.ArrowInvalid) as error:
            raise ValueError(f"column {name!r} of {kind} has no texts: {error}") from error
        return cells

    def texts(self, name: str, where: str) -> list[str | None]:
        """One column of texts.

        Raises:
            ValueError: a cell holds a list or an object; with the columns that hold none in the first rows.
        """
        cells = self.cells(name)
        for row, cell in enumerate(cells):
            if isinstance(cell, (list, dict)):
                flat = [other for other in self.names if self.names.count(other) == 1 and self.is_flat(other)]
                raise ValueError(
                    f"{where}, row {row + 1}: column {name!r} holds {_kind(cell)}, not text; columns of text: "
                    f"{', '.join(flat) or 'none'}"
                )
        return cells

    def names_of(self, name: str, where: str) -> list[str]:
        """One column of names (clients, units, classes) in normal form; a missing one is empty.

        Raises:
            ValueError: as :meth:`texts`, or floating-point numbers so large that several names may have become one.
        """
        if not isinstance(self._cells, dict) and _types.is_floating(kind := self._cells.schema.field(name).type):
            magnitude = pyarrow.compute.max(pyarrow.compute.abs(self._cells.column(name))).as_py()
            bits = {16: 11, 32: 24, 64: 53}[kind.bit_width]
            if magnitude is not None and 2**bits <= magnitude < float("inf"):
                raise ValueError(
                    f"{where}: column {name!r} holds floating-point numbers ({kind}) up to {magnitude:g}; from "
                    f"2^{bits} = {2**bits} on several names may be one number there: write it as text or as integers"
                )
        return [normal_form(cell) for cell in self.texts(name, where)]

    def is_flat(self, name: str) -> bool:
        """Whether none of the first thousand cells is a list or an object."""
        if isinstance(self._cells, dict):
            return not any(isinstance(cell, (list, dict)) for cell in self._cells[name][:1000])
        return not _types.is_nested(self._cells.schema.field(name).type)


def _kind(cell: Any) -> str:
    return "a list" if isinstance(cell, list) else "an object"


def read_path(path: Path, kind: str, reading: Reading) -> Columns:
    """The table in a file.

    Args:
        kind: of :data:`KINDS`.
        reading: of a CSV file its separator, header and encoding, and which columns it must have.

    Raises:
        ValueError: it is no such file, with the cause.
    """
    try:
        match kind:
            case "parquet":
                names = pyarrow.parquet.read_schema(path).names
                if len(set(names)) < len(names):
                    return Columns.of(pyarrow.parquet.ParquetFile(path).read())  # read_table does not open it
                return Columns.of(pyarrow.parquet.read_table(path))
            case "csv":
                return Columns.of(_read_csv(path, reading))
            case _:
                return _read_json(path)
    except (ValueError, OSError, RecursionError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        reason = _NOT_UTF8 if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error) else str(error)
        raise ValueError(f"{path} is not a readable {kind} file: {reason}") from error


def column_settings(reading: Reading) -> list[tuple[str, str]]:
    """The key of every column that is asked for, and its name."""
    return [(kebab(field), str(name)) for field, name in reading if field.endswith("_column") and name]


def _read_csv(path: Path, reading: Reading) -> pyarrow.Table:
    delimiter = reading.separator or ("\t" if ".tsv" in path.suffixes else ",")
    given = [name.strip() for name in reading.columns.split(",")] if reading.columns else None
    encoding = "utf-8-sig" if reading.encoding == "utf-8" else reading.encoding
    with path.open(encoding=encoding, errors="replace", newline="") as file:
        names = given or next(csv.reader(file, delimiter=delimiter), [])
    try:
        table = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK, column_names=given, encoding=reading.encoding),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string())),
        )
    except pyarrow.ArrowInvalid as error:
        raise ValueError(_misread(path, delimiter, reading.encoding) or str(error)) from error
    needed = {name for _, name in column_settings(reading)}
    if not needed <= set(table.column_names) and (reason := _misread(path, delimiter, reading.encoding)):
        raise ValueError(reason)
    return table


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


def _read_json(path: Path) -> Columns:
    """An object on every line, or one list of objects; keys that an object lacks are None."""
    columns: dict[str, list[Any]] = {}
    rows = 0
    for at, row in _objects(path):
        if not isinstance(row, dict):
            raise ValueError(f"{at} is {row!r:.60}, not an object with a key for every column")
        for name, cell in row.items():
            cells = columns.setdefault(name, [])
            cells.extend([None] * (rows - len(cells)))
            cells.append(str(cell).lower() if isinstance(cell, bool) else cell)
        rows += 1
    for cells in columns.values():
        cells.extend([None] * (rows - len(cells)))
    return Columns(list(columns), rows, columns)


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Every row, and where it stands."""
    decoder = json.JSONDecoder(
        parse_int=Written, parse_float=Written, parse_constant=_constant, object_pairs_hook=_object, strict=False
    )
    with path.open("rb") as file:
        if file.read(3) != b"\xef\xbb\xbf":
            file.seek(0)
        if (file.peek(1) or b" ")[:1] == b"[":
            yield from ((f"item {number + 1}", row) for number, row in enumerate(_decoded(decoder, file.read())))
            return
        for number, line in enumerate(file):
            if line.strip():
                try:
                    yield f"line {number + 1}", _decoded(decoder, line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"line {number + 1} is no JSON ({error.msg} at character {error.pos + 1}); a file holds an "
                        "object on every line, or one list of objects"
                    ) from error


def _decoded(decoder: json.JSONDecoder, content: bytes) -> Any:
    value = decoder.decode(content.decode())
    return _whole_characters(value) if b"\\ud" in content.lower() else value


def _whole_characters(value: Any) -> Any:
    """The same with U+FFFD for halves of characters, which JSON can spell and no text can hold."""
    if isinstance(value, str):
        return _HALF_CHARACTER.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole_characters(each) for each in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(each) for key, each in value.items()}
    return value


class Written(str):
    """A number in JSON, as it is written."""


def values_of(cell: Any) -> Any:
    """The values inside a cell, with its numbers as numbers."""
    if isinstance(cell, Written):
        return json.loads(cell)
    if isinstance(cell, list):
        return [values_of(each) for each in cell]
    return {key: values_of(each) for key, each in cell.items()} if isinstance(cell, dict) else cell


def _constant(name: str) -> str | None:
    return None if name == "NaN" else name  # what Python writes for a value that is missing


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return found
