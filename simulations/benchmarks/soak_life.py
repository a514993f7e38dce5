"""One life of the soak run: server and nodes in one process, nodes that fail, and a place where it kills itself."""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from server.config import load

PLACES = {
    "client training": ("client.worker:Worker.contribution", False),
    "before the charge": ("privacy.ledger:Ledger.charge", False),
    "between charge and noise": ("privacy.ledger:Ledger.charge", True),
    "between release and checkpoint": ("server.loop:save_checkpoint", False),
    "after the checkpoint": ("server.loop:save_checkpoint", True),
    "evaluation": ("client.worker:Worker.metrics", False),
    "before the record": ("server.telemetry:Telemetry.round", False),
    "after the record": ("server.telemetry:Telemetry.round", True),
}
"""Where the process kills itself: a function, and whether after it."""
NODE_FAILS, REPLY_IS_BAD, EVALUATION_FAILS = 0.06, 0.04, 0.0002


def live(folder: Path, life: int, place: str, call: int) -> None:
    """Run or go on, with failing nodes, until the end or until ``place`` was reached ``call`` times."""
    from server.telemetry import Telemetry
    from simulations.inprocess import run_inprocess

    if place in PLACES:
        _die_at(*PLACES[place], call)
    record = Telemetry.round

    def measured(telemetry: Any, entry: Any) -> None:
        record(telemetry, entry)
        memory = {"life": life, "round": entry.round, "rss": psutil.Process().memory_info().rss}
        with (folder / "memory.jsonl").open("a") as file:
            file.write(json.dumps(memory) + "\n")

    Telemetry.round = measured  # type: ignore[method-assign, assignment]
    keys = {"resume": str(folder)} if (folder / "ledger.jsonl").is_file() else None
    run_inprocess(load(folder / "config.toml"), folder, client_app=_faulty_clients(folder, life), keys=keys)


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
    from simulations.benchmarks.bad_reply_kinds import REFUSED, transported

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


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
