"""The engine against plain PEFT, and against the machine's own peak.

Run: `python -m simulations.benchmarks engine.speed [--sst2 train.parquet] [--part ratios|peak|smollm2] [--quick]`.

Ratios: local training of a cohort, one thread, no Flower and no Ray: clients per CPU second of the cohort engine, of
plain PEFT client by client in place, and of plain PEFT rebuilt for every client. Every variant trains the same clients
on the same batches, and the relative difference of the updates from plain PEFT's stands beside its speed.

Peak: operations of all matrix products of local training on MiniLM per second, beside those of a matrix product of
MiniLM's own shape, timed in turn with it on the same core with the same kernel.

SmolLM2: tokens per second of the engine and of plain PEFT in place, adapters on all layers and on the top six, in turn
in one run. The prefix cache is full after the call that is not counted; what that call takes stands beside the others.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from client.data.records import Records
from client.models.tasks import make_task
from privacy.randomness.rng import simulation_generator
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import say, say_ratios, write_ratios
from simulations.benchmarks.harness.timing import both_clocks, interleaved, one_thread, over_rounds, ratios

TOP_LAYERS = (4, 5)
SMOLLM2_TOP = tuple(range(24, 30))
IN_PLACE, REBUILT = "plain PEFT in place", "plain PEFT rebuilt"


def engine(job: jobs.Job, precision: str, **settings: Any) -> Callable[[], Tensor]:
    """Train the job's clients on a cohort engine of their own."""
    return jobs.engine_training(job, job.engine(precision, **settings))


def compare(
    job: jobs.Job, engines: dict[str, Callable[[], Tensor]], rounds: int, *, rebuilt: bool = True
) -> list[dict[str, Any]]:
    """Time plain PEFT and the engines in turn; every row has how far the updates are from plain PEFT's in place."""
    variants = {IN_PLACE: jobs.plain_peft(job)}
    if rebuilt:
        variants[REBUILT] = jobs.plain_peft(job, rebuilt=True)
    variants |= engines
    truth = variants[IN_PLACE]()
    seconds = interleaved(variants, rounds)
    rows = ratios(job.name, seconds, IN_PLACE, len(job.clients))
    if rebuilt:
        rows += [row for row in ratios(job.name, seconds, REBUILT, len(job.clients)) if row["variant"] in engines]
    for row in rows:
        row["difference"] = float((variants[row["variant"]]() - truth).norm() / truth.norm())
    return rows


def tiny_rows(rounds: int, clients: int) -> list[dict[str, Any]]:
    """Two layers, width 64; 4 x 16 and 10 x 64 records x tokens a step, two steps."""
    rows = []
    for records, tokens in ((4, 16), (10, 64)):
        local = jobs.ADAMW.replace(batch_size=records)
        cohort = jobs.uniform_clients(clients, 2 * records, tokens)
        job = jobs.Job(f"tiny, {records} x {tokens}", jobs.tiny, jobs.SPEC, cohort, local)
        rows += compare(job, {"engine": engine(job, "fp32")}, rounds)
    return rows


def minilm_rows(rounds: int, clients: int, sst2: Path | None) -> list[dict[str, Any]]:
    """MiniLM on ragged clients, adapters on all layers and on the top two."""
    cohort = jobs.ragged_clients(clients, sst2)
    job = jobs.Job("MiniLM, ragged SST-2", jobs.minilm, jobs.SPEC, cohort, jobs.ADAMW)
    top = replace(job, name="MiniLM, top 2 layers", spec=replace(job.spec, layers=TOP_LAYERS))
    engines = {f"engine {precision}": engine(job, precision) for precision in ("fp32", "bf16")}
    engines_of_top = {
        "engine bf16": engine(top, "bf16"),
        "engine fp32, prefix cache": engine(top, "fp32", prefix_memory=2**29),
        "engine bf16, prefix cache": engine(top, "bf16", prefix_memory=2**29),
    }
    return compare(job, engines, rounds) + compare(top, engines_of_top, rounds, rebuilt=False)


def smollm2_rows(rounds: int, clients: int) -> list[dict[str, Any]]:
    """Four records of 32 to 96 random tokens a client, in batches of two."""
    rng = simulation_generator(0, "benchmark", "smollm2")
    cohort = [
        Records.from_lists([rng.integers(5, 40000, length) for length in rng.integers(32, 97, 4)], None)
        for _ in range(clients)
    ]
    local = jobs.ADAMW.replace(batch_size=2)
    job = jobs.Job("all 30 layers", jobs.smollm2, jobs.LLAMA_SPEC, cohort, local, make_task("causal-lm"))
    top = replace(job, name="top 6 layers", spec=replace(job.spec, layers=SMOLLM2_TOP))
    works = {(job.name, IN_PLACE): jobs.plain_peft(job), (job.name, "engine"): engine(job, "fp32")}
    works |= {(top.name, IN_PLACE): jobs.plain_peft(top), (top.name, "engine"): engine(top, "fp32")}
    works[top.name, "engine, prefix cache"] = engine(top, "fp32", prefix_memory=2**29)
    updates, first = {}, {}
    for key, work in works.items():
        begun = time.process_time()
        updates[key] = work()
        first[key] = time.process_time() - begun
    found: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in works}
    for _ in range(rounds):
        for key, work in works.items():
            found[key].append(both_clocks(work))
    tokens = sum(int(records.lengths.sum()) for records in cohort)
    rows = []
    for (name, variant), times in found.items():
        truth = updates[name, IN_PLACE]
        (cpu, wall), (peft_cpu, peft_wall) = (zip(*each, strict=True) for each in (times, found[name, IN_PLACE]))
        rows.append(
            {
                "job": name,
                "variant": variant,
                **over_rounds([base / own for base, own in zip(peft_cpu, cpu, strict=True)]),
                **over_rounds([base / own for base, own in zip(peft_wall, wall, strict=True)], "wall_ratio"),
                "cpu_seconds": (seconds := statistics.median(cpu)),
                "wall_seconds": (on_the_wall := statistics.median(wall)),
                "first_cpu_seconds": first[name, variant],
                "tokens_per_cpu_second": tokens / seconds,
                "clients_per_second": len(cohort) / seconds,
                "tokens_per_wall_second": tokens / on_the_wall,
                "difference": float((updates[name, variant] - truth).norm() / truth.norm()),
                "rounds": rounds,
            }
        )
    return rows


def main(
    sst2: jobs.Sst2 = None,
    part: Annotated[Literal["all", "ratios", "smollm2"], typer.Option(help="what to measure")] = "all",
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    facts = {"data": jobs.data_name(sst2), "seeds": [0]}
    if part in ("all", "ratios"):
        rounds, tiny_clients, minilm_clients = (1, 4, 2) if quick else (5, 128, 48)
        found = tiny_rows(rounds, tiny_clients) + minilm_rows(rounds, minilm_clients, sst2)
        say_ratios(found)
        if not quick:
            write_ratios("engine-speed", {**facts, "ratios": found}, "ratios")
    if part in ("all", "smollm2"):
        before = os.getloadavg()
        rows = smollm2_rows(1, 1) if quick else smollm2_rows(3, 4)
        say(*rows)
        if not quick:
            capability = torch.backends.cpu.get_cpu_capability()
            facts = {"load_before": before, "capability": capability, "seeds": [0]}
            write_ratios("engine-smollm2", {**facts, "rows": rows}, "rows")


if __name__ == "__main__":
    typer.run(main)
