"""What a GPU is asked in ten minutes, in order of worth: can it, how fast, the main job, eight billion, real lengths.

Run: `make gpu`, or `python -m simulations.benchmarks scale.gpu [--device cuda] [--only STEP]`. `--tiny` goes through
all of it with very small shapes on any machine. Each step is a process of its own with a time limit, and the results
are written after each: what is done is kept, however the session ends.

1. *independence*: how far others move a contribution, by precision, with cuBLAS' smallest workspace and with its own.
2. *speed*: clients per second by precision, in turn.
3. *main job*: `lacquer run quickstart` through Flower on Ray, with one actor on the GPU and with two, and in process.
4. *billions*: shapes of Llama-3.1-8B and Qwen3-8B with random weights, in bfloat16 and nf4: whether the formula of
   `lacquer plan` for memory holds, and clients and steps per second, with and without recomputed blocks.
5. *ragged*: the shape of SmolLM2 on texts of real lengths, several clients side by side, by the size of micro-batches.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from client.data.catalog import notes
from client.data.records import Records
from client.engine.cohort import CohortEngine, trial_of
from client.models.base import load_tokenizer
from client.models.devices import activation_bytes, weight_bytes
from client.models.frozen import gpu_trial
from client.models.tasks import CausalLM
from server.run_folder.names import METRICS_FILE, TIMES_FILE
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.engine.gpu import LOCAL, SMALL, TOY, Shape, clients, engine_round, model, timed
from simulations.benchmarks.harness.results import ROOT, environment, say

LLAMA_8B = Shape("Llama-3.1-8B's shape", 4096, 32, 32, 8, 14336, 128256, 128, 4, 8, 2)
QWEN_8B = Shape("Qwen3-8B's shape", 4096, 36, 32, 8, 12288, 151936, 128, 4, 8, 2)
TASK = CausalLM()
PRECISIONS = ("bf16", "fp32", "bf16-model")
ROUNDS = 3
MAIN = ("--set=rounds=4", "--set=model.name=lacquer-small", "--set=model.targets=auto")
"""Settings of the main job: the model that the package holds."""


@dataclass(frozen=True)
class Session:
    """Where the steps run, and how much of everything.

    Attributes:
        device: of torch.
        small: the shape of steps 1, 2 and 5.
        large: the shapes of step 4.
        run: further settings of the main job.
    """

    device: torch.device
    small: Shape
    large: tuple[Shape, ...]
    run: tuple[str, ...]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def session(device: str, *, tiny: bool) -> Session:
    """The session that users have, or the same with very small shapes."""
    if tiny:
        few = ("--set=clients=60", "--set=rounds=2", "--set=privacy.delta=0.001", "--set=data.train-records=600")
        return Session(torch.device(device), TOY, (TOY,), few)
    return Session(torch.device(device), replace(SMALL, clients=200), (LLAMA_8B, QWEN_8B), ())


def measure_independence(here: Session) -> list[dict[str, Any]]:
    """One row per precision, in the workspace of this process."""
    rows = []
    for precision in PRECISIONS:
        made = model(here.small, torch.device("cpu"), torch.float32)
        build = trial_of(jobs.LLAMA_SPEC, TASK, here.device, "none")
        moved = gpu_trial.moved_by_others(build(gpu_trial.first_blocks(made), precision))
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "as it is")
        rows.append({"precision": precision, "workspace": workspace, "moved_most": moved})
    return rows


def measure_speed(here: Session) -> list[dict[str, Any]]:
    """Clients per second of each precision, rounds of all of them in turn."""
    cohort = clients(here.small, here.small.clients)
    works: dict[str, Callable[[], object]] = {}
    for precision in PRECISIONS:
        works[precision] = _training(here, here.small, cohort, precision=precision)
        works[precision]()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            seconds[name].append(timed(work, here.device))
    return [
        {"precision": name, "clients_per_second": len(cohort) / statistics.median(values), "seconds": values}
        for name, values in seconds.items()
    ]


def measure_main_job(here: Session) -> list[dict[str, Any]]:
    """Seconds of the rounds and of the whole command, on either engine and with one and two workers."""
    rows = []
    for engine, workers in (("inprocess", 1), ("flower", 1), ("flower", 2)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "simulations", "run", "quickstart", *MAIN, *here.run]
            command += [f"--engine={engine}", f"--workers={workers}", f"--set=output={folder}"]
            command += [f"--set=engine.device={'cuda' if here.on_gpu else 'cpu'}", f"--set=data.cache={folder}/cache"]
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=_with_us())
            row: dict[str, Any] = {"engine": engine, "workers": workers, "exit_code": done.returncode}
            row["wall_seconds"] = time.perf_counter() - began
            found = next(Path(folder).glob(f"*/{METRICS_FILE}"), None)
            if done.returncode or found is None:
                row["said"] = (done.stdout + done.stderr)[-2000:]
            else:
                times = [json.loads(line) for line in (found.parent / TIMES_FILE).read_text().splitlines()]
                row["round_seconds"] = [one["seconds"] for one in times]
                row["not_covered"] = json.loads((found.parent / "privacy.json").read_text())["not_covered"]
            rows.append(row)
    return rows


def measure_billions(here: Session) -> list[dict[str, Any]]:
    """Bytes of weights and of a step beside what is expected of them, and clients per second."""
    rows = []
    for shape in here.large:
        for quantisation, checkpointed in (("none", False), ("none", True), ("nf4", True)):
            rows.append(_of_billions(here, shape, quantisation, checkpointed=checkpointed))
            gc.collect()
            if here.on_gpu:
                torch.cuda.empty_cache()
    return rows


def _of_billions(here: Session, shape: Shape, quantisation: str, *, checkpointed: bool) -> dict[str, Any]:
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    made = model(shape, here.device, dtype)
    tokens = shape.tokens * shape.records
    options: dict[str, Any] = {"quantisation": quantisation, "checkpoint_blocks": checkpointed}
    expected = weight_bytes(made, quantisation)
    kept = activation_bytes(made, tokens, value=dtype.itemsize, checkpoint_blocks=checkpointed)
    cohort = clients(shape, shape.clients)
    work = _training(here, shape, cohort, made, token_budget=tokens, self_test=False, **options)
    del made
    gc.collect()
    held = torch.cuda.memory_allocated(here.device) if here.on_gpu else 0
    if here.on_gpu:
        torch.cuda.reset_peak_memory_stats(here.device)
    work()
    peak = torch.cuda.max_memory_allocated(here.device) if here.on_gpu else 0
    seconds = [timed(work, here.device) for _ in range(2)]
    return {
        "model": shape.name, **options, "weight_bytes": held, "weight_bytes_expected": expected,
        "step_bytes": peak - held, "step_bytes_expected": kept,
        "clients_per_second": len(cohort) / statistics.median(seconds),
    }  # fmt: skip


def measure_ragged(here: Session) -> list[dict[str, Any]]:
    """Clients per second on texts of real lengths, by tokens of a micro-batch; and the share of padding."""
    encode = load_tokenizer("lacquer-small")
    texts, _, _ = notes.split(here.small.clients * here.small.records, 1, 1, 0)
    lengths = [max(2, len(encode(note.text)["input_ids"])) for note in texts]
    top = here.small.words - 1
    lists = [[3 + (place * 7 + number) % (top - 3) for place in range(length)] for number, length in enumerate(lengths)]
    each = here.small.records
    cohort = [Records.from_lists(lists[i : i + each]) for i in range(0, len(lists), each)]
    rows = []
    for budget in (4096, 16384, 65536) if here.on_gpu else (256, 1024):
        engine_of: list[CohortEngine] = []
        work = _training(here, here.small, cohort, token_budget=budget, into=engine_of)
        work()
        before, seconds = engine_of[0].tokens_run, timed(work, here.device)
        run = engine_of[0].tokens_run - before
        rows.append(
            {
                "token_budget": budget,
                "precision": engine_of[0].precision,
                "clients_per_second": len(cohort) / seconds,
                "tokens_run_per_token": run / sum(lengths),
            }
        )
    return rows


STEPS: dict[str, tuple[Callable[[Session], list[dict[str, Any]]], int]] = {
    "independence": (measure_independence, 60),
    "speed": (measure_speed, 90),
    "main job": (measure_main_job, 240),
    "billions": (measure_billions, 150),
    "ragged": (measure_ragged, 60),
}
"""The steps in order of worth, and the seconds that each may take."""


def _training(
    here: Session,
    shape: Shape,
    cohort: list[Records],
    made: nn.Module | None = None,
    *,
    precision: str | None = None,
    into: list[CohortEngine] | None = None,
    **options: Any,
) -> Callable[[], object]:
    """Local training of a cohort; `made` is taken over, None makes the model of the shape."""
    wide = precision or ("bf16-model" if made is not None and here.on_gpu else "auto")
    dtype = torch.bfloat16 if wide == "bf16-model" else torch.float32
    kept = model(shape, torch.device("cpu"), dtype) if made is None else made
    job = jobs.Job(shape.name, lambda: kept, jobs.LLAMA_SPEC, cohort, LOCAL, TASK, here.device)
    start = job.start()
    engine = job.engine(wide, **options)
    if into is not None:
        into.append(engine)
    return engine_round(job, engine, start)


def _with_us() -> dict[str, str]:
    """This environment, in which the packages of the checkout are found from anywhere."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _in_a_process(step: str, arguments: list[str], limit: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """A step's rows, or how its process ended."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "simulations.benchmarks.scale.gpu", "--step", step, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {limit} s"}
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
    if done.returncode:
        return {**found, "failed": done.stderr[-2000:]}
    return {**found, "rows": json.loads(done.stdout.splitlines()[-1])}


