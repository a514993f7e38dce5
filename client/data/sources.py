"""Reading labelled text from where ``data.source`` says: a parquet, csv, jsonl or json file, or a data set of the hub.

``parquet:PATH``, ``csv:PATH`` (``.tsv`` files are split at tabs), ``jsonl:PATH``, ``json:PATH``; ``KIND:FOLDER`` for
the data sets of :mod:`client.data.catalog.corpora`; anything else is a Hugging Face id, ``owner/name``, with an
optional configuration and split: ``nyu-mll/glue:sst2@train``. (``notes`` is generated, see
:mod:`client.data.catalog.notes`.) A source is opened as columns of cells (:mod:`client.data.columns.tables`);
everything that cannot work is refused with what the file does hold and what to set. Texts stay as they are written.
"""

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.data import conversations
from client.data.catalog import corpora
from client.data.catalog.published import origin_hint
from client.data.columns import preferences
from client.data.columns.labels import count_missing
from client.data.columns.normal_form import INTEGER, differ_in_case, is_blank, normal_form
from client.data.columns.tables import KINDS, SUFFIXES, Columns, column_settings, read_path
from client.data.spec import NOTES, Reading

PATH_KINDS = (*KINDS, *corpora.CORPORA)
"""Kinds of sources that name a path."""
_FORMS = (
    f"sources are '{NOTES}', {', '.join(f'{kind}:PATH' for kind in PATH_KINDS)}, or a hub id "
    "owner/name[:config][@split]"
)
_NO_TEXT = frozenset(("NaN", "nan", "<NA>", "#N/A"))
"""What programs write into a file where a text is missing."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[^/@]*)?(@.*)?")


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
    hint = f"did you mean {path.parent / near[0]}?" if near else f"check the path; {origin_hint(path)}"
    raise ValueError(f"{option} = {source!r}: there is no file {path}; {hint}")


def read_file(source: str, reading: Reading, option: str) -> Columns:
    """The table in the file of a ``kind:PATH`` source.

    Raises:
        ValueError: no such file, or not one of that kind.
    """
    path = existing_file(source, option)
    try:
        return read_path(path, source.partition(":")[0], reading)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def read_hub(source: str, option: str) -> Columns:
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
    whole = loaded.with_format(None) if loaded._indices is None else loaded.flatten_indices()
    return Columns.of(whole.data.table)


def check_hub_id(source: str, option: str) -> None:
    """Refuse what can only be a path or a misspelled kind, before the hub is asked for it half a minute long."""
    where, (prefix, colon, rest) = f"{option} = {source!r}", source.partition(":")
    prefixed = bool(colon) and not Path(source).expanduser().exists()
    location = rest if prefixed else source
    path = Path(location).expanduser()
    if path.is_dir() and location and not prefixed:  # a configuration may be called as a folder is
        raise ValueError(f"{where}: {path} is a folder here, and no hub id; {_FORMS}")
    suffixes = Path(location.partition("@")[0]).suffixes[::-1]
    kinds = [SUFFIXES[suffix] for suffix in suffixes if suffix in SUFFIXES]
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
    """The records of a source before tokenisation.

    Attributes:
        texts: one per record, never empty.
        pairs: second texts (pair tasks), or None.
        labels: in normal form (:func:`client.data.columns.normal_form.normal_form`), or None.
        clients: ids of the natural clients in normal form, or None.
        units: ids of the units of privacy (patient, author, document) in normal form, or None: every record its own.
        left_out: how many rows were left out for which reason: a text was empty or shorter than asked for, or
            it has no label.
        noted: what else was seen and how often, such as names that differ in case only and keys that mean nothing here.
    """

    texts: list[str]
    pairs: list[str] | None = None
    labels: list[str] | None = None
    clients: list[str] | None = None
    units: list[str] | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    noted: Mapping[str, int] = field(default_factory=dict)

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
            self.noted,
        )

    def unit_numbers(self) -> NDArray[np.int64] | None:
        """The unit of every record, numbered; None where every record is its own."""
        return None if self.units is None else np.unique(self.units, return_inverse=True)[1].astype(np.int64)

    def keys(self) -> list[tuple[str, str]]:
        """Keys that are equal for equal records: the normal form of their texts."""
        pairs = self.pairs or [""] * len(self)
        return [(normal_form(text), normal_form(pair)) for text, pair in zip(self.texts, pairs, strict=True)]


def read(source: str, reading: Reading, option: str = "data.source", *, task: str = "") -> Texts:
    """The records of `source` for a task; `option` is the key named in messages.

    Raises:
        ValueError: missing or unreadable file, absent column, wrong type, no usable rows, hub out of reach.
    """
    kind = source.partition(":")[0]
    if kind in corpora.CORPORA:
        table = Columns.of(corpora.read(source, option))
    elif kind in KINDS:
        table = read_file(source, reading, option)
    else:
        table = read_hub(source, option)
    return _texts(table, reading, f"{option} = {source!r}", task)


def fingerprint(source: str, reading: Reading, option: str = "data.source", *, task: str = "") -> str:
    """SHA-256 of what `source` holds: of its files, or of the records read from the hub."""
    if source.partition(":")[0] in KINDS:
        with existing_file(source, option).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if source.partition(":")[0] in corpora.CORPORA:
        digest = hashlib.sha256()
        for path in corpora.files(source, option):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()
    records = read(source, reading, option, task=task)
    labels: list[Any] | None = records.labels
    if labels and all(map(INTEGER.fullmatch, labels)):
        labels = [int(label) for label in labels]  # as they were digested when runs began to be added up
    return hashlib.sha256(
        repr((records.texts, records.pairs, labels, records.clients, records.units)).encode()
    ).hexdigest()


def _texts(table: Columns, reading: Reading, where: str, task: str) -> Texts:
    named = column_settings(reading)
    if task in ("instruction", "preference"):
        named = [(key, name) for key, name in named if key not in ("text-column", "text-pair-column")]
    for key, name in named:
        _check_column(table, f"data.{key}", name, where)
    least = max(1, reading.least_words)
    left_out, noted = Counter[str](), Counter[str]()
    pairs = None
    if task in ("instruction", "preference"):
        words = conversations.words
        if task == "preference":
            (found, left_out), words = preferences.read_columns(table, where), preferences.words
        else:
            asked, answered = reading.text_column, reading.text_pair_column
            found, left_out, noted = conversations.read_column(table, asked, answered, where)
        kept = [row for row, text in enumerate(found) if text and words(text) >= least]
        texts = [text or "" for text in found]
    else:
        texts = [text or "" for text in table.texts(reading.text_column, where)]
        if reading.text_pair_column:
            pairs = [text or "" for text in table.texts(reading.text_pair_column, where)]
        kept = [
            row
            for row, text in enumerate(texts)
            if len(text.split(maxsplit=least)) >= least
            and not is_blank(text)
            and text not in _NO_TEXT
            and (pairs is None or not (is_blank(pairs[row]) or pairs[row] in _NO_TEXT))
        ]
    if rest := len(texts) - len(kept) - left_out.total():
        left_out["empty"] = rest
    if reading.label_column:  # blank or not is seen of a row by itself; `NA` beside numbers is not, and is refused
        given = table.names_of(reading.label_column, where)
        labelled = [row for row in kept if given[row]]
        if rest := len(kept) - len(labelled):
            left_out["without a label"] = rest
        kept = labelled
    if not kept:
        short = "all texts are empty" if least == 1 else f"no text has {least} words (data.least-words)"
        if left_out.total() > left_out["empty"]:
            short = f"no row can be used ({', '.join(f'{count} {reason}' for reason, count in left_out.items())})"
        raise ValueError(f"{where}: {short if texts else 'it has no rows'}; nothing to train on")
    names: dict[str, list[str]] = {}
    for what in ("label", "client", "unit"):
        if column := getattr(reading, f"{what}_column"):
            whole = table.names_of(column, where)
            found_names = names[what] = [whole[row] for row in kept]
            if what != "label" and (absent := count_missing(found_names)):
                raise ValueError(
                    f"{where}: {absent} rows have no {what} in column {column!r}; fill them in or remove them"
                )
            if count := differ_in_case(found_names):
                noted[
                    f"names of a {what} differ from another in upper and lower case only and are taken for different "
                    f"ones (data.{what}-column)"
                ] = count
    return Texts(
        [texts[row] for row in kept],
        None if pairs is None else [pairs[row] for row in kept],
        names.get("label"),
        names.get("client"),
        names.get("unit"),
        left_out,
        noted,
    )


def _check_column(table: Columns, option: str, name: str, where: str) -> None:
    times = table.names.count(name)
    if times > 1:
        raise ValueError(f"{where}: {times} columns are called {name!r} ({option}); rename all but one")
    if not times:
        near = difflib.get_close_matches(name, table.names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if not near and "= 'csv:" in where:
            hint = "; if that is a record, the file has no header: name its columns in data.columns"
        raise ValueError(f"{where}: there is no column {name!r} ({option}); it has {', '.join(table.names)}{hint}")
