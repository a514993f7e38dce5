"""Whole rounds on Flower and Ray: Lacquer beside the usual way.

Run: `python -m simulations.benchmarks engine.against_flower [--sst2 train.parquet] [--quick]`.

Lacquer (one message per worker, the cohort engine, ledger, noise) beside Flower's FedAvg (one message per client, PEFT
in the ClientApp, no privacy), once with a model kept in each process and once with one loaded per message. Both run on
one Flower, one Ray, the same actors, the same clients, and take turns round by round: this module is the ServerApp of
that run too, and ``flower_client.py`` its ClientApp. Wall time is that of the whole round; CPU time is that of the
server's process and all that descend from it, Ray's own included.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import typer
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from privacy.ledger.ledger import Ledger
from server.config.load import load, parse
from server.config.schema import RunConfig
from server.run_folder.names import LEDGER_FILE
from server.run_folder.telemetry import Telemetry
from server.runs.assembly import Assembly, assemble_client_level, connected_nodes, make_strategy
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.harness.timing import one_thread, over_rounds
from simulations.engines.launcher import run_flower
from simulations.engines.staging import App
from strategies.controllers.controller import PublicSignals

APP = App("simulations.benchmarks.engine.against_flower", "simulations.benchmarks.engine.flower_client")
LACQUER, KEPT, REBUILT = "lacquer", "Flower, model kept", "Flower, model loaded per message"
MEASURED_FILE = "measured.json"
RECORDS = 30

Measured = dict[str, list[dict[str, float]]]

app = ServerApp()


@app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the cycles and leave `measured.json` in the run folder: one list of rounds per variant."""
    torch.set_num_threads(1)
    config, folder = load(Path(str(context.run_config["config-file"]))), Path(str(context.run_config["run-folder"]))
    with Telemetry(folder) as telemetry:
        telemetry.status("running", "measuring")
        together = config.simulation.model_copy(update={"clients_per_node": 0})
        assembly = assemble_client_level(config.model_copy(update={"simulation": together}))
        connected_nodes(grid, config.clients)
        with Ledger.create(folder / LEDGER_FILE, assembly.commitment) as ledger:
            strategy = make_strategy(assembly, folder, config.engine.workers, ledger)
            strategy.begin(assembly.start, PublicSignals(0, 1.0))
            usual = Usual(assembly, grid)

            def lacquer(round: int) -> int:
                messages = list(strategy.configure_train(round, ArrayRecord(), ConfigRecord(), grid))
                replies = list(grid.send_and_receive(messages, timeout=config.engine.round_timeout))
                strategy.aggregate_train(round, replies)
                strategy.observe(PublicSignals(round, 1.0))
                return len(messages)

            variants: dict[str, Callable[[int], int]] = {
                LACQUER: lacquer,
                KEPT: lambda round: usual.round(round, rebuild=False),
                REBUILT: lambda round: usual.round(round, rebuild=True),
            }
            measured: Measured = {name: [] for name in variants}
            for round in range(1, config.rounds + 1):
                for name, work in variants.items():
                    telemetry.status("running", f"cycle {round} of {config.rounds}: {name}")
                    measured[name].append(time_round(work, round))
        (folder / MEASURED_FILE).write_text(json.dumps(measured), encoding="utf-8")
        telemetry.status("completed", "measured")


