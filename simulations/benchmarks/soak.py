"""`python -m simulations.benchmarks.soak [--rounds N] [--no-ray]`: a long run under random faults, and its remains.

In process: a tiny model, six nodes. Nodes raise, answer with malformed replies (``bad_replies.py``) or fail to
evaluate, at random; the process that holds server and workers is killed with ``kill -9`` at chosen steps of a round
(before and behind the charge, the checkpoint, the evaluation) and at random moments; each time the run goes on from its
folder, as ``lacquer resume`` does it. The last part is unbroken, so that memory can be followed. On Ray: actors are
killed, one and all, then the process of the server, then every process of the run.

At the end the ledger must be sound and state at least the epsilon that the accountant finds for every charge in it,
every recorded round must have its charge, no line may be missing or doubled, and the adapter must load. The script
fails if not; what it counted is written to ``results/soak.json``.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from server.environment import describe_environment
from server.telemetry import read_metrics, read_status
from simulations.benchmarks.soak_checks import account, memory
from simulations.benchmarks.soak_life import PLACES

RESULT = Path(__file__).parent / "results" / "soak.json"
MARK = "LACQUER_SOAK"
SETTINGS = """
name = "soak"
rounds = {rounds}
clients = 60
sampling-rate = 0.2
seed = 7
privacy.delta = 1e-3
model.name = "random:bert"
model.rank = 2
model.max-length = 16
data.validation-records = 40
data.test-records = 40
data.records-per-client = 3
data.cache = "{cache}"
engine.workers = {workers}
engine.kind = "{engine}"
output = "{output}"
"""


@dataclass
class Faults:
    """What was done to a run, and what became of it."""

    kills: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    ended_by_itself: int = 0


def soak_inprocess(root: Path, rounds: int, kills: int, seed: int = 0) -> dict[str, Any]:
    """A run of ``rounds`` rounds that is killed ``kills`` times."""
    folder, rng, faults = root / "run", random.Random(seed), Faults()
    folder.mkdir(parents=True)
    text = SETTINGS.format(rounds=rounds, workers=6, engine="inprocess", cache=root / "cache", output=root)
    (folder / "config.toml").write_text(text)
    started = time.monotonic()
    places = [*PLACES, "random moment"]
    while (status := read_status(folder)) is None or status.state not in ("completed", "stopped-budget"):
        number = faults.lives
        place = places[number % len(places)] if number < kills else ""
        # The killed lives share a quarter of the rounds.
        length = rng.randint(1, max(1, rounds // (2 * kills))) if place else 0
        call = length * (6 if place in ("client training", "evaluation") else 1)
        before = len(read_metrics(folder))
        arguments = [
            sys.executable,
            "-m",
            "simulations.benchmarks.soak_life",
            str(folder),
            str(number),
            place,
            str(call),
        ]
        with (folder / "inprocess.log").open("ab") as log:
            child = subprocess.Popen(arguments, env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            if place == "random moment":
                while child.poll() is None and len(read_metrics(folder)) < before + length:
                    time.sleep(0.1)
                time.sleep(rng.uniform(0.0, 0.3))
                child.kill()
            code = child.wait()
        faults.lives += 1
        if code == -signal.SIGKILL:
            faults.kills[place] += 1
        elif code != 0:
            faults.ended_by_itself += 1
        if faults.lives > 5 * (kills + 4):
            raise AssertionError(f"the run does not come to its end: {status}; see {folder / 'inprocess.log'}")
    seconds = time.monotonic() - started
    counted = Counter((folder / "faults.txt").read_text().splitlines())
    return {
        "engine": "in process",
        "rounds_planned": rounds,
        "seconds": seconds,
        "processes": faults.lives,
        "kills": dict(faults.kills),
        "ended_by_a_fault": faults.ended_by_itself,
        "faults": dict(counted),
        **account(folder),
        **memory(folder),
    }


def _environment(**more: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def soak_ray(root: Path, rounds: int) -> dict[str, Any]:
    """A run on two actors: one is killed, both are, then the server's process; then all processes of the run."""
    root.mkdir(parents=True)
    text = SETTINGS.format(rounds=rounds, workers=2, engine="flower", cache=root / "cache", output=root / "runs")
    (root / "soak.toml").write_text(text)
    started = time.monotonic()
    third = rounds // 3
    run = _Run(root, "run", str(root / "soak.toml"))
    run.wait_for(2)
    actors = run.actors()
    actors[0].kill()
    run.wait_for(4)
    for actor in run.actors():
        actor.kill()
    run.wait_for(third)
    run.server().kill()
    assert run.process.wait() == 1
    log = run.folder / "flower.log"
    replaced = log.read_text(errors="replace").count("another is started in its place")
    run = _Run(root, "resume", str(run.folder))
    run.wait_for(2 * third)
    members = run.members()
    private = {Path(part) for process in members for part in _command(process).split() if part.startswith("/tmp/lq-")}
    for process in members:
        process.kill()
    run.process.wait()
    for folder in private:  # nobody was left to remove them
        if len(folder.parts) == 3:
            shutil.rmtree(folder, ignore_errors=True)
    run = _Run(root, "resume", str(run.folder))
    assert run.process.wait() == 0, "the run did not come to its end"
    return {
        "engine": "flower on Ray",
        "rounds_planned": rounds,
        "seconds": time.monotonic() - started,
        "kills": {"one actor": 1, "all actors": 1, "server process": 1, "every process": 1},
        "actors_replaced": replaced,
        **account(run.folder),
    }


class _Run:
    """A ``lacquer`` command, and all its descendants, found by a mark in their environment."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self._root, self._mark = root, os.urandom(8).hex()
        with (root / "lacquer.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "simulations", *arguments, "--quiet"], env=_environment(**{MARK: self._mark}),
                cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def folder(self) -> Path:
        (folder,) = (self._root / "runs").iterdir()
        return folder

    def wait_for(self, round: int) -> None:
        """Until ``round`` is recorded."""
        while not (self._root / "runs").is_dir() or not any(
            record.round >= round for record in read_metrics(self.folder)
        ):
            assert self.process.poll() is None, (self._root / "lacquer.log").read_text()
            time.sleep(0.2)

    def members(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def actors(self) -> list[psutil.Process]:
        """Ray renames its workers by what they do."""
        return [process for process in self.members() if "ray::ClientAppActor" in _command(process)]

    def server(self) -> psutil.Process:
        (server,) = [process for process in self.members() if "flwr-simulation" in _command(process)]
        return server


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def main(
    rounds: Annotated[int, typer.Option(help="planned in process")] = 330,
    kills: Annotated[int, typer.Option(help="in process")] = 9,
    ray: Annotated[bool, typer.Option(help="also the part on Ray; else its last result is kept")] = True,
) -> None:
    """Soak, and write the result."""
    machine = describe_environment()
    told = {"machine": f"{machine['system']}, {machine['cores']} cores", "commit": machine["commit"]}
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        legs = [soak_inprocess(Path(root) / "inprocess", rounds, kills) | told]
        if ray:
            legs.append(soak_ray(Path(root) / "ray", 15) | told)
        elif RESULT.is_file():
            legs += [leg for leg in json.loads(RESULT.read_text())["legs"] if leg["engine"] != legs[0]["engine"]]
    result = {"legs": legs}
    text = json.dumps(result, indent=1)
    RESULT.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    typer.run(main)
