"""A long run under random faults, and what must hold of its run folder afterwards.

Run: `python -m simulations.benchmarks faults.soak [--rounds N] [--no-ray]`.

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
import statistics
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

from privacy.accountants import composition
from privacy.ledger.ledger import Ledger
from server.config.load import load
from server.run_folder.names import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    FLOWER_LOG,
    LEDGER_FILE,
    METRICS_FILE,
    PRIVACY_FILE,
    PROCESS_LOG,
)
from server.run_folder.resume import read_resumed
from server.run_folder.telemetry import read_metrics, read_status
from simulations.benchmarks.harness.results import RESULTS, ROOT, origin, say, write


def memory(folder: Path) -> dict[str, Any]:
    """Resident memory by round of the longest life, in MB, and how it grew once it had warmed up (its second half)."""
    lines = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    longest = Counter(line["life"] for line in lines).most_common(1)[0][0]
    rss = [line["rss"] / 2**20 for line in lines if line["life"] == longest]
    late = rss[len(rss) // 2 :]
    growth = statistics.linear_regression(range(len(late)), late).slope if len(late) > 1 else 0.0
    return {
        "rss_rounds": len(rss),
        "rss_first_mb": round(rss[0], 1),
        "rss_middle_mb": round(late[0], 1),
        "rss_last_mb": round(rss[-1], 1),
        "rss_growth_mb_per_100_rounds": round(100 * growth, 2),
        "rss_by_round_mb": [round(value, 1) for value in rss[:: max(1, len(rss) // 40)]],
    }


def account(folder: Path) -> dict[str, Any]:
    """Hold the folder's files against each other; AssertionError if they do not agree."""
    import torch
    from peft import PeftModel

    from client.models.base import load_base

    everything = read_metrics(folder)
    lines = (folder / METRICS_FILE).read_text().splitlines()
    assert len(lines) == len(everything), "a line of metrics.jsonl is doubled"
    metrics = [record for record in everything if record.phase != "start"]  # which is no release
    first = metrics[0].round  # 0 with an initial release
    assert first in (0, 1), "the first round is missing from metrics.jsonl"
    found = [record.round for record in metrics]
    assert found == list(range(first, first + len(metrics))), "a round is missing from metrics.jsonl"
    statement = json.loads((folder / PRIVACY_FILE).read_text())
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        charges, stated, guaranteed = ledger.charges, ledger.epsilon_spent(), ledger.epsilon_guaranteed()
        delta = ledger.commitment.delta
    released = {(charge.event.label, charge.event.round) for charge in charges if charge.released_at is not None}
    missing = [record.round for record in metrics if (record.phase, record.round) not in released]
    assert missing == [], "a round was released that the ledger does not know"
    recomputed = composition.epsilon([charge.event for charge in charges], delta, "pld")
    of_the_recorded = composition.epsilon(_once([charge.event for charge in charges]), delta, "pld")
    assert recomputed <= stated * (1 + 1e-6), "the ledger states less than its charges cost"
    assert stated <= guaranteed <= statement["epsilon"] + 1e-9, "more was spent than was promised"
    model, _ = load_base(load(folder / CONFIG_FILE).model.name, "classification", 2)
    adapted = PeftModel.from_pretrained(model, folder / ADAPTER_FOLDER)
    weights = [value for name, value in adapted.state_dict().items() if "lora_B" in name]
    assert weights, "the adapter holds nothing"
    assert all(bool(torch.isfinite(value).all()) for value in weights)
    status = read_status(folder)
    return {
        "state": status.state if status else "unknown",
        "rounds_released": metrics[-1].round,
        "charges": len(charges),
        "charged_and_lost": len(charges) - len(metrics),
        "lost_rounds_in_the_ledger": len(missing),
        "resumes": len(read_resumed(folder)),
        "epsilon_stated": stated,
        "epsilon_of_all_charges": recomputed,
        "epsilon_of_the_rounds_kept": of_the_recorded,
        "epsilon_guaranteed": guaranteed,
        "adapter_loads": True,
    }


def _once(events: list[Any]) -> list[Any]:
    """One event of every round: what a ledger would count that forgets the releases that were lost."""
    return list({(event.label, event.round): event for event in events}.values())


