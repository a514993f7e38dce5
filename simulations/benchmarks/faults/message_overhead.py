"""What a message costs a deployed client beside its training: Flower starts a process for each.

    python -m simulations.benchmarks.faults.message_overhead

Every repetition starts two Python processes on a prepared node (its records are tokenised, the base model is in the
page cache, as from the second message on). One does all by itself: it imports the ClientApp, opens the node's records
and the base model (memory-mapped safetensors), trains, and trains once more, which is what a process that stayed
would have to do. The other hands the message to a resident process (:mod:`client.fork_server`), which forks: what a
client's container does. CPU time of the fork is read from the resident process once the fork has ended.

Tables of docker/README.md: sizes of the image, what its test took, and the cost of a process per message.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from client.fork_server import VARIABLE
from client.node import Node
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from server.config.load import parse
from server.run_folder.provenance import describe_environment
from server.runs.assembly import assemble
from simulations.benchmarks.harness.markdown import RESULTS
from simulations.tools.sample_records import write_records
from strategies.aggregations.aggregation import Adapters
from strategies.messages.client_update import TrainRequest

RECORDS = 200
RESULT = RESULTS / "message-overhead.json"

CHILD = """
import json, sys, time
marks = [("start", time.perf_counter(), time.process_time())]
def mark(name): marks.append((name, time.perf_counter(), time.process_time()))
from flwr.app import RecordDict
mark("flower")
import client.app
mark("import")
import pickle, pathlib
node, plan, content = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
from client.node import own_worker
request = strategies.messages.client_update.TrainRequest.from_records(content)
own_worker(request.job, node)
mark("open")
node.contribution(request)
mark("train")
node.contribution(request)
mark("again")
print(json.dumps([(b[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(marks, marks[1:])]))
"""


FLOWERS = """
import json, sys, time
marks = [("start", time.perf_counter(), time.process_time())]
def mark(name): marks.append((name, time.perf_counter(), time.process_time()))
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
print(json.dumps([(b[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(marks, marks[1:])]))
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
        (folder / "alone").write_bytes(pickle.dumps((Node(**own), plan, content)))
        (folder / "handed").write_bytes(pickle.dumps((own, content)))
        alone, handed = [], []
        with _resident(folder) as resident:
            for repetition in range(repetitions + 1):
                one = _run(CHILD, folder / "alone")
                before = _forks(resident)
                two = _run(FLOWERS, folder / "handed", resident=(folder / "told").read_text())
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
    told = folder / "told"
    command = [sys.executable, "-m", "client.fork_server", sys.executable, "-c", NODE, str(told)]
    process = subprocess.Popen(command, env=_alone())
    try:
        while not (told.exists() and told.read_text()):
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _forks(resident: psutil.Process) -> float:
    times = resident.cpu_times()
    return float(times.children_user + times.children_system)


def _run(code: str, given: Path, resident: str = "") -> dict[str, tuple[float, float]]:
    environment = _alone() | ({VARIABLE: resident} if resident else {})
    done = subprocess.run(
        [sys.executable, "-c", code, str(given)], capture_output=True, text=True, check=True, env=environment
    )
    return {name: (wall, cpu) for name, wall, cpu in json.loads(done.stdout)}


def _medians(runs: list[dict[str, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "wall_seconds": statistics.median(run[name][0] for run in runs),
            "cpu_seconds": statistics.median(run[name][1] for run in runs),
        }
        for name in runs[0]
    }


def _alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m simulations.benchmarks.faults.message_overhead")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--model", default="minilm")
    given = parser.parse_args()
    load = os.getloadavg()
    result = measure(given.repetitions, given.model)
    result |= {"environment": describe_environment(), "load": [round(value, 2) for value in load]}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


PARTS = {
    "flower": "Flower's part is imported",
    "import": "torch, transformers and the ClientApp are imported",
    "open": "records and base model are opened (memory-mapped)",
    "train": "training, first time",
    "again": "training, if the process had stayed",
}
HANDED_PARTS = {
    "flower": "Flower's part is imported",
    "hand over": "our part of it is imported, the message is read",
    "fork": "the resident process forks; the fork opens records and model, trains, answers",
}


def containers(result: Mapping[str, Any]) -> str:
    """Sizes and the container test."""
    base, image = (result[key] / 1e6 for key in ("base_bytes", "image_bytes"))
    return (
        "| image | size |\n| --- | ---: |\n"
        f"| base: Debian 12 with Python 3.11 | {base:,.0f} MB |\n"
        f'| Lacquer with torch for CPUs and the model "minilm" | {image:,.0f} MB |\n\n'
        f"`docker/container_test.sh` took {result['seconds'] // 60}:{result['seconds'] % 60:02d} at load "
        f"{result['load']:.0f} on {result['cores']} cores ({result['how']}); commit `{result['commit']}`.\n"
    )


def message_overhead(result: Mapping[str, Any]) -> str:
    """One line for every part of a message."""
    lines = ["| a message to a client | CPU | wall |", "| --- | ---: | ---: |"]
    for title, parts, words in (
        ("one process does everything", result["parts"], PARTS),
        ("with the resident process", result["handed_parts"], HANDED_PARTS),
    ):
        lines.append(f"| **{title}** | | |")
        lines += [
            f"| {text} | {parts[name]['cpu_seconds']:.2f} s | {parts[name]['wall_seconds']:.1f} s |"
            for name, text in words.items()
        ]
    environment = result["environment"]
    return (
        "\n".join(lines) + "\n\n"
        f'{result["records"]} records, model "{result["model"]}"; median of {result["repetitions"]} messages each way; '
        f"load {result['load'][0]:.0f} on {environment['cores']} cores; commit `{environment['commit']}`.\n"
    )
