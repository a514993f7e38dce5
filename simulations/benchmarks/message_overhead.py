"""What a message costs a deployed client beside its training: Flower starts a process for each.

    python -m simulations.benchmarks.message_overhead

Every repetition is a new Python process on a prepared node (its records are tokenised, the base model is in the page
cache, as from the second message on): it imports the ClientApp, opens the node's records and the base
model (memory-mapped safetensors), trains, and trains once more, which is what a process that stayed would have to do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from client.node import Node
from client.wire import TrainRequest
from privacy.clipping import FlatClip
from privacy.mechanism import Plan
from server.assembly import assemble
from server.config import parse
from server.environment import describe_environment
from simulations.benchmarks.tables import RESULTS
from simulations.sample_records import write_records
from strategies.aggregation.aggregation import Adapters

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
request = client.app.TrainRequest.from_records(content)
own_worker(request.job, node)
mark("open")
node.contribution(request)
mark("train")
node.contribution(request)
mark("again")
print(json.dumps([(b[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(marks, marks[1:])]))
"""


def measure(repetitions: int, model: str) -> dict[str, Any]:
    """Medians over fresh processes, seconds of wall and of CPU for every part."""
    import pickle  # between a process and its own child

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (records,) = write_records(folder, 1, RECORDS)
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
        request = TrainRequest(1, assembly.start.numpy(), plan, part, ids, assembly.job.to_json())
        given = folder / "message"
        node = Node(f"jsonl:{records}", str(folder / "own"))
        given.write_bytes(pickle.dumps((node, plan, request.to_records())))
        runs = []
        for repetition in range(repetitions + 1):
            begun = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(given)], capture_output=True, text=True, check=True, env=_alone()
            )
            parts = {name: (wall, cpu) for name, wall, cpu in json.loads(done.stdout)}
            if repetition:  # the first prepares the records
                runs.append((time.perf_counter() - begun, parts))
    medians = {
        name: {
            "wall_seconds": statistics.median(parts[name][0] for _, parts in runs),
            "cpu_seconds": statistics.median(parts[name][1] for _, parts in runs),
        }
        for name in runs[0][1]
    }
    return {
        "model": model,
        "records": RECORDS,
        "repetitions": repetitions,
        "process_wall_seconds": statistics.median(wall for wall, _ in runs),
        "parts": medians,
    }


def _alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m simulations.benchmarks.message_overhead")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--model", default="minilm")
    given = parser.parse_args()
    load = os.getloadavg()
    result = measure(given.repetitions, given.model)
    result |= {"environment": describe_environment(), "load": [round(value, 2) for value in load]}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
