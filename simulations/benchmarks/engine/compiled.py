"""What `torch.compile` of a model's layers gains on a GPU, beside the same engine without it.

Run: `python -m simulations.benchmarks engine.compiled [--device cuda] [--quick]`; about two minutes on an H200.

The models and clients of `engine.gpu`. Each layer is compiled for sizes that change; adapted products, which write into
the buffers of their clients, are left out of the graphs. CUDA graphs need sizes that never change, which micro-batches
of clients do not have; `engine.gpu` says how much of the time no kernel runs, which is the most that they could gain.
"""

from typing import Annotated, Any

import torch
import typer
from torch._dynamo.utils import counters

from client.engine.checkpointing import blocks
from client.engine.stacked import Adapted
from simulations.benchmarks.engine import gpu, jobs
from simulations.benchmarks.harness.results import say, say_ratios, write
from simulations.benchmarks.harness.timing import one_thread, ratios

PLAIN, COMPILED = "engine", "engine, layers compiled"


def measure(shape: gpu.Shape, device: torch.device, count: int, rounds: int, backend: str) -> dict[str, Any]:
    """Rates of both, in turn; seconds until the first compiled round was over, beside those of a later one."""
    job = gpu.job_of(shape, device, count)
    engine, start = gpu.engine_of(job), job.start()
    work = gpu.engine_round(job, engine, start)
    layers = list(blocks(engine._stacked.model))
    work()
    counters.clear()
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
    first = gpu.timed(work, device)
    compiled = [layer._compiled_call_impl for layer in layers]
    seconds: dict[str, list[float]] = {PLAIN: [], COMPILED: []}
    for _ in range(rounds):
        for name in (PLAIN, COMPILED):
            for layer, call in zip(layers, compiled, strict=True):
                layer._compiled_call_impl = call if name == COMPILED else None
            seconds[name].append(gpu.timed(work, device))
    return {
        "model": shape.name,
        "ratios": ratios(job.name, seconds, PLAIN, count),
        "compile_seconds": first - min(seconds[COMPILED]),
        "graphs": counters["stats"]["unique_graphs"],
    }


def main(
    device: Annotated[str, typer.Option(help="a CUDA device")] = "cuda",
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    torch._dynamo.config.recompile_limit = 64
    Adapted.forward = torch._dynamo.disable(Adapted.forward)  # type: ignore[method-assign,no-untyped-call]
    if quick:
        row = measure(gpu.TOY, jobs.CPU, gpu.TOY.clients, 1, "eager")
        say_ratios(row["ratios"])
        return
    target, rows = torch.device(device), []
    for shape in (gpu.LARGE, gpu.SMALL):
        rows.append(measure(shape, target, shape.clients // 2, 3, "inductor"))
        say_ratios(rows[-1]["ratios"])
        say(f"{rows[-1]['compile_seconds']:.0f} s to compile, {rows[-1]['graphs']} graphs")
        write("engine-compiled", {"seeds": [0], "device": torch.cuda.get_device_name(target), "models": rows})


if __name__ == "__main__":
    typer.run(main)
