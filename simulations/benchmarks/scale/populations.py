"""What a population with records of its own costs: preparing them, and a round of training, from 10^3 to 10^6 clients.

Run: `python -m simulations.benchmarks scale.populations SST2 [--quick]`, about ten minutes and 2 GB of memory.

SST2 is the parquet file of SST-2's training phrases. Every client has two records, each two phrases side by side, and
no two records are alike; a column names the client (``data.partition = "natural"``). Every population is prepared in a
process of its own, which reads, holds out whole clients, tokenises, sorts by client and writes; then another one trains
some rounds of a whole run on the memory-mapped files: MiniLM's top layer, 50 clients expected in a round, evaluation
left out of it. Peak memory counts above that of the process before, after the imports of this module.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import typer

from client.data.prepare import prepare
from server.config.load import parse
from server.config.schema import RunConfig
from server.run_folder.telemetry import read_metrics
from server.runs.assembly import data_spec
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.engine.tables import machine, mebibytes
from simulations.benchmarks.harness.markdown import Columns
from simulations.benchmarks.harness.markdown import table as rows_of
from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.harness.timing import growth, in_own_process
from simulations.engines.inprocess import run_inprocess

POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
COHORT, RECORDS, HELD_OUT, ROUNDS = 50, 2, 200, 8


def configuration(population: int, source: Path, cache: Path) -> RunConfig:
    """A run of the whole population on records of its own."""
    return parse(
        {
            "rounds": ROUNDS,
            "clients": population,
            "sampling-rate": COHORT / population,
            "privacy": {"epsilon": 2.0, "delta": 0.1 / population},
            "strategy": {"controller": "fixed"},
            "model": {"name": "minilm", "layers": 1, "rank": 4, "max-length": 64},
            "data": {
                "source": f"parquet:{source}",
                "text-column": "text",
                "label-column": "label",
                "client-column": "client",
                "partition": "natural",
                "cache": str(cache),
                "validation-records": HELD_OUT,
                "test-records": HELD_OUT,
            },
            "evaluation": {"every": ROUNDS},
            "engine": {"kind": "inprocess"},
        }
    )


def write_source(path: Path, clients: int, phrases: Path) -> None:
    """Two records for every client: the k-th is phrase k beside another one, which changes with every turn."""
    table = parquet.read_table(phrases, columns=["sentence", "label"])
    texts, labels = table["sentence"].to_pylist(), np.asarray(table["label"])
    schema = pyarrow.schema([("text", pyarrow.string()), ("label", pyarrow.int64()), ("client", pyarrow.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, clients * RECORDS, 100_000):
            row = np.arange(start, min(start + 100_000, clients * RECORDS))
            first = row % len(texts)
            second = (row // len(texts) + first + 1) % len(texts)
            pairs = [f"{texts[one].strip()} . {texts[two].strip()}" for one, two in zip(first, second, strict=True)]
            names = [f"user-{number:07d}" for number in row // RECORDS]
            writer.write_table(pyarrow.table([pairs, labels[first], names], schema=schema))


def prepared(config: RunConfig) -> dict[str, Any]:
    """What preparing costs a process that has only imported this module."""
    wall, cpu = time.perf_counter(), time.process_time()
    grown = growth(lambda: prepare(data_spec(config)))
    return {
        "prepare_seconds": time.perf_counter() - wall,
        "prepare_cpu_seconds": time.process_time() - cpu,
        "prepare_bytes": grown,
        "opened_seconds": timed_opening(config),
    }


def timed_opening(config: RunConfig) -> float:
    """Seconds in which prepared data are found again, every file's digest checked."""
    start = time.perf_counter()
    prepare(data_spec(config))
    return time.perf_counter() - start


def trained(config: RunConfig) -> dict[str, Any]:
    """Rounds of a whole run; the first, which warms caches up, and the last, which evaluates, do not count."""
    with tempfile.TemporaryDirectory() as folder:
        grown = growth(lambda: run_inprocess(config, Path(folder)))
        seconds = [record.seconds for record in read_metrics(Path(folder)) if record.phase == "round"]
    counted = seconds[1:-1]
    return {
        "round_seconds": statistics.median(counted),
        "lowest_round_seconds": min(counted),
        "highest_round_seconds": max(counted),
        "rounds": len(counted),
        "run_bytes": grown,
    }


def measure(population: int, phrases: Path) -> dict[str, Any]:
    """One population, each part of it in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        source, cache = Path(scratch) / "records.parquet", Path(scratch) / "cache"
        held_out = 2 * HELD_OUT // RECORDS
        write_source(source, population + held_out, phrases)
        config = configuration(population, source, cache)
        row = {"population": population, "records": population * RECORDS, "source_bytes": source.stat().st_size}
        row |= in_own_process(prepared, config)
        row |= {"prepared_bytes": sum(path.stat().st_size for path in cache.rglob("*.npy"))}
        row |= in_own_process(trained, config)
        shutil.rmtree(cache)
    return row


def slopes(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By which power of the population each cost grows, over the last two populations of the table."""
    before, last = rows[-2:]
    more = np.log(last["population"] / before["population"])
    names = ("prepare_cpu_seconds", "prepare_bytes", "prepared_bytes", "round_seconds", "run_bytes")
    return {name: float(np.log(last[name] / before[name]) / more) for name in names}


def table(results: Mapping[str, Any]) -> str:
    """What preparing and a round cost as a population with records of its own grows."""
    columns: Columns = {
        "clients": "{population:,}",
        "records": "{records:,}",
        "preparing them": "{prepare_seconds:.1f} s",
        "CPU": "{prepare_cpu_seconds:.1f} s",
        "its memory": mebibytes("prepare_bytes"),
        "files": mebibytes("prepared_bytes"),
        "opening them": "{opened_seconds:.2f} s",
        "a round": "{round_seconds:.2f} s ({lowest_round_seconds:.2f}-{highest_round_seconds:.2f})",
        "memory of the run": mebibytes("run_bytes"),
    }
    power = {name: f"N^{value:.2f}" for name, value in results["slopes"].items()}
    grows = (
        f"From the last row but one to the last, with N clients, CPU of preparing grows as "
        f"{power['prepare_cpu_seconds']}, its memory as {power['prepare_bytes']}, a round as "
        f"{power['round_seconds']}, memory of the run as {power['run_bytes']}. {results['cohort']} clients are "
        f"expected in a round."
    )
    return f"{rows_of(results['rows'], columns)}\n{grows}\n{machine(results)}"


def main(
    sst2: Annotated[Path, typer.Argument(help="SST-2's training phrases, a parquet file", exists=True)],
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results."""
    before = os.getloadavg()
    rows = [measure(population, sst2.resolve()) for population in ((200, 400) if quick else POPULATIONS)]
    found = {"load_before": before, "seeds": [0], "cohort": COHORT, "rows": rows, "slopes": slopes(rows)}
    say(found)
    if not quick:
        write("scale-populations", found)


if __name__ == "__main__":
    typer.run(main)
