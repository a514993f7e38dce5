"""An append-only file of JSON lines that survives ``kill -9`` and shows tampering: the paper the ledger is written on.

One line is one canonical JSON object ``{"body", "hash", "kind", "line", "previous"}``: ``line`` counts from 1,
``previous`` is the hash of the line before (64 zeros for the first) and ``hash`` is the SHA-256 of the other four.
So a changed, removed, repeated or reordered line breaks the chain at a line that can be named.

Durability. :meth:`Journal.append` returns only after the whole line has been handed to the disk by ``fsync`` (on
creation the folder too). If anything fails on the way, the journal refuses every later append: what the disk holds
is then unknown, and only reading it again can tell.

A torn tail (bytes after the last newline, left by a crash inside ``append``) is no completed append, so whoever
waited for it never went on. If it is nevertheless a whole valid line that lacks its newline, it counts as appended,
the careful reading; else it is cut off on opening, and a line of kind ``"torn"`` records how much was cut.

The chain has no secret key. It cannot expose someone who rewrites every later line, or who puts back an older copy of
the whole file. Against these there is :attr:`Journal.head`: whoever keeps it elsewhere (a checkpoint does) passes it
to :meth:`Journal.open` as ``expected_head``, and a file that does not contain that line raises :class:`CorruptRun`.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from privacy import durable
from privacy.errors import CorruptRun

_BEFORE_FIRST = "0" * 64
_HELD = "{} is held by another process; two runs must not spend from one ledger"


@dataclass(frozen=True)
class Entry:
    """One verified line: its number from 1, its kind, its content and its hash."""

    line: int
    kind: str
    body: Mapping[str, Any]
    hash: str


def canonical(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII; NaN and infinity are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


class Journal:
    """A hash-chained file held open by one process. Make one with :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path, descriptor: int, entries: list[Entry], writable: bool) -> None:
        self.path = path
        self.entries = entries
        self._descriptor = descriptor
        self._writable = writable
        self._owner = os.getpid()
        self._broken = False
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: Path, mode: int = 0o644) -> "Journal":
        """Start an empty journal; FileExistsError if there is one (a ledger is never overwritten)."""
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            durable.lock(descriptor, _HELD.format(path))
            durable.sync(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, [], writable=True)

    @classmethod
    def start(cls, path: Path, kind: str, body: Mapping[str, Any], mode: int = 0o644) -> "Journal":
        """A journal whose first line is on the disk when its file gets its name; FileExistsError if there is one.

        What a crash left without its first line could not be opened.
        """
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        journal = cls.create(draft, mode)
        try:
            journal.append(kind, body)
            os.link(draft, path)
            durable.sync(path.parent)
            journal.path = path
            return journal
        except BaseException:
            journal.close()
            raise
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: Path, expected_head: str | None = None, read_only: bool = False) -> "Journal":
        """Read and verify a journal.

        Args:
            expected_head: a :attr:`head` seen earlier; the file must contain that line (it may have grown since).
            read_only: take no lock and change nothing, for reports on a run that may still be alive.

        Raises:
            CorruptRun: a line is damaged, missing, repeated or out of place, or the expected head is absent.
            BlockingIOError: another process holds the journal.
        """
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_APPEND
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            if not read_only:
                durable.lock(descriptor, _HELD.format(path))
            content = path.read_bytes()
            complete, newline, tail = content.rpartition(b"\n")
            entries: list[Entry] = []
            for line in complete.split(b"\n") if newline else []:
                entries.append(_verified(line, entries, path))
            journal = cls(path, descriptor, entries, writable=not read_only)
            if tail:
                journal._mend(tail, len(content))
            if expected_head is not None:
                journal.must_contain(expected_head)
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    @property
    def head(self) -> str:
        """``"LINES:HASH"`` of the last line: keep it elsewhere to notice a rollback."""
        return f"{len(self.entries)}:{self.entries[-1].hash if self.entries else _BEFORE_FIRST}"

    def append(self, kind: str, body: Mapping[str, Any]) -> Entry:
        """Append one line to the journal; durable when this returns. RuntimeError if the journal may not be written
        (any more).
        """
        with self._lock:
            if not self._writable:
                raise RuntimeError(f"{self.path} is open for reading only; open it without read_only to append")
            if os.getpid() != self._owner:
                raise RuntimeError(
                    f"{self.path} belongs to process {self._owner}, not to its child {os.getpid()}; open it there anew"
                )
            if self._broken:
                raise RuntimeError(
                    f"{self.path} failed to write before, so what the disk holds is unknown; open it again to find out"
                )
            previous = self.entries[-1].hash if self.entries else _BEFORE_FIRST
            unsigned = {"line": len(self.entries) + 1, "kind": kind, "body": body, "previous": previous}
            digest = _digest(unsigned)
            data = canonical({**unsigned, "hash": digest}).encode("ascii") + b"\n"
            self._broken = True  # until the disk has confirmed
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written", str(self.path))
            _flush_to_disk(self._descriptor)
            self._broken = False
            # The body is read back from its text, so that what is in memory is what a replay will find.
            entry = Entry(len(self.entries) + 1, kind, json.loads(canonical(body)), digest)
            self.entries.append(entry)
            return entry

    def must_contain(self, head: str) -> None:
        """CorruptRun unless the file holds the line of a :attr:`head` seen earlier."""
        lines, _, digest = head.partition(":")
        if not lines.isdigit() or len(digest) != len(_BEFORE_FIRST):
            raise ValueError(f"expected_head must look like 'LINES:HASH', got {head!r}; take it from Journal.head")
        count = int(lines)
        if count > len(self.entries):
            raise CorruptRun(
                f"{self.path} has {len(self.entries)} lines, but line {count} was seen before: the file was rolled "
                "back or truncated; restore it, or treat the budget as spent"
            )
        if count and self.entries[count - 1].hash != digest:
            raise CorruptRun(f"{self.path} line {count} is not the line seen before: the file was rewritten")

    def close(self) -> None:
        """Release the journal's lock; appending afterwards fails."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._writable = False

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Journal cannot be pickled or copied: two writers of one ledger would break its hash chain")

    def _mend(self, tail: bytes, size: int) -> None:
        try:
            entry = _verified(tail, self.entries, self.path)
        except CorruptRun:
            if self._writable:
                os.ftruncate(self._descriptor, size - len(tail))
                self.append("torn", {"bytes": len(tail), "sha256": hashlib.sha256(tail).hexdigest()})
            return
        self.entries.append(entry)
        if self._writable:
            os.write(self._descriptor, b"\n")
            _flush_to_disk(self._descriptor)


def _verified(text: bytes, before: list[Entry], path: Path) -> Entry:
    line = len(before) + 1
    try:
        record = json.loads(text.decode("ascii"))
        digest = record.pop("hash")
        well_formed = set(record) == {"line", "kind", "body", "previous"}
        whole = well_formed and canonical({**record, "hash": digest}).encode("ascii") == text
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptRun(f"{path} line {line} is no line of a ledger ({error}); restore the file") from error
    if not whole or _digest(record) != digest:
        raise CorruptRun(f"{path} line {line} was changed: its hash does not fit its content; restore the file")
    if record["line"] != line or record["previous"] != (before[-1].hash if before else _BEFORE_FIRST):
        raise CorruptRun(
            f"{path} line {line} does not follow the line before it: a line was removed, repeated or moved; "
            "restore the file"
        )
    return Entry(line, record["kind"], record["body"], digest)


def _digest(unsigned: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(unsigned).encode("ascii")).hexdigest()


def _flush_to_disk(descriptor: int) -> None:
    # On macOS fsync reaches the drive's cache only; F_FULLFSYNC reaches the platter.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        fcntl.fcntl(descriptor, full)
    else:
        os.fsync(descriptor)
