"""`python -m simulations.benchmarks.engine.record_level [--sst2 train.parquet] [--quick]`: record-level privacy's cost.

One optimizer step of DP-SGD: gradients of every record, clipped to a bound, summed, plus Gaussian noise, against the
same step without privacy on the same engine, and against Opacus on plain PEFT, client by client, with hooks and with
ghost clipping. Time in turn within one process; peak memory of each variant in a process of its own, above that
process's size once the model is loaded. The noise here only costs what noise costs; no ledger is written.
"""

import gc
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from client.engine.cohort import CohortEngine
from simulations.benchmarks.engine import jobs, opacus
from simulations.benchmarks.harness.timing import forget_peak, interleaved, lines, one_thread, peak_memory, show, write

BOUND, NOISE_MULTIPLIER, RATE = 0.1, 1.0, 0.05
PLAIN, ENGINE, PRIVATE = "plain PEFT", "engine", "engine, record-level"
HOOKS, GHOST = "Opacus hooks", "Opacus ghost"


def one_step(job: jobs.Job) -> jobs.Job:
    """All records of a client in one step of SGD."""
    largest = max(len(records) for records in job.clients)
    return replace(job, local=replace(job.local, optimizer="sgd", learning_rate=RATE, batch_size=largest))


def non_private(job: jobs.Job, precision: str) -> Callable[[], Tensor]:
    """The step without clipping or noise."""
    engine, start = CohortEngine(job.make(), job.spec, jobs.TASK, precision=precision), job.start()
    return lambda: engine.train_all(start, job.clients, job.local, job.seeds)


def private(job: jobs.Job, precision: str, noise_multiplier: float = NOISE_MULTIPLIER) -> Callable[[], Tensor]:
    """The step with clipped record gradients and noise, for all clients at once."""
    engine, start = CohortEngine(job.make(), job.spec, jobs.TASK, precision=precision), job.start()
    sizes = torch.tensor([[len(records)] for records in job.clients])

    def work() -> Tensor:
        sums = torch.zeros(len(job.clients), engine.layout.dim)
        for chunk in engine.cohort_record_gradients(start, job.clients):
            scale = (BOUND / chunk.rows.norm(dim=1)).clamp_max_(1.0)
            # rows of one client times their factors: a product, without a scaled copy of the rows
            weights = torch.zeros(len(job.clients), len(chunk.rows))
            weights[torch.from_numpy(chunk.clients), torch.arange(len(chunk.rows))] = scale
            sums.addmm_(weights, chunk.rows)
        return (sums + noise_multiplier * BOUND * torch.randn_like(sums)).mul_(-RATE / sizes)

    return work


def variants(job: jobs.Job, precision: str) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """What is compared; each is built when it is called."""
    return {
        PLAIN: lambda: jobs.plain_peft(job),
        ENGINE: lambda: non_private(job, precision),
        PRIVATE: lambda: private(job, precision),
        HOOKS: lambda: opacus.hooks(job, BOUND, NOISE_MULTIPLIER),
        GHOST: lambda: opacus.ghost(job, BOUND, NOISE_MULTIPLIER),
    }


def make_jobs(quick: bool, sst2: Path | None) -> dict[str, tuple[jobs.Job, str]]:
    """Short records on a tiny model, where overhead counts; MiniLM with full and with ragged records."""
    small, large = (4, 2) if quick else (64, 6)
    tiny = jobs.Job("tiny, 4 x 16", jobs.tiny, jobs.SPEC, jobs.uniform_clients(small, 4, 16), jobs.ADAMW)
    long = jobs.Job("MiniLM, 16 x 64", jobs.minilm, jobs.SPEC, jobs.uniform_clients(large, 16, 64), jobs.ADAMW)
    ragged = jobs.Job("MiniLM, ragged SST-2", jobs.minilm, jobs.SPEC, jobs.ragged_clients(large, sst2), jobs.ADAMW)
    made = {"tiny": (tiny, "fp32"), "long fp32": (long, "fp32"), "long": (long, "bf16"), "ragged": (ragged, "bf16")}
    return {name: (one_step(replace(job, name=f"{job.name}, {p}")), p) for name, (job, p) in made.items()}


def memory_of(variant: str, connection: Any) -> None:
    """Peak bytes of two steps of one variant on MiniLM, 32 records of 64 tokens, above the size before them."""
    one_thread()
    cohort = jobs.uniform_clients(1, 32, 64)
    job = one_step(jobs.Job("memory", jobs.minilm, jobs.SPEC, cohort, jobs.ADAMW))
    work = variants(job, "fp32")[variant]()
    gc.collect()
    forget_peak()
    before = peak_memory()
    work()
    work()
    connection.send(peak_memory() - before)


def memory_rows() -> list[dict[str, Any]]:
    """One process per variant."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for variant in (PLAIN, ENGINE, PRIVATE, HOOKS, GHOST):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=memory_of, args=(variant, sender))
        process.start()
        rows.append({"variant": variant, "peak_bytes": receiver.recv()})
        process.join()
    return rows


def main(
    sst2: Annotated[Path | None, typer.Option(help="train.parquet of SST-2; random tokens without it")] = None,
    quick: Annotated[bool, typer.Option(help="few clients and rounds: does it run at all?")] = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    console, ratios = Console(width=160), []
    for job, precision in make_jobs(quick, sst2).values():
        works = {name: build() for name, build in variants(job, precision).items()}
        seconds = interleaved(works, 1 if quick else 5)
        for reference in (ENGINE, HOOKS, GHOST):
            rows = lines(job.name, seconds, reference, len(job.clients))
            ratios += [row for row in rows if row["variant"] == PRIVATE or reference == ENGINE]
    show(console, ratios)
    memory = memory_rows()
    for row in memory:
        console.print(f"peak memory, {row['variant']}: {row['peak_bytes'] / 2**20:.0f} MiB", highlight=False)
    if not quick:
        path = write("engine-record-level", {"seeds": [0], "ratios": ratios, "memory": memory})
        console.print(f"written to {path}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
