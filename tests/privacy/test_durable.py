"""A file is the old one or the new one, whatever happens; what was written is on the disk, and secrets are closed."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from privacy import durable

OLD, NEW = "old\n", "new, and longer than the old\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "state.json"
    target.write_text(OLD)
    return target


def killed_in(step: str, work: Callable[[], None]) -> None:
    """Run ``work`` in a child process that ends at its first call of ``os.<step>``, without any cleaning up."""
    child = os.fork()
    if child == 0:
        setattr(os, step, lambda *_: os._exit(9))
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, f"nothing called os.{step}"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_process_killed_before_the_rename_leaves_the_old_file(path: Path, step: str) -> None:
    killed_in(step, lambda: durable.write(path, NEW))
    assert path.read_text() == OLD
    durable.write(path, NEW)  # what the dead process left behind is in nobody's way
    assert path.read_text() == NEW


def test_a_block_that_raises_leaves_the_old_file_and_nothing_beside_it(path: Path) -> None:
    with pytest.raises(TypeError), durable.open_replacement(path) as draft:
        draft.write_text(b"")  # type: ignore[arg-type]
    assert path.read_text() == OLD
    assert os.listdir(path.parent) == [path.name]


def test_content_then_name_then_folder_reach_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        where = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append(("synced", "folder" if where.is_dir() else where.read_text()))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        steps.append(("renamed", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    durable.write(path, NEW)
    assert steps == [("synced", NEW), ("renamed", path.name), ("synced", "folder")]


@pytest.mark.parametrize("content", ["über\n", b"\x00\xff"])
def test_text_and_bytes(path: Path, content: str | bytes) -> None:
    durable.write(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize(
    ("mode", "umask", "expected"), [(0o600, 0, 0o600), (0o644, 0o077, 0o644), (None, 0o027, 0o640)]
)
def test_permissions(path: Path, mode: int | None, umask: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        with durable.open_replacement(path, mode=mode) as draft:
            assert not stat.S_IMODE(draft.stat().st_mode) & ~expected, "nor may the draft be more open than the file"
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_new_file_replaces_none(path: Path) -> None:
    with pytest.raises(FileExistsError):
        durable.write(path, NEW, new=True)
    assert path.read_text() == OLD
    durable.write(path.with_name("other"), NEW, new=True)
    assert sorted(os.listdir(path.parent)) == ["other", path.name]


def test_a_lock_keeps_others_out_until_the_file_is_closed(path: Path) -> None:
    with path.open() as mine, path.open() as other:
        durable.lock(mine.fileno(), "state.json is taken")
        with pytest.raises(BlockingIOError, match=r"state\.json is taken"):
            durable.lock(other.fileno(), "state.json is taken")
    with path.open() as next_one:
        durable.lock(next_one.fileno(), "state.json is taken")


def test_a_folder_is_made_whole_once_and_not_again(tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "made"

    def fill(draft: Path) -> None:
        draft.mkdir()
        (draft / "file").write_text(NEW)

    durable.make_folder(folder, fill)
    assert (folder / "file").read_text() == NEW
    durable.make_folder(folder, lambda draft: pytest.fail("it is there"))
    assert [path.name for path in folder.parent.iterdir()] == ["made"], "no draft is left behind"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700, "names may be digests of records"


def test_a_new_folder_and_its_parents_are_their_owners(tmp_path: Path) -> None:
    durable.new_folder(tmp_path / "outer" / "made")
    for folder in (tmp_path / "outer", tmp_path / "outer" / "made"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_of_two_that_make_a_folder_the_first_wins(tmp_path: Path) -> None:
    folder = tmp_path / "made"

    def late(draft: Path) -> None:
        for place, text in ((folder, OLD), (draft, NEW)):
            place.mkdir()
            (place / "file").write_text(text)

    durable.make_folder(folder, late)
    assert (folder / "file").read_text() == OLD
    with pytest.raises(OSError, match="draft"):
        durable.make_folder(tmp_path / "other", lambda draft: None)


def test_names_of_private_records_are_keyed(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "cache", tmp_path / "other"
    name = durable.private_name(one, "digest")
    assert durable.private_name(one, "digest") == name != durable.private_name(one, "another")
    assert durable.private_name(other, "digest") != name
    assert [stat.S_IMODE(path.stat().st_mode) for path in (one.parent, one, other)] == [0o700] * 3
    assert stat.S_IMODE((one / durable.NAMES_KEY).stat().st_mode) == 0o600
    durable.keep_names(one, tmp_path / "third")
    assert durable.private_name(tmp_path / "third", "digest") == name


def test_what_was_left_open_is_closed_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = durable.private_name(tmp_path, "digest")
    (tmp_path / durable.NAMES_KEY).chmod(0o644)
    assert durable.private_name(tmp_path, "digest") == name
    assert stat.S_IMODE((tmp_path / durable.NAMES_KEY).stat().st_mode) == 0o600
    tmp_path.chmod(0o2755)

    def of_another(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", of_another)
        with pytest.raises(PermissionError, match=r"mode 2755, at most 700\), and it is another user's; remove it"):
            durable.close_to_others(tmp_path)
    durable.close_to_others(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
