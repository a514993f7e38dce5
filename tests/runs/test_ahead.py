"""What imports ahead does what it is told, once, and nothing else."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from simulations.engines.ahead import Ahead, importing
from simulations.engines.processes import alive

PATIENCE = 120.0  # for what takes a second, on a machine whose cores are busy
TOLD = """
import json, os, sys, time
from pathlib import Path
Path(os.environ["IMPORTED"]).touch()
def main():
    print(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))
    print("a line of an error", file=sys.stderr)
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is there once the module ``told`` is imported."""
    (tmp_path / "told.py").write_text(TOLD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("IMPORTED", str(tmp_path / "imported"))
    monkeypatch.setenv("FLWR_HOME", "somewhere/shared")
    return tmp_path / "imported"


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_imports_at_once_and_runs_with_what_it_is_told(imported: Path, tmp_path: Path) -> None:
    ahead = Ahead("told:main")
    wait_for(imported)
    (tmp_path / "cwd").mkdir()
    said, errors, environment = tmp_path / "said", tmp_path / "errors", {"ONLY": "this"}
    process = ahead.call(
        ["name", "--option"], folder=tmp_path / "cwd", environment=environment, output=said, errors=errors
    )
    assert process.wait(PATIENCE) == 0
    assert json.loads(said.read_text()) == [["name", "--option"], environment, str(tmp_path / "cwd")]
    assert errors.read_text() == "a line of an error\n"
    ahead.close()
    assert process.returncode == 0


def test_closed_before_it_was_told_anything_it_ends(imported: Path) -> None:
    before = set(psutil.Process().children())
    ahead = Ahead("told:main")
    (process,) = set(psutil.Process().children()) - before
    ahead.close()
    assert not alive(process)


def test_what_cannot_be_imported_is_said_where_the_command_writes(tmp_path: Path) -> None:
    process = Ahead("nowhere_at_all:main").call([""], folder=tmp_path, environment={}, output=tmp_path / "said")
    assert process.wait(PATIENCE) != 0
    assert "No module named 'nowhere_at_all'" in (tmp_path / "said").read_text()


def test_it_ends_with_whoever_started_it(imported: Path) -> None:
    code = "import time; from simulations.engines.ahead import Ahead; a = Ahead('told:main'); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", code])
    wait_for(imported)
    (waiting,) = psutil.Process(starter.pid).children()
    starter.kill()
    starter.wait(PATIENCE)
    psutil.wait_procs([waiting], timeout=PATIENCE)
    assert not alive(waiting)


def test_garbage_is_collected_again_behind_an_import() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
