"""Starts the real `lacquer` command as a person would, and knows every process that comes of it."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

LACQUER = Path(sys.executable).with_name("lacquer")
PATIENCE = 600.0

TINY = """
name = "tiny"
rounds = 2
clients = 60
sampling-rate = 0.2
output = "runs"
[privacy]
delta = 1e-3
[model]
name = "random:bert"
rank = 2
max-length = 32
[data]
validation-records = 40
test-records = 40
records-per-client = 4
cache = "cache"
[engine]
workers = 2
"""


class Lacquer:
    """One `lacquer` command in ``folder``, and all its descendants, found by a mark in their environment."""

    def __init__(self, folder: Path, *arguments: str, command: str = "run", under: Sequence[str] = ()) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._seen: set[psutil.Process] = set()
        environment = {**os.environ, "LACQUER_TEST_MARK": self._mark, "NO_COLOR": "1"}
        environment.pop("PYTHONPATH", None)
        self._out, self._err = (folder / "stdout.txt").open("wb"), (folder / "stderr.txt").open("wb")
        self.process = subprocess.Popen(
            [*under, LACQUER, command, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def living(self) -> list[psutil.Process]:
        found = set(self._seen)
        for process in psutil.process_iter():
            try:
                if process.environ().get("LACQUER_TEST_MARK") == self._mark:
                    found |= {process, *process.children(recursive=True)}
            except (psutil.Error, OSError):
                continue
        self._seen = {process for process in found if _lives(process)}
        return sorted(self._seen, key=lambda process: process.pid)

    def wait_for_round(self, number: int) -> None:
        """Return when the run has released round ``number`` (0: its histogram); remembers its processes meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while not any(line["round"] >= number for line in self.metrics()):
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, "no round came"
            self.living()
            time.sleep(0.5)

    def actors(self) -> list[psutil.Process]:
        """Living workers; Ray renames them by what they do."""
        return [process for process in self.living() if "ray::ClientAppActor" in " ".join(_command_line(process))]

    def server(self) -> psutil.Process:
        """The process of the ServerApp."""
        (server,) = [process for process in self.living() if "simulations.engines.driver" in _command_line(process)]
        return server

    def finish(self) -> int:
        while self.process.poll() is None:
            self.living()
            time.sleep(0.5)
        self._out.close()
        self._err.close()
        return self.process.returncode

    def end(self) -> None:
        """What a failed test left behind."""
        for process in self.living():
            process.kill()

    @property
    def run_folder(self) -> Path:
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def metrics(self) -> list[dict]:
        """Of what was released."""
        files = list(self.folder.glob("runs/*/metrics.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if "\n" in line]
        return [record for record in map(json.loads, lines) if record["phase"] != "start"]

    def stdout(self) -> str:
        return (self.folder / "stdout.txt").read_text()

    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    def private_folders(self) -> set[str]:
        """The private folders of living runs of ours."""
        return {part for process in self.living() for part in _command_line(process) if part.startswith("/tmp/lq-")}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