class Usual:
    """Flower's own FedAvg, one message per client."""

    def __init__(self, assembly: Assembly, grid: Grid) -> None:
        self._grid = grid
        self._job = assembly.job.to_json()
        self._timeout = assembly.config.engine.round_timeout
        self._strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
        self._arrays = ArrayRecord(assembly.layout.tensors(assembly.start))

    def round(self, number: int, *, rebuild: bool) -> int:
        """One round over all clients; how many messages it took."""
        config = ConfigRecord({"rebuild": rebuild, "job": self._job})
        messages = list(self._strategy.configure_train(number, self._arrays, config, self._grid))
        replies = list(self._grid.send_and_receive(messages, timeout=self._timeout))
        arrays, _ = self._strategy.aggregate_train(number, replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if arrays is None or failed or len(replies) < len(messages):
            raise RuntimeError(f"{len(replies)} of {len(messages)} clients answered; errors: {failed[:1]}")
        self._arrays = arrays
        return len(messages)


def time_round(work: Callable[[int], int], round: int) -> dict[str, float]:
    """Wall and CPU seconds of one round, and its messages."""
    began, before = time.monotonic(), processor_seconds()
    messages = work(round)
    return {"wall": time.monotonic() - began, "cpu": processor_seconds() - before, "messages": messages}


def processor_seconds() -> float:
    """CPU seconds of this process and of all its living descendants so far."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            times: Any = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def configuration(folder: Path, clients: int, cycles: int, model: str, sst2: Path | None, workers: int) -> RunConfig:
    """All clients take part in every round; 30 records each; LoRA of rank 8 on every layer, AdamW."""
    data: dict[str, Any] = {"partition": "iid", "validation-records": 100, "test-records": 100}
    if sst2 is None:
        data |= {"source": "notes", "records-per-client": RECORDS}
    else:
        data |= {"source": f"parquet:{subset(folder, sst2, clients * RECORDS + 200)}", "text-column": "sentence"}
    return parse(
        {
            "rounds": cycles,
            "clients": clients,
            "sampling-rate": 1.0,
            "privacy": {"delta": 1e-5},
            "strategy": {"controller": "fixed"},
            "model": {"name": model, "rank": 8, "alpha": 16.0, "max-length": 64},
            "data": {**data, "cache": str(folder / "cache")},
            "local": {"optimizer": "adamw", "learning-rate": 1e-3, "batch-size": 10},
            "engine": {"workers": workers},
            "simulation": {"clients-per-node": 1},
        }
    )


def subset(folder: Path, sst2: Path, records: int) -> Path:
    """Write some of the records, evenly spaced, to a file of their own."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(sst2, columns=["sentence", "label"])
    path = folder / "subset.parquet"
    parquet.write_table(table.take([i * (len(table) // records) for i in range(records)]), path)
    return path


def measure(clients: int, cycles: int, model: str, sst2: Path | None, workers: int = 2) -> Measured:
    """Rounds of every variant; the first cycle warms everything up and is left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        run_flower(configuration(Path(folder), clients, cycles, model, sst2, workers), run, app=APP)
        measured: Measured = json.loads((run / MEASURED_FILE).read_text(encoding="utf-8"))
    return {name: rounds[1:] for name, rounds in measured.items()}


def rows(measured: Measured, clients: int) -> list[dict[str, Any]]:
    """Lacquer's speed over that of each usual way, within each cycle."""
    found = []
    for other in (KEPT, REBUILT):
        pairs = list(zip(measured[other], measured[LACQUER], strict=True))
        row: dict[str, Any] = {"variant": LACQUER, "reference": other, "clients": clients, "rounds": len(pairs)}
        for clock in ("wall", "cpu"):
            row |= over_rounds([theirs[clock] / ours[clock] for theirs, ours in pairs], f"{clock}_ratio")
            row[f"{clock}_seconds"] = median(ours[clock] for _, ours in pairs)
            row[f"reference_{clock}_seconds"] = median(theirs[clock] for theirs, _ in pairs)
        row |= {"messages": measured[LACQUER][0]["messages"], "reference_messages": measured[other][0]["messages"]}
        found.append(row)
    return found


def main(
    sst2: jobs.Sst2 = None,
    clients: Annotated[int, typer.Option(help="clients in every round")] = 100,
    cycles: Annotated[int, typer.Option(help="rounds of every variant, the first not counted")] = 4,
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results; generated notes where there is no SST-2."""
    one_thread()
    measured = measure(6, 2, "random:bert", None) if quick else measure(clients, cycles, "minilm", sst2)
    found = rows(measured, 6 if quick else clients)
    for row in found:
        say(
            f"{row['variant']} is {row['wall_ratio']:.1f} times as fast as {row['reference']} (CPU "
            f"{row['cpu_ratio']:.1f}): {row['wall_seconds']:.1f} s beside {row['reference_wall_seconds']:.1f} s a "
            f"round, {row['messages']:.0f} messages beside {row['reference_messages']:.0f}"
        )
    if not quick:
        data = "SST-2" if sst2 is not None else "generated notes"
        write("engine-flower", {"data": data, "seeds": [0], "workers": 2, "rows": found, "measured": measured})


if __name__ == "__main__":
    typer.run(main)
