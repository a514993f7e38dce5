"""The SuperLink's SQLite database: made small before the SuperLink starts, and copied while it runs.

    python -m server.network.superlink_state start flower-superlink ... --database=/state/superlink.db
    python -m server.network.superlink_state copy /state/superlink.db > state.db

What nodes send passes through this database. SQLite keeps a file as large as it ever was, and its write-ahead log too.
"""

import os
import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import IO, NoReturn

OPTION = "--database="


def compact(database: Path) -> None:
    """Give the space of deleted rows back to the disk. No other process may have the database open.

    Raises:
        sqlite3.Error: it is in use, is none, or the disk has no room for a second copy; it is as it was then.
    """
    os.environ["SQLITE_TMPDIR"] = str(database.parent)  # /tmp may be smaller than the database
    with closing(sqlite3.connect(database, timeout=1.0, isolation_level=None)) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def copy(database: Path, stream: IO[bytes]) -> None:
    """Write a whole, consistent and small copy to ``stream``; the SuperLink may go on writing meanwhile.

    Raises:
        sqlite3.Error: it is no database, or the disk has no room for the copy, which lies beside it meanwhile.
    """
    if not database.is_file():
        raise sqlite3.OperationalError(f"{database}: there is no such file")
    with tempfile.TemporaryDirectory(dir=database.parent) as folder:
        made = Path(folder) / "copy.db"
        with closing(sqlite3.connect(database, timeout=60.0, isolation_level=None)) as connection:
            connection.execute("VACUUM INTO ?", (str(made),))
        with made.open("rb") as file:
            shutil.copyfileobj(file, stream)


def start(command: list[str]) -> NoReturn:
    """Make the database of a SuperLink's command small, then become that command.

    A database that cannot be made small stays as it is.
    """
    for argument in command:
        database = Path(argument.removeprefix(OPTION))
        if argument.startswith(OPTION) and database.is_file():
            before = database.stat().st_size
            try:
                compact(database)
            except sqlite3.Error as error:
                _say(f"{database} stays as large as it is: {error}")
            else:
                _say(f"{database}: {before:,} bytes, now {database.stat().st_size:,}")
    os.execvp(command[0], command)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> None:
    """Run the command ``start`` or ``copy`` that the arguments name."""
    if arguments[:1] == ["start"] and len(arguments) > 1:
        start(arguments[1:])
    if arguments[:1] != ["copy"] or len(arguments) != 2:
        raise SystemExit(__doc__)
    try:
        copy(Path(arguments[1]), sys.stdout.buffer)
    except sqlite3.Error as error:
        raise SystemExit(f"no copy was made: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
