"""The hash-chained file: what was appended comes back, what was tampered with is named, a torn tail is mended."""

import copy
import fcntl
import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest

from privacy import durable
from privacy.errors import CorruptRun
from privacy.ledger.journal import Journal, canonical


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def written(path: Path, count: int = 4) -> str:
    journal = Journal.create(path)
    assert journal.path == path
    for number in range(count):
        journal.append("note", {"number": number, "text": "äöü \n ok", "value": 0.1 + number})
    head = journal.head
    journal.close()
    return head


def test_what_was_appended_comes_back(path: Path) -> None:
    head = written(path)
    journal = Journal.open(path, head)
    assert journal.path == path
    assert [entry.body["number"] for entry in journal.entries] == [0, 1, 2, 3]
    assert [entry.line for entry in journal.entries] == [1, 2, 3, 4]
    assert journal.head == head
    journal.append("note", {"number": 4})
    journal.close()
    assert len(Journal.open(path, head, read_only=True).entries) == 5, "a file that has grown contains the old head"


def test_memory_holds_what_a_replay_finds(path: Path) -> None:
    journal = Journal.create(path)
    journal.append("note", {"pair": (1, 2), "value": 1 / 3})
    journal.close()
    assert Journal.open(path, read_only=True).entries == journal.entries


def test_a_journal_is_never_overwritten(path: Path) -> None:
    written(path)
    with pytest.raises(FileExistsError):
        Journal.create(path)


def test_every_line_is_on_the_disk_before_append_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    journal = Journal.create(path)
    assert len(synced) == 1, "the folder, so that the file's name survives"
    journal.append("note", {})
    journal.append("note", {})
    assert len(synced) == 3


@pytest.mark.parametrize("line", [1, 2, 3, 4])
def test_a_flipped_byte_anywhere_in_a_line_is_named(path: Path, line: int) -> None:
    head = written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    for position in range(0, len(lines[line - 1]) - 1, 7):
        damaged = bytearray(lines[line - 1])
        damaged[position] ^= 1
        path.write_bytes(b"".join([*lines[: line - 1], bytes(damaged), *lines[line:]]))
        with pytest.raises(CorruptRun, match=rf"line {line}"):
            Journal.open(path, head, read_only=True)


@pytest.mark.parametrize(
    ("order", "line"), [([1, 2, 3], 1), ([0, 2, 3], 2), ([0, 1, 3], 3), ([0, 2, 1, 3], 2), ([0, 1, 1, 2, 3], 3)]
)
def test_removed_reordered_and_repeated_lines_are_named(path: Path, order: list[int], line: int) -> None:
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(CorruptRun, match=rf"line {line} does not follow"):
        Journal.open(path)


def test_a_rolled_back_file_is_noticed_by_its_head(path: Path) -> None:
    head = written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert len(Journal.open(path, read_only=True).entries) == 3, "without the head it is a valid shorter journal"
    with pytest.raises(CorruptRun, match="3 lines, but line 4"):
        Journal.open(path, head)


def test_a_rewritten_file_is_noticed_by_its_head(tmp_path: Path) -> None:
    head = written(tmp_path / "a", 4)
    journal = Journal.create(tmp_path / "b")
    for number in range(6):
        journal.append("note", {"number": number})
    journal.close()
    with pytest.raises(CorruptRun, match="line 4 is not"):
        Journal.open(tmp_path / "b", head)


@pytest.mark.parametrize("head", ["", "4", "x:0", "-1:" + "0" * 64, "4:abc"])
def test_a_malformed_head_is_refused(path: Path, head: str) -> None:
    written(path)
    with pytest.raises(ValueError, match="expected_head must look like"):
        Journal.open(path, head)


def test_a_torn_tail_is_cut_off_and_recorded(path: Path) -> None:
    """Cut at every byte of the last line: whole lines stay, the torn one never counts half."""
    written(path, 2)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start + 1, len(whole) - 1, 5):
        path.write_bytes(whole[:end])
        assert len(Journal.open(path, read_only=True).entries) == 1, "reading changes nothing"
        assert path.read_bytes() == whole[:end]
        journal = Journal.open(path)
        journal.append("note", {"number": 2})
        journal.close()
        again = Journal.open(path, read_only=True)
        assert [entry.kind for entry in again.entries] == ["note", "torn", "note"]
        assert again.entries[1].body == {
            "bytes": end - start,
            "sha256": hashlib.sha256(whole[start:end]).hexdigest(),
        }


