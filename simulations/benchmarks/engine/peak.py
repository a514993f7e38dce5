"""`python -m simulations.benchmarks.engine.peak [--sst2 train.parquet] [--quick]`: share of the machine's own peak.

Local training on MiniLM: operations of all its matrix products per second, beside those of a matrix product of MiniLM's
own shape, timed in turn with it on the same core with the same kernel.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

from client.engine.cohort import CohortEngine
from client.models.frozen_linear import BF16Weight, FrozenWeight, OneDnnWeight, PlainWeight
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.timing import one_thread, write


def peak_rows(rounds: int, clients: int, sst2: Path | None) -> list[dict[str, Any]]:
    """Matrix products of MiniLM's own shapes, timed alone and inside training, in turn.

    `share` counts real tokens only, `share_with_padding` what the hardware had to do.
    """
    cohorts = {
        "MiniLM, ragged SST-2": jobs.ragged_clients(clients, sst2),
        "MiniLM, 10 x 64": jobs.uniform_clients(max(1, clients // 4), 10, 64),
    }
    rows = []
    for name, cohort in cohorts.items():
        job = jobs.Job(name, jobs.minilm, jobs.SPEC, cohort, jobs.ADAMW)
        tokens = sum(int(records.lengths.sum()) for records in cohort)
        for precision, kind in (("fp32", OneDnnWeight), ("bf16", BF16Weight)):
            made, start = CohortEngine(job.make(), job.spec, jobs.TASK, precision=precision), job.start()
            made.train_all(start, cohort, job.local, job.seeds)
            padded, peaks, seconds = made.tokens_run, [], []
            for _ in range(rounds):
                peaks.append(product_peak(kind))
                began = time.process_time()
                made.train_all(start, cohort, job.local, job.seeds)
                seconds.append(time.process_time() - began)
            flops = training_flops(np.concatenate([records.lengths for records in cohort]))
            share = statistics.median(flops / own / peak for own, peak in zip(seconds, peaks, strict=True))
            rows.append(
                {
                    "job": name,
                    "precision": precision,
                    "share": share,
                    "share_with_padding": share * padded / tokens,
                    "training_gflops": flops / statistics.median(seconds) / 1e9,
                    "product_gflops": statistics.median(peaks) / 1e9,
                    "default_product_gflops": product_peak(PlainWeight) / 1e9,
                    "rounds": rounds,
                }
            )
    return rows


def training_flops(lengths: np.ndarray) -> float:
    """Operations of all matrix products in one training step over records of these lengths, no padding.

    Frozen products go forwards and backwards to their inputs (not in the first layer's query, key and value); attention
    takes two products forwards and four backwards, an adapter two and four. Everything elementwise counts as nothing.
    """
    hidden, intermediate, layers, rank, targets = 384, 1536, 6, 8, 2
    layer = 4 * hidden * hidden + 2 * hidden * intermediate
    frozen = 2.0 * (2 * layers * layer - 3 * hidden * hidden)
    adapters = layers * targets * 6 * 2.0 * rank * hidden
    attention = layers * 6 * 2.0 * hidden
    tokens = lengths.astype(np.float64)
    return float(tokens.sum() * (frozen + adapters) + (tokens**2).sum() * attention)


def product_peak(kind: Callable[[Tensor, Tensor | None], FrozenWeight], repeats: int = 40) -> float:
    """Operations per second of one core: 2,048 rows through 384 -> 1,536 columns, inputs ready in the right type."""
    weight = kind(torch.randn(1536, 384), None)
    x = torch.randn(2048, 384)
    if isinstance(weight, BF16Weight):
        x, weight.narrow = x.to(torch.bfloat16), True
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        weight.forward(x)
        seconds.append(time.process_time() - start)
    return 2 * 2048 * 384 * 1536 / statistics.median(seconds)


def main(
    sst2: Annotated[Path | None, typer.Option(help="train.parquet of SST-2; random tokens without it")] = None,
    quick: Annotated[bool, typer.Option(help="few clients and rounds: does it run at all?")] = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    peak = peak_rows(1, 2, sst2) if quick else peak_rows(5, 48, sst2)
    console = Console(width=160)
    for row in peak:
        shares = f"{row['share']:.2f}, with padding {row['share_with_padding']:.2f}"
        console.print(f"share of peak, {row['job']}, {row['precision']}: {shares}", highlight=False)
    if not quick:
        data = "SST-2" if sst2 is not None else "random tokens of SST-2's lengths"
        console.print(f"written to {write('engine-peak', {'data': data, 'seeds': [0], 'peak': peak})}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
