"""Files that are written whole or not at all: a crash at any moment leaves the old content or the new.

A draft is written in the same folder (a rename is atomic within one file system only), brought to the disk, renamed
over the file, and then the folder is brought to the disk, so that the new name too outlives a loss of power.
"""

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = "no space is left on its disk"
"""In every text of :func:`full_disk`."""
ROOM = 2**20
"""Bytes that a disk must have free before a ledger on it is charged: for the ledger and what else is small."""
NAMES_KEY = ".names.key"
"""In a folder whose entries are named by :func:`private_name`."""


def write(path: Path, content: str | bytes, *, mode: int | None = None, new: bool = False) -> None:
    """Write a file, text as UTF-8.

    Args:
        path: what is replaced; its folder exists.
        mode: exact permissions, held by the draft too: 0o600 for a secret. None gives what ``open`` would give.
        new: refuse to replace a file.

    Raises:
        FileExistsError: ``new``, and there is one.
        OSError: the disk is full or refuses; ``path`` is as it was.
    """
    with open_replacement(path, mode=mode, new=new) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_replacement(path: Path, *, mode: int | None = None, new: bool = False) -> Iterator[Path]:
    """An empty file to be written under its own name; it takes the place of ``path`` where the block ends.

    Arguments and errors are those of :func:`write`. A block that raises changes nothing.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600))
    try:
        yield draft
        if mode is not None:
            draft.chmod(mode)
        sync(draft)
        if new:
            os.link(draft, path)
            draft.unlink()
        else:
            os.replace(draft, path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            # Python names no file where a write fails.
            error.filename = str(path)
        raise
    sync(path.parent)


def full_disk(error: BaseException, folder: Path) -> str:
    """Explain to a person an error that a full disk, or a used-up quota, caused. Empty for any other error.

    Args:
        folder: named where the error does not name its file.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT)
    words = [os.strerror(number) for number in numbers]
    cause: BaseException | None = error
    while cause is not None:
        # Libraries in other languages raise errors without a number.
        if getattr(cause, "errno", None) in numbers or any(text in str(cause) for text in words):
            said = getattr(cause, "strerror", None)
            detail = "" if said in (None, *words) else f" ({said})"
            path = getattr(cause, "filename", None) or folder
            return f"{path} could not be written: {FULL}{detail}; make room there"
        cause = cause.__cause__ or cause.__context__
    return ""


def check_room(folder: Path, size: int = 0) -> None:
    """Refuse to go on where a disk is as good as full: what is charged and cannot be kept is lost.

    Args:
        size: bytes that will be written to it beside :data:`ROOM`.

    Raises:
        OSError: it is.
    """
    free, least = shutil.disk_usage(folder).free, ROOM + size
    if free < least:
        text = f"{free / 2**20:.1f} MiB are free, {least / 2**20:.1f} MiB must be"
        raise OSError(errno.ENOSPC, text, str(folder))


def check_writable(folder: Path) -> None:
    """Refuse a folder, made or not, that no file can be written into; nothing is left there.

    Raises:
        OSError: its file name is that of ``folder``.
    """
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        error.filename = str(folder)
        raise


def new_folder(folder: Path) -> None:
    """Make a folder with its parents, for its owner only, and bring the names of those that were not there to the disk.

    A file's own name is durable within its folder only: with the folder's name lost, so is the file.
    """
    if folder.is_dir():
        return
    new_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    sync(folder.parent)


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder whole unless it is there; of two processes that make the same one, the first wins.

    ``fill`` makes and fills the folder that it is given, which is then renamed into place. The folder around it, where
    it is made here, is for its owner only.
    """
    if folder.is_dir():
        return
    new_folder(folder.parent)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True) as made:
        fill(Path(made) / "draft")
        try:
            os.rename(Path(made) / "draft", folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise


def close_to_others(path: Path) -> None:
    """Leave a file or folder of private records to its owner alone, where an older version or a copy made it open.

    Raises:
        PermissionError: it is open, and another user's.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return
    try:
        path.chmod(mode & 0o700)
    except PermissionError as error:
        error.strerror = (
            f"it holds private records, others may open it (mode {mode:o}, at most 700), and it is another user's; "
            "remove it, or name another folder (data.cache, or cache of a node's settings)"
        )
        raise


def private_name(folder: Path, digest: str) -> str:
    """Name what is kept in a folder of private records by their digest, and tell nobody who lists it the digest.

    Whoever guesses the records could compute a plain digest and see by a name whether the guess is right. So it is
    taken under a key, which lies in the folder, is made with the first name, and is for its owner only.
    """
    path = folder / NAMES_KEY
    if not path.is_file():
        new_folder(folder)
        with contextlib.suppress(FileExistsError):  # another process was faster
            write(path, secrets.token_bytes(32), mode=0o600, new=True)
    close_to_others(path)
    return hmac.new(path.read_bytes(), digest.encode(), hashlib.sha256).hexdigest()[:24]


def keep_names(folder: Path, other: Path) -> None:
    """Make what is kept in ``other`` have the names that :func:`private_name` gives it in ``folder``."""
    new_folder(other)
    write(other / NAMES_KEY, (folder / NAMES_KEY).read_bytes(), mode=0o600, new=True)


def sync(path: Path) -> None:
    """Bring the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, refusal: str) -> None:
    """Hold an open file for this process until it is closed; BlockingIOError, with ``refusal``, if another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, refusal) from error
