"""A disk of a given size, for tests that fill it. Not a test."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system of a given size")

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of so many kilobytes; called again, it has another size."""
    place = tmp_path / "disk"
    place.mkdir()

    def sized(kilobytes: int) -> Path:
        options = f"size={kilobytes}k" + (",remount" if place.is_mount() else "")
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
        return place

    yield sized
    if place.is_mount():
        subprocess.run(["umount", place], check=True)


def fill(place: Path) -> None:
    """Until not one byte is left."""
    size = 0
    with (place / "filler").open("wb") as file:
        while room := shutil.disk_usage(place).free:
            os.posix_fallocate(file.fileno(), size, room)
            size += room
