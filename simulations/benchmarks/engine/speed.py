"""`python -m simulations.benchmarks.engine.speed [--sst2 train.parquet] [--quick]`: the engine against plain PEFT.

Local training of a cohort, one thread, no Flower and no Ray: clients per CPU second of the cohort engine, of plain PEFT
client by client in place, and of plain PEFT rebuilt for every client. Every variant trains the same clients on the same
batches, and the relative difference of the updates from plain PEFT's stands beside its speed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import Tensor

from client.engine.cohort import CohortEngine
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.timing import interleaved, lines, one_thread, show, write

TOP_LAYERS = (4, 5)
IN_PLACE, REBUILT = "plain PEFT in place", "plain PEFT rebuilt"


def engine(job: jobs.Job, precision: str, **settings: Any) -> Callable[[], Tensor]:
    """Train the job's clients on the cohort engine; everything from token lists to updates is inside the clock."""
    made = CohortEngine(job.make(), job.spec, jobs.TASK, precision=precision, **settings)
    start = job.start()
    return lambda: made.train_all(start, job.clients, job.local, job.seeds)


def compare(
    job: jobs.Job, variants: dict[str, Callable[[], Tensor]], reference: str, rounds: int
) -> list[dict[str, Any]]:
    """Time the variants in turn; every row also tells how far the updates are from the reference's."""
    truth = variants[reference]()
    seconds = interleaved(variants, rounds)
    rows = lines(job.name, seconds, reference, len(job.clients))
    if REBUILT in seconds:
        rows += [row for row in lines(job.name, seconds, REBUILT, len(job.clients)) if "engine" in row["variant"]]
    for row in rows:
        row["difference"] = float((variants[row["variant"]]() - truth).norm() / truth.norm())
    return rows


def tiny_rows(rounds: int, clients: int) -> list[dict[str, Any]]:
    """Two layers, width 64; 4 x 16 and 10 x 64 records x tokens a step, two steps."""
    rows = []
    for records, tokens in ((4, 16), (10, 64)):
        local = replace(jobs.ADAMW, batch_size=records)
        cohort = jobs.uniform_clients(clients, 2 * records, tokens)
        job = jobs.Job(f"tiny, {records} x {tokens}", jobs.tiny, jobs.SPEC, cohort, local)
        variants = {
            IN_PLACE: jobs.plain_peft(job),
            REBUILT: jobs.rebuilt_peft(job),
            "engine": engine(job, "fp32"),
        }
        rows += compare(job, variants, IN_PLACE, rounds)
    return rows


def minilm_rows(rounds: int, clients: int, sst2: Path | None) -> list[dict[str, Any]]:
    """MiniLM on ragged clients, adapters on all layers and on the top two."""
    cohort = jobs.ragged_clients(clients, sst2)
    job = jobs.Job("MiniLM, ragged SST-2", jobs.minilm, jobs.SPEC, cohort, jobs.ADAMW)
    rows = compare(
        job,
        {
            IN_PLACE: jobs.plain_peft(job),
            REBUILT: jobs.rebuilt_peft(job),
            "engine fp32": engine(job, "fp32"),
            "engine bf16": engine(job, "bf16"),
        },
        IN_PLACE,
        rounds,
    )
    top = replace(job, name="MiniLM, top 2 layers", spec=replace(job.spec, layers=TOP_LAYERS))
    return rows + compare(
        top,
        {
            IN_PLACE: jobs.plain_peft(top),
            "engine bf16": engine(top, "bf16"),
            "engine fp32, prefix cache": engine(top, "fp32", prefix_memory=2**29),
            "engine bf16, prefix cache": engine(top, "bf16", prefix_memory=2**29),
        },
        IN_PLACE,
        rounds,
    )


def main(
    sst2: Annotated[Path | None, typer.Option(help="train.parquet of SST-2; random tokens without it")] = None,
    quick: Annotated[bool, typer.Option(help="few clients and rounds: does it run at all?")] = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    rounds, tiny_clients, minilm_clients = (1, 4, 2) if quick else (5, 128, 48)
    ratios = tiny_rows(rounds, tiny_clients) + minilm_rows(rounds, minilm_clients, sst2)
    console = Console(width=160)
    show(console, ratios)
    if not quick:
        data = "SST-2" if sst2 is not None else "random tokens of SST-2's lengths"
        path = write("engine-speed", {"data": data, "seeds": [0], "ratios": ratios})
        console.print(f"written to {path}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