def test_a_whole_line_that_lacks_its_newline_counts(path: Path) -> None:
    written(path, 3)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(Journal.open(path, read_only=True).entries) == 3
    journal = Journal.open(path)
    assert len(journal.entries) == 3
    journal.append("note", {"number": 3})
    journal.close()
    assert [entry.kind for entry in Journal.open(path, read_only=True).entries] == ["note"] * 4


def test_a_tail_of_zero_bytes_is_torn(path: Path) -> None:
    """What a file system may leave after power loss: the length grew, the data did not arrive."""
    written(path, 2)
    with path.open("ab") as file:
        file.write(b"\0" * 300)
    journal = Journal.open(path)
    assert [entry.kind for entry in journal.entries] == ["note", "note", "torn"]


def test_two_writers_exclude_each_other(path: Path) -> None:
    journal = Journal.create(path)
    journal.append("note", {})
    with pytest.raises(BlockingIOError, match="another process"):
        Journal.open(path)
    assert len(Journal.open(path, read_only=True).entries) == 1
    journal.close()
    Journal.open(path).close()


def test_a_forked_child_may_not_write(path: Path) -> None:
    journal = Journal.create(path)
    child = os.fork()
    if child == 0:
        try:
            journal.append("note", {})
        except RuntimeError as error:
            os._exit(0 if "belongs to process" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    journal.append("note", {})


def test_a_journal_cannot_be_copied(path: Path) -> None:
    journal = Journal.create(path)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            attempt(journal)


def test_a_journal_is_no_program(path: Path) -> None:
    written(path)
    assert path.stat().st_mode & 0o133 == 0, "nobody executes it, and only its owner writes"


def test_a_reader_can_neither_write_nor_append(path: Path) -> None:
    written(path)
    for read_only, expected in ((True, os.O_RDONLY), (False, os.O_RDWR | os.O_APPEND)):
        journal = Journal.open(path, read_only=read_only)
        flags = fcntl.fcntl(journal._descriptor, fcntl.F_GETFL)
        assert flags & (os.O_ACCMODE | os.O_APPEND) == expected
        journal.close()


def test_a_journal_that_cannot_be_started_says_why_and_leaves_no_file_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError("the folder is gone")

    monkeypatch.setattr(durable, "sync", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="the folder is gone"):
        Journal.create(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_reading_and_closed_journals_do_not_append(path: Path) -> None:
    written(path)
    with pytest.raises(RuntimeError, match="open for reading only"):
        Journal.open(path, read_only=True).append("note", {})
    journal = Journal.open(path)
    journal.close()
    with pytest.raises(RuntimeError, match="reading only"):
        journal.append("note", {})


def test_after_a_failed_write_nothing_more_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.create(path)
    journal.append("note", {"number": 0})

    def fail(descriptor: int) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            journal.append("note", {"number": 1})
    with pytest.raises(RuntimeError, match="what the disk holds is unknown"):
        journal.append("note", {"number": 2})
    assert len(journal.entries) == 1
    journal.close()
    assert [e.body["number"] for e in Journal.open(path, read_only=True).entries] == [0, 1], "it counts as written"


def test_a_short_write_fails_and_leaves_a_torn_tail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.create(path)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:20]))
        with pytest.raises(OSError, match="20 of"):
            journal.append("note", {})
    journal.close()
    assert [entry.kind for entry in Journal.open(path).entries] == ["torn"]


def test_what_is_no_json_is_refused_before_anything_is_written(path: Path) -> None:
    journal = Journal.create(path)
    for value in (float("nan"), float("inf"), object()):
        with pytest.raises((ValueError, TypeError)):
            journal.append("note", {"value": value})
    journal.append("note", {"value": 1})
    assert len(journal.entries) == 1


def test_canonical_text_is_one_per_value() -> None:
    assert canonical({"b": 1, "a": [0.1, "ä"]}) == '{"a":[0.1,"\\u00e4"],"b":1}'
    assert json.loads(canonical({"x": 0.1})) == {"x": 0.1}