PLACES = {
    "client training": ("client.worker:Worker.contribution", False),
    "before the charge": ("privacy.ledger.ledger:Ledger.charge", False),
    "between charge and noise": ("privacy.ledger.ledger:Ledger.charge", True),
    "between release and checkpoint": ("server.runs.loop:save_checkpoint", False),
    "after the checkpoint": ("server.runs.loop:save_checkpoint", True),
    "evaluation": ("client.worker:Worker.metrics", False),
    "before the record": ("server.run_folder.telemetry:Telemetry.round", False),
    "after the record": ("server.run_folder.telemetry:Telemetry.round", True),
}
"""Where the process kills itself: a function, and whether after it."""
NODE_FAILS, REPLY_IS_BAD, EVALUATION_FAILS = 0.06, 0.04, 0.0002


def live(run_folder: str, life: str, place: str, call: str) -> None:
    """One life of the run, in a process of its own: server and nodes that fail.

    Runs or goes on until the end, or until ``place`` was reached ``call`` times, where the process kills itself.
    """
    from server.run_folder.telemetry import Telemetry
    from simulations.engines.inprocess import run_inprocess

    folder = Path(run_folder)
    if place in PLACES:
        _die_at(*PLACES[place], int(call))
    record = Telemetry.round

    def measured(telemetry: Any, entry: Any) -> None:
        record(telemetry, entry)
        memory = {"life": int(life), "round": entry.round, "rss": psutil.Process().memory_info().rss}
        with (folder / "memory.jsonl").open("a") as file:
            file.write(json.dumps(memory) + "\n")

    Telemetry.round = measured  # type: ignore[method-assign, assignment]
    keys = {"resume": str(folder)} if (folder / LEDGER_FILE).is_file() else None
    run_inprocess(load(folder / CONFIG_FILE), folder, client_app=_faulty_clients(folder, int(life)), keys=keys)


def _die_at(path: str, late: bool, call: int) -> None:
    import importlib

    module, _, name = path.partition(":")
    *owners, last = name.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    real, count = getattr(owner, last), [0]

    def step(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] < call:
            return real(*arguments, **named)
        if late:
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, last, step)


def _faulty_clients(folder: Path, life: int) -> Any:
    """The real ClientApp behind nodes that fail at random; every fault is noted before it happens."""
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    import client.app
    from simulations.benchmarks.faults.malformed import REFUSED, transported

    app, rng = ClientApp(), random.Random(f"faults {life}")

    def note(kind: str) -> None:
        with (folder / "faults.txt").open("a") as file:
            file.write(kind + "\n")

    @app.train()
    def train(message: Message, context: Context) -> Message:
        chance = rng.random()
        if chance < NODE_FAILS:
            note("node raised")
            raise MemoryError("the node is out of memory")
        reply = client.app.app(message=message, context=context)
        if chance < NODE_FAILS + REPLY_IS_BAD and not reply.has_error():
            kind: Any = rng.choice(REFUSED)
            note("malformed reply")
            return Message(transported(kind(rng, reply.content)), reply_to=message)
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if rng.random() < EVALUATION_FAILS:
            note("evaluation failed")
            raise MemoryError("the node is out of memory")
        return client.app.app(message=message, context=context)

    return app


LIVE = "import sys; from simulations.benchmarks.faults.soak import live; live(*sys.argv[1:])"
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
    (folder / CONFIG_FILE).write_text(text)
    started = time.monotonic()
    places = [*PLACES, "random moment"]
    while (status := read_status(folder)) is None or status.state not in ("completed", "stopped-budget"):
        number = faults.lives
        place = places[number % len(places)] if number < kills else ""
        # The killed lives share a quarter of the rounds.
        length = rng.randint(1, max(1, rounds // (2 * kills))) if place else 0
        call = length * (6 if place in ("client training", "evaluation") else 1)
        before = len(read_metrics(folder))
        arguments = [sys.executable, "-c", LIVE, str(folder), str(number), place, str(call)]
        with (folder / PROCESS_LOG).open("ab") as log:
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
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
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
    log = run.folder / FLOWER_LOG
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
        (server,) = [process for process in self.members() if "simulations.engines.driver" in _command(process)]
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
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        legs = [soak_inprocess(Path(root) / "inprocess", rounds, kills) | origin()]
        if ray:
            legs.append(soak_ray(Path(root) / "ray", 15) | origin())
        elif (last := RESULTS / "soak.json").is_file():
            legs += [leg for leg in json.loads(last.read_text())["legs"] if leg["engine"] != legs[0]["engine"]]
    say({"legs": legs})
    write("soak", {"legs": legs})


if __name__ == "__main__":
    typer.run(main)
