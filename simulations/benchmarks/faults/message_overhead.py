"""What a message costs a deployed client beside its training: Flower starts a process for each.

Run: `python -m simulations.benchmarks faults.message_overhead`. The table is in docs/results/scale.md.

Every repetition starts two Python processes on a prepared node (its records are tokenised, the base model is in the
page cache, as from the second message on). One does all by itself: it imports the ClientApp, opens the node's records
and the base model (memory-mapped safetensors), trains, and trains once more, which is what a process that stayed
would have to do. The other hands the message to a resident process (:mod:`client.fork_server`), which forks: what a
client's container does. CPU time of the fork is read from the resident process once the fork has ended.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from flwr.app import Message, RecordDict

from client.fork_server import VARIABLE
from client.node import Node
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from server.config.load import parse
from server.network.certificates import authority, signing_key
from server.network.instructions import load_signing_key
from server.runs.assembly import assemble
from simulations.benchmarks.harness.results import say, write
from simulations.engines.inprocess import identity
from simulations.tools.sample_records import write_records
from strategies.aggregations.aggregation import Adapters
from strategies.messages.client_update import TrainRequest
from strategies.messages.instruction import sign

RECORDS = 200

MARKS = """
import json, sys, time
marks = [("start", time.perf_counter(), time.process_time())]
def mark(name): marks.append((name, time.perf_counter(), time.process_time()))
{steps}
print(json.dumps([(b[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(marks, marks[1:])]))
"""
"""A process that says how long each of its steps took, wall and CPU."""

ALONE = """
from flwr.app import RecordDict
mark("flower")
import client.app
mark("import")
import pickle, pathlib
node, plan, content = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
from client.node import own_worker
from strategies.messages.client_update import TrainRequest
request = TrainRequest.from_records(content)
own_worker(request.job, node, company=False)
mark("open")
node.contribution(request)
mark("train")
node.contribution(request)
mark("again")
"""

HANDED = """
from flwr.app import Context, Message, RecordDict
mark("flower")
from flwr.supercore.task_identity import TaskIdentity
import client.fork_server
import pickle, pathlib
for name in ("run_id", "node_id", "task_id"):
    setattr(TaskIdentity, f"_{name}", 1)
config, content = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
message = Message(content, dst_node_id=1, message_type="train")
message.metadata.__dict__["_message_id"] = "one"
context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
mark("hand over")
reply = client.fork_server.app(message=message, context=context)
assert not reply.has_error()
mark("answer")
"""
NODE = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(os.environ["LACQUER_RESIDENT"])
time.sleep(36000)
"""


def measure(repetitions: int, model: str) -> dict[str, Any]:
    """Medians over fresh processes, seconds of wall and of CPU for every part."""
    import pickle  # between a process and its own child

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (records,) = write_records(folder, 1, RECORDS)
        plan, content = _request(folder, model)
        own = {"data": f"jsonl:{records}", "cache": str(folder / "own")}
        authority(folder / "keys")
        signing_key(folder / "keys", folder / "keys")
        settings = own | {"authority": str(folder / "keys" / "ca.crt")}
        (folder / "alone").write_bytes(pickle.dumps((Node(**own), plan, content)))
        alone, handed = [], []
        with _resident(folder) as resident:
            for repetition in range(repetitions + 1):
                one = _run(ALONE, folder / "alone")
                _signed(content, folder / "keys")  # a node follows an instruction once
                (folder / "handed").write_bytes(pickle.dumps((settings, content)))
                before = _forks(resident)
                two = _run(HANDED, folder / "handed", resident=(folder / "address").read_text())
                while _forks(resident) == before:  # it looks for forks that have ended twice in a second
                    time.sleep(0.05)
                two["fork"] = (two.pop("answer")[0], _forks(resident) - before)
                if repetition:  # the first prepares the records
                    alone.append(one)
                    handed.append(two)
    return {
        "model": model,
        "records": RECORDS,
        "repetitions": repetitions,
        "parts": _medians(alone),
        "handed_parts": _medians(handed),
    }


def _signed(content: RecordDict, keys: Path) -> None:
    with identity(1):
        message = Message(content, dst_node_id=1, message_type="train")
    sign(message, *load_signing_key(keys / "signing.key"), time.time_ns())


def _request(folder: Path, model: str) -> tuple[Plan, Any]:
    config = parse(
        {
            "clients": 3,
            "sampling-rate": 1.0,
            "privacy": {"delta": 1e-2},
            "model": {"name": model, "layers": 3 if model == "minilm" else 0, "max-length": 64},
            "data": {
                "held-by": "nodes",
                "validation-records": 20,
                "test-records": 20,
                "cache": str(folder / "cache"),
            },
        }
    )
    assembly = assemble(config)
    part = assembly.methods.aggregation.part(Adapters(config.model.rank, 3, 0), 1)
    plan = Plan(FlatClip(1.0, part.layout(assembly.layout).dim), 1.0)
    ids = np.array([1], dtype=np.int64)
    return plan, TrainRequest(1, assembly.start.numpy(), plan, part, ids, assembly.job.to_json()).to_records()


@contextmanager
def _resident(folder: Path) -> Iterator[psutil.Process]:
    """A resident process that has imported everything, beside a SuperNode that does nothing."""
    address = folder / "address"
    command = [sys.executable, "-m", "client.fork_server", sys.executable, "-c", NODE, str(address)]
    process = subprocess.Popen(command, env=_environment())
    try:
        while not (address.exists() and address.read_text()):
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _forks(resident: psutil.Process) -> float:
    times = resident.cpu_times()
    return float(times.children_user + times.children_system)


def _run(steps: str, given: Path, resident: str = "") -> dict[str, tuple[float, float]]:
    environment = _environment() | ({VARIABLE: resident} if resident else {})
    command = [sys.executable, "-c", MARKS.format(steps=steps), str(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return {name: (wall, cpu) for name, wall, cpu in json.loads(done.stdout)}


def _medians(runs: list[dict[str, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "wall_seconds": statistics.median(run[name][0] for run in runs),
            "cpu_seconds": statistics.median(run[name][1] for run in runs),
        }
        for name in runs[0]
    }


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(
    repetitions: Annotated[int, typer.Option(help="messages each way, the first not counted")] = 7,
    model: Annotated[str, typer.Option(help="base model")] = "minilm",
    quick: Annotated[bool, typer.Option(help="one message, a very small model; nothing is written")] = False,
) -> None:
    """Measure and write the results."""
    load = [round(value, 2) for value in os.getloadavg()]
    result = measure(1, "random:bert") if quick else measure(repetitions, model)
    say(result)
    if not quick:
        write("message-overhead", {**result, "load": load})


if __name__ == "__main__":
    typer.run(main)
