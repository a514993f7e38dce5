"""Places that cannot be written: one line, exit code 2, no traceback; with ``--debug`` the traceback before it."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simulations.cli.app import app
from simulations.engines import host

SETTINGS = ["--set", "model.name=random:bert", "--set", "clients=100"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In whose place no folder can be made, by root neither."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    return tmp_path / "file"


def test_no_place_for_prepared_data_is_refused_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file / "cache"))
    done = CliRunner().invoke(app, ["run", "quickstart", *SETTINGS, "--dry-run"])
    said = done.stderr.splitlines()[-1]
    assert (done.exit_code, "Traceback" in done.output) == (2, False)
    assert said.startswith(f"{file}/cache/lacquer: not a directory; ")
    assert "set XDG_CACHE_HOME" in said


@pytest.mark.parametrize("place", [["--debug", "run"], ["run", "--debug"]])
def test_the_traceback_is_shown_to_whoever_asks(place: list[str], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file / "cache"))
    done = CliRunner().invoke(app, [*place, "quickstart", *SETTINGS])
    assert (done.exit_code, done.stderr.count("Traceback")) == (2, 1)
    assert done.stderr.splitlines()[-1].startswith(f"{file}/cache/lacquer: ")


def test_a_command_that_catches_nothing_says_a_line_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: Exception) -> Any:
        def inspect() -> None:
            raise error

        monkeypatch.setattr(host, "inspect_host", inspect)
        return CliRunner().invoke(app, ["doctor"])

    done = raises(OSError(errno.EROFS, os.strerror(errno.EROFS), str(file)))
    assert done.exit_code == 2
    assert done.stderr == f"{file}: read-only file system; give yourself the right to it, or name another place\n"
    done = raises(KeyError("x"))
    assert (done.exit_code, "Traceback" in done.output) == (1, False)
    assert "KeyError: 'x'" in done.stderr
    assert "--debug" in done.stderr


def test_doctor_sees_that_nothing_can_be_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert done.exit_code == 1
    assert f"Problem: {file}/lacquer cannot be written: not a directory; make it writable" in done.stdout