def main(
    device: Annotated[str, typer.Option(help="a CUDA device, or cpu with --tiny")] = "cuda",
    tiny: Annotated[bool, typer.Option(help="very small shapes, on any machine; written to build/")] = False,
    only: Annotated[list[str] | None, typer.Option(help="only these steps")] = None,
    step: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Go through the steps, or say the rows of one on the last line of the output."""
    if step:
        typer.echo(json.dumps(STEPS[step][0](session(device, tiny=tiny))))
        return
    if not tiny and not torch.cuda.is_available():
        raise SystemExit("there is no GPU that torch can use here; with --tiny --device cpu the steps run anywhere")
    arguments = [f"--device={device}", *(["--tiny"] if tiny else [])]
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(torch.device(device))
    results: dict[str, Any] = {"environment": environment(), "device": name, "tiny": tiny, "steps": {}}
    target = ROOT / "build" / "gpu-tiny.json" if tiny else ROOT / "simulations/benchmarks/results/gpu.json"
    for one, (_, limit) in STEPS.items():
        if only and one not in only:
            continue
        spaces = [("", gpu_trial.WORKSPACE), (", cuBLAS as it is", {})] if one == "independence" else [("", {})]
        for suffix, workspace in spaces:
            found = _in_a_process(one, arguments, limit * (5 if tiny else 1), {**_with_us(), **workspace})
            results["steps"][one + suffix] = found
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            say(one + suffix, json.dumps(found)[:600])
    if any("failed" in found for found in results["steps"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
