"""What a large population costs the server, and the wall time of one whole run.

Run: `python -m simulations.benchmarks engine.population [--run FOLDER] [--quick]`.

Populations: one round at a fixed expected cohort of 50 while the population grows from a hundred to a million: the
Poisson draw, the split of the cohort over workers by their tokens, the messages, the sum of the replies, the ledger's
write to disk, the noise, the server's step. It is the real server, assembled from a configuration with
``data.partition = "repeated"``; only the workers are not there: a grid in memory answers every message with the
mechanism's own contribution of fixed updates, outside the clock. Every population has a process of its own, the data
were prepared by another one before, and what counts is peak memory above the size after the imports of this module:
base model, data set and accounting included.

With ``--run FOLDER`` (SST-2 as ``train.parquet`` and ``validation.parquet``) only this: one whole run of preset
``sst2`` on Ray, 200 rounds, 1,000 clients, one worker a core. A wall time means something only if nothing else runs on
the machine: the load before the start is written down beside it. ``--quick`` tries both on very small models.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.supercore.task_identity import TaskIdentity

from client.data.prepare import prepare
from client.models.base import load_base
from privacy.clipping.units import Units
from privacy.contribution import contribute
from privacy.ledger.ledger import Ledger
from privacy.randomness.rng import torch_generator
from server.config.load import load, parse
from server.config.schema import RunConfig
from server.run_folder.names import LEDGER_FILE, RESULTS_FILE
from server.runs.assembly import assemble, data_spec, make_strategy
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.harness.timing import growth, in_own_process, one_thread, peak_memory
from simulations.engines.hardware import resources
from simulations.engines.inprocess import run_inprocess
from simulations.engines.launcher import run_flower
from simulations.presets.load import preset_files
from strategies.controllers.controller import PublicSignals
from strategies.messages.client_update import TrainRequest, contribution_records

POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
COHORT, WORKERS, PLANNED_ROUNDS = 50, 2, 200


class Answers:
    """A grid of workers in memory; an update is a fixed row of noise, whoever the client is."""

    def __init__(self) -> None:
        self.answered = 0

    def get_node_ids(self) -> list[int]:
        return list(range(1, WORKERS + 1))

    def send_and_receive(self, messages: Iterable[Message]) -> list[Message]:
        replies = []
        for message in messages:
            self.answered += 1
            message.metadata.__dict__["_message_id"] = str(self.answered)
            request = TrainRequest.from_records(message.content)
            rows = torch.randn(len(request.clients), request.plan.clip.params, generator=torch_generator(0, "updates"))
            total = contribute(Units(rows), request.plan)
            replies.append(Message(contribution_records(total, request.round), reply_to=message))
        return replies


def configuration(population: int, cache: Path, model: str, records: int = 20) -> RunConfig:
    """A run of the whole population on a small set of generated notes."""
    return parse(
        {
            "rounds": PLANNED_ROUNDS,
            "clients": population,
            "sampling-rate": COHORT / population,
            "privacy": {"delta": 0.1 / population, "non-private": True},  # clients share records
            "strategy": {"controller": "fixed"},
            "model": {"name": model},
            "data": {
                "partition": "repeated",
                "records-per-client": records,
                "cache": str(cache),
                "validation-records": 40,
                "test-records": 40,
            },
        }
    )


def rounds_of(config: RunConfig, folder: Path, rounds: int) -> tuple[list[dict[str, float]], int]:
    """Milliseconds of every round but the first (wall, CPU, and the draw with the messages alone); expected cohort."""
    assembly = assemble(config)
    grid: Any = Answers()
    measured = []
    with Ledger.create(folder / LEDGER_FILE, assembly.commitment) as ledger:
        strategy = make_strategy(assembly, folder, WORKERS, ledger)
        strategy.begin(assembly.start, PublicSignals(0, 1.0))
        for number in range(1, rounds + 1):
            wall, cpu = time.perf_counter(), time.process_time()
            messages = list(strategy.configure_train(number, ArrayRecord(), ConfigRecord(), grid))
            sent, sent_cpu = time.perf_counter(), time.process_time()
            replies = grid.send_and_receive(messages)
            back, back_cpu = time.perf_counter(), time.process_time()
            strategy.aggregate_train(number, replies)
            strategy.observe(PublicSignals(number, 1.0))
            end, end_cpu = time.perf_counter(), time.process_time()
            measured.append(
                {
                    "wall": 1e3 * (sent - wall + end - back),
                    "cpu": 1e3 * (sent_cpu - cpu + end_cpu - back_cpu),
                    "draw_and_messages": 1e3 * (sent - wall),
                }
            )
    return measured[1:], len(assembly.data.client_tokens)


def measure(population: int, rounds: int, cache: Path, model: str) -> dict[str, Any]:
    """One population, in the process of its own."""
    one_thread()
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # Flower's messages ask who they are from
    measured: list[dict[str, float]] = []

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            found, clients = rounds_of(configuration(population, cache, model), Path(folder), rounds)
        assert clients == population
        measured.extend(found)

    grown = growth(work)
    row: dict[str, Any] = {"population": population, "cohort": COHORT, "rounds": len(measured)}
    for name in ("wall", "cpu", "draw_and_messages"):
        values = [times[name] for times in measured]
        row |= {f"{name}_ms": statistics.median(values), f"highest_{name}_ms": max(values)}
    return {**row, "growth_bytes": grown, "peak_bytes": peak_memory()}


def population_rows(populations: tuple[int, ...], rounds: int, model: str) -> list[dict[str, Any]]:
    """One process per population."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for population in populations:
            prepare(data_spec(configuration(population, Path(cache), model)))
            found.append(in_own_process(measure, population, rounds, Path(cache), model))
    return found


