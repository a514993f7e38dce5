"""Memory of the frozen model and one training step on a CPU, by precision, quantisation and checkpointed blocks, beside
plain PEFT.

Run: `python -m simulations.benchmarks engine.memory [--model smollm2] [--tokens 64]`.

Every case runs in a process of its own: it loads the model, gives it to the engine, and trains four clients on two
records each in one micro-batch. Plain PEFT trains them one after the other, or all records as one client in one step,
which is as many tokens at once as the engine has. Peaks are the process's resident memory (``VmHWM``, reset before each
part) above what it had when everything was imported. Linux only.
A CPU without bfloat16 products takes minutes for a step in that precision, which is then left out.
"""

import ctypes
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.harness.timing import forget_peak, one_thread, peak_memory

ENGINE, ONE_BY_ONE, ALL_RECORDS = "engine", "plain PEFT, client by client", "plain PEFT, one client of all records"
CASES: tuple[dict[str, Any], ...] = (
    {"precision": "fp32", "way": ONE_BY_ONE},
    {"precision": "fp32", "way": ALL_RECORDS},
    {"precision": "fp32"},
    {"precision": "fp32", "checkpoint_blocks": True},
    {"precision": "fp32", "quantisation": "int8"},
    {"precision": "fp32", "quantisation": "nf4"},
    {"precision": "fp32", "quantisation": "nf4", "checkpoint_blocks": True},
    {"precision": "bf16-model"},
    {"precision": "bf16-model", "quantisation": "int8"},
    {"precision": "bf16-model", "quantisation": "nf4"},
)
CLIENTS, RECORDS = 4, 2
REPEATS = 3
"""Peaks of one case differ by a third between processes; the table has the middle one and the range."""


def forget() -> int:
    """Give freed memory back and begin to look for the peak anew; what is resident now."""
    ctypes.CDLL(None).malloc_trim(0)
    forget_peak()
    return peak_memory()


def measure(model: str, tokens: int, case: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    from client.data.records import Records
    from client.engine.cohort import CohortEngine
    from client.engine.local_training import LocalTraining
    from client.models.devices import weight_bytes
    from client.models.frozen.base import FrozenBase
    from client.models.lora import LoraSpec, adapter_layout, initial_adapter
    from client.models.tasks import make_task
    from simulations.benchmarks.engine import jobs

    one_thread()
    work: Callable[[], object]
    way = case.get("way", ENGINE)
    base = FrozenBase.of(device="cpu", **{name: value for name, value in case.items() if name != "way"})
    FrozenBase().load("random:llama", "causal-lm")  # what the first model imports
    before = forget()
    loaded, _ = base.load(model, "instruction")
    at_load = peak_memory() - before
    weights = weight_bytes(loaded, base.quantisation)
    spec, task = LoraSpec(8, 16.0, ("q_proj", "v_proj")), make_task("instruction")
    local = LocalTraining(optimizer="adamw", batch_size=RECORDS if way != ALL_RECORDS else CLIENTS * RECORDS)
    rng = np.random.default_rng(0)
    clients = [
        Records.from_lists([rng.integers(5, 2000, tokens).tolist() for _ in range(local.batch_size)], None)
        for _ in range(CLIENTS * RECORDS // local.batch_size)
    ]
    if way == ENGINE:
        start = initial_adapter(adapter_layout(loaded, spec), loaded, 0)
        engine = CohortEngine(
            loaded,
            spec,
            task,
            precision=base.precision,
            token_budget=CLIENTS * RECORDS * tokens,
            quantisation=base.quantisation,
            checkpoint_blocks=base.checkpoint_blocks,
        )
        work = functools.partial(engine.train_all, start, clients, local, range(CLIENTS))
    else:
        work = jobs.plain_peft(jobs.Job(way, lambda: loaded, spec, clients, local, task))
    held = forget() - before
    found = {"weights": weights, "at_load": at_load, "held": held}
    if base.dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return {**case, **found, "step": None, "seconds": None}
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    return {**case, **found, "step": peak_memory() - before, "seconds": seconds}


def median(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The middle one by its peak of a step, and the range of those peaks."""
    if found[0]["step"] is None:
        return found[0]
    ordered = sorted(found, key=lambda one: one["step"])
    middle = ordered[len(found) // 2]
    return {**middle, "lowest_step": ordered[0]["step"], "highest_step": ordered[-1]["step"], "repeats": len(found)}


def main(
    model: Annotated[str, typer.Option(help="a language model")] = "smollm2",
    tokens: Annotated[int, typer.Option(help="of a record")] = 64,
    case: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if case:
        print(json.dumps(measure(model, tokens, json.loads(case))))
        return
    one_thread()  # for the record of the environment; every case has a process of its own
    rows = []
    for each in CASES:
        command = [sys.executable, "-m", "simulations.benchmarks", "engine.memory", "--case", json.dumps(each)]
        command += ["--model", model, "--tokens", str(tokens)]
        outputs = [
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout for _ in range(REPEATS)
        ]
        rows.append(median([json.loads(output.splitlines()[-1]) for output in outputs]))
        say(rows[-1])
        write("engine-memory", {"model": model, "tokens": tokens, "records": CLIENTS * RECORDS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
