"""The SuperLink's database: compacted before the SuperLink starts, copied while it runs, never lost."""

import io
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from server.network.superlink_state import compact, copy


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A database through which four megabytes have gone, and one row that must stay."""
    path = tmp_path / "superlink.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE node (number INTEGER, key BLOB)")
        connection.execute("INSERT INTO node VALUES (7, zeroblob(4000000))")
        connection.execute("UPDATE node SET key = 'k'")
    assert path.stat().st_size > 4_000_000
    return path


def rows(path: Path) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return connection.execute("SELECT * FROM node").fetchall()


def test_what_was_deleted_is_given_back_to_the_disk(used: Path) -> None:
    compact(used)
    assert sum(file.stat().st_size for file in used.parent.iterdir()) < 100_000
    assert rows(used) == [(7, "k")]


def test_a_copy_is_made_beside_a_writer_and_leaves_nothing(used: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(used, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO node VALUES (8, 'not yet')")
        stream = io.BytesIO()
        copy(used, stream)
        writer.execute("COMMIT")
    made = tmp_path / "elsewhere.db"
    made.write_bytes(stream.getvalue())
    assert len(stream.getvalue()) < 100_000
    assert rows(made) == [(7, "k")]
    assert {file.name for file in tmp_path.iterdir() if file.is_dir()} == set()


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.network.superlink_state", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_superlink_starts_whatever_its_database_is(used: Path, tmp_path: Path) -> None:
    command = ("start", sys.executable, "-c", "print('started')")
    assert program(*command, f"--database={used}").stdout == "started\n"
    assert used.stat().st_size < 100_000
    with closing(sqlite3.connect(used, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        done = program(*command, f"--database={used}")
        assert (done.stdout, "stays as large as it is: database is locked" in done.stderr) == ("started\n", True)
    none = tmp_path / "no.db"
    none.write_text("no database " * 99)
    assert program(*command, f"--database={none}").stdout == "started\n"
    assert none.read_text() == "no database " * 99
    assert program(*command, f"--database={tmp_path}/new.db").stdout == "started\n"


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    done = program("copy", str(tmp_path / "superlink.db"))
    assert (done.returncode, done.stderr.strip().endswith("there is no such file")) == (1, True)
