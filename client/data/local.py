"""The records of a node that owns them: read and tokenised where they lie, once, then memory-mapped.

In a simulation the server's host prepares the records of all clients; in a deployment no record leaves the node it is
on. What the server may say is how to read them (names of columns, the labels the federation knows, the longest record).
Flower starts a process for every message, so what is prepared is kept in the node's cache: a later message costs a look
at the file's size and time and a few memory maps.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from client.data.columns.labels import match_labels
from client.data.prepared import sha256
from client.data.records import Records
from client.data.spec import MaxLength, Reading, Task
from client.models.files import fingerprint
from privacy import checks, durable
from strategies.messages.client_update import code_fingerprint

log = logging.getLogger(__name__)

FORMAT = 1
KINDS = ("parquet", "csv", "jsonl", "json")
DIGEST_FILE = "source.sha256"


class ReadSettings(Reading):
    """The settings by which every node reads its own records; the same for all, and public.

    Attributes:
        client_column: says whose a record is, on nodes with many clients; empty: a node is one client.
        task, max_length, chat_template: see :class:`client.data.spec.DataSpec`.
        labels: names of the classes in the order of their ids; empty for a language model.
    """

    task: Task
    max_length: MaxLength
    chat_template: str = ""
    labels: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _labels_and_their_column(self) -> "ReadSettings":
        if bool(self.label_column) != (self.task == "classification"):
            raise ValueError(f"label_column = {self.label_column!r} does not fit task = {self.task!r}")
        return self


@dataclass(frozen=True)
class OwnData:
    """The records of a node: of the one client that it is, or of many, in the order of their names.

    Attributes:
        stops: int64 ``[clients]``, the end of every client's records, which begin where the last one's end; None where
            the node is one client.
        digest: SHA-256 of the file they were read from; empty where the node is one client.
    """

    folder: Path
    records: Records
    stops: NDArray[np.int64] | None = None
    digest: str = ""

    @property
    def clients(self) -> int:
        """The number of clients that have records here."""
        return 1 if self.stops is None else len(self.stops)

    def client(self, index: int) -> Records:
        """The records of one client; of a node that is one, whichever number the server gave it."""
        if self.stops is None:
            return self.records
        return self.records.span(int(self.stops[index - 1]) if index else 0, int(self.stops[index]))


def open_own(source: str, reading: ReadSettings, tokenizer: str, cache: Path) -> OwnData:
    """The records of `source`, a ``parquet:``, ``csv:``, ``jsonl:`` or ``json:`` file, from the cache or prepared now.

    Raises:
        ValueError: a file, a column or a label that cannot work; the text may quote the file.
    """
    kind, _, location = source.partition(":")
    checks.one_of(KINDS, data=kind)
    path = Path(location).expanduser()
    if not path.is_file():
        from client.data.sources import existing_file  # a second, which no later message shall pay

        path = existing_file(source, "data")
    stat = path.stat()
    parts = [FORMAT, str(path), stat.st_size, stat.st_mtime_ns, reading.model_dump()]
    parts += [tokenizer, fingerprint(tokenizer), code_fingerprint()]  # another model may come to lie under its name
    folder = cache / durable.private_name(cache, json.dumps(parts))
    durable.make_folder(folder, lambda draft: _write(draft, source, reading, tokenizer))
    durable.close_to_others(folder)
    arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in folder.glob("*.npy")}
    stops, digest = arrays.pop("stops", None), folder / DIGEST_FILE
    return OwnData(folder, Records(**arrays), stops, digest.read_text() if digest.is_file() else "")


def _write(folder: Path, source: str, reading: ReadSettings, tokenizer: str) -> None:
    from client.data.sources import existing_file, read
    from client.data.tokenise import tokenise
    from client.models.base import load_tokenizer

    texts = read(source, reading, "data", task=reading.task)
    for what, count in texts.noted.items():
        log.warning("%s: %d %s", source, count, what)
    ids = None if texts.labels is None else label_ids(texts.labels, reading.labels)
    model = load_tokenizer(tokenizer)
    made = tokenise(texts, ids, model, reading.task, reading.max_length, chat_template=reading.chat_template)
    records, texts = made.records, made.of(texts)
    stops = digest = None
    if texts.clients is not None:
        from client.data.partition import natural

        owners = natural(texts.clients)
        records, texts, stops = records.select(owners.order), texts.select(owners.order), owners.stops
        digest = sha256(existing_file(source, "data"))
    arrays: dict[str, NDArray[Any] | None] = {
        "tokens": records.tokens,
        "offsets": records.offsets,
        "labels": records.labels,
        "token_weights": records.token_weights,
        "units": texts.unit_numbers(),
        "splits": records.splits,
        "stops": stops,
    }
    folder.mkdir(mode=0o700)  # it holds private texts, as tokens
    for name, array in arrays.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
    if digest is not None:
        (folder / DIGEST_FILE).write_text(digest)


def label_ids(labels: list[Any], names: tuple[str, ...]) -> NDArray[np.int64]:
    """Class ids of a node's labels, int64 ``[n]``.

    Raises:
        ValueError: a missing label, or one that the federation does not have.
    """
    ids, unknown = match_labels(labels, names, "data")
    if unknown:
        raise ValueError(f"labels {unknown[:5]} are none of the federation's: {list(names[:20])}")
    return ids