SMALL_RUN = {
    "rounds": 2,
    "clients": 12,
    "sampling-rate": 0.5,
    "privacy.delta": 1e-3,
    "model.name": "random:bert",
    "model.layers": 0,
    "public.warm-start-epochs": 0,
    "data.source": "notes",
    "data.test-source": "",
    "data.text-column": "text",
    "data.validation-records": 20,
    "data.test-records": 20,
    "data.records-per-client": 4,
}


def timed_run(sst2: Path | None) -> dict[str, Any]:
    """One run of preset ``sst2`` on Ray; without SST-2 a few rounds of a very small model in this process."""
    with tempfile.TemporaryDirectory() as scratch:
        overrides: dict[str, Any] = {**SMALL_RUN, "data.cache": f"{scratch}/cache"}
        if sst2 is not None:
            files = {"data.source": "train.parquet", "data.test-source": "validation.parquet"}
            overrides = {key: f"parquet:{sst2.resolve() / name}" for key, name in files.items()}
        config, folder = load(preset_files()["sst2"], overrides), Path(scratch) / "run"
        folder.mkdir()
        load_before = os.getloadavg()[0]
        (run_inprocess if sst2 is None else run_flower)(config, folder)
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    model, _ = load_base(config.model.name, config.model.task, 2)
    return {
        "seconds": results["seconds"],
        "rounds": results["rounds_done"],
        "test_accuracy": results["test_accuracy"],
        "clients": config.clients,
        "expected_cohort": config.expected_cohort,
        "workers": resources(config).workers,
        "load_before": round(load_before, 2),
        "model": config.model.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "epsilon": config.privacy.epsilon,
        "seed": config.seed,
    }


def main(
    sst2: Annotated[Path | None, typer.Option("--run", file_okay=False, help="SST-2's files: one whole run")] = None,
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results."""
    if sst2 is None:
        found = population_rows((100, 1_000), 3, "random:bert") if quick else population_rows(POPULATIONS, 21, "minilm")
        for row in found:
            say(
                f"{row['population']:9,} clients: {row['wall_ms']:6.1f} ms a round (CPU {row['cpu_ms']:.1f}, draw and "
                f"messages {row['draw_and_messages_ms']:.1f}), {row['growth_bytes'] / 2**20:.0f} MiB for the run, "
                f"{row['peak_bytes'] / 2**20:.0f} MiB in all"
            )
        if not quick:
            write("engine-population", {"seeds": [0], "model": "MiniLM", "workers": WORKERS, "rows": found})
    if sst2 is not None or quick:
        run = timed_run(None if quick else sst2)
        say(f"{run['rounds']} rounds in {run['seconds'] / 60:.1f} minutes")
        if not quick:
            write("engine-full-run", run)


if __name__ == "__main__":
    typer.run(main)
