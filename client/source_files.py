"""Opening what ``data.source`` names: a file, or a data set of the Hugging Face hub, as a table of pyarrow."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from client import corpora
from client.labels import INTEGER

FILE_KINDS = ("parquet", "csv", "jsonl")
NOTES = "notes"

_KINDS = (*FILE_KINDS, *corpora.CORPORA)
_FORMS = (
    f"sources are '{NOTES}', {', '.join(f'{kind}:PATH' for kind in _KINDS)}, or a hub id owner/name[:config][@split]"
)
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/@]*)?(@.*)?")

# A row must fit into two blocks, and the type of a column is guessed from the first one.
_BLOCK = 64 << 20

_NOT_UTF8 = "its text is not UTF-8; save it as UTF-8"


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


def read_file(source: str, columns: Columns, option: str) -> pyarrow.Table:
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
                return _read_csv(path, columns)
            case _:
                return pyarrow.json.read_json(path, read_options=pyarrow.json.ReadOptions(block_size=_BLOCK))
    except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
        reason = _NOT_UTF8 if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error) else str(error)
        raise ValueError(f"{option}: {path} is not a readable {kind} file: {reason}") from error


def _read_csv(path: Path, columns: Columns) -> pyarrow.Table:
    """Labels and ids are read as text, so that what one file holds does not decide how another's are spelled."""
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    as_text = [name for name in (columns.label, columns.client, columns.unit) if name is not None]
    try:
        table = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(as_text, pyarrow.string())),
        )
    except pyarrow.ArrowInvalid as error:
        raise ValueError(_misread(path, delimiter) or str(error)) from error
    found = table.column_names
    needed = [name for _, name in columns.names()]
    if not set(needed) <= set(found) and (reason := _misread(path, delimiter)):
        raise ValueError(reason)
    once = [name for name in needed if found.count(name) == 1]  # the others are refused by whoever takes columns
    if any(pyarrow.types.is_binary(table.column(name).type) for name in once):
        raise ValueError(_NOT_UTF8)
    if columns.label not in once:
        return table
    numbers = _integers(table.column(columns.label))
    return table if numbers is None else table.set_column(found.index(columns.label), columns.label, numbers)


def _misread(path: Path, delimiter: str) -> str:
    """What is wrong with a header that is not split by `delimiter`; empty if nothing is seen."""
    with path.open("rb") as file:
        header = file.readline(1 << 16)
    if header.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _NOT_UTF8
    others = [other for other in (",", ";", "\t", "|") if other.encode() in header]
    if not others or delimiter.encode() in header:
        return ""
    names = {",": "commas", "\t": "tabs"}
    remedy = "name it .tsv" if others[0] == "\t" else f"save it with {names[delimiter]}"
    return f"its separator is {names.get(others[0], repr(others[0]))}, not {names[delimiter]}; {remedy}"


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
        kinds += difflib.get_close_matches(prefix.lower(), _KINDS, n=1, cutoff=0.8)
    if kinds or path.is_file() or prefix == NOTES:
        wrong = f"{prefix!r} takes no path" if prefix == NOTES else f"there is no kind of source {prefix!r}"
        hint = f"did you mean {kinds[0]}:{location}?" if kinds else _FORMS
        raise ValueError(f"{where}: {wrong if prefixed else 'a file needs its kind before it'}; {hint}")
    if not _HUB_ID.fullmatch(source):
        raise ValueError(f"{where}: this is no hub id; {_FORMS}")
