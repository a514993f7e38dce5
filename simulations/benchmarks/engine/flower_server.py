"""The ServerApp of `against_flower.py`: rounds of Lacquer and of Flower's FedAvg in turn, on one grid.

One cycle is a round of Lacquer (a message per worker, ledger, noise) and a round of plain FedAvg with a message per
client, once with a model kept in each process and once with one loaded per message. Wall time is that of the whole
round; CPU time is that of this process and all that descend from it, Ray's own included.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from privacy.ledger.ledger import Ledger
from server.config.load import load
from server.run_folder.names import LEDGER_FILE
from server.run_folder.telemetry import Telemetry
from server.runs.assembly import Assembly, assemble, connected_nodes, make_strategy
from strategies.controllers.controller import PublicSignals

LACQUER, KEPT, REBUILT = "lacquer", "Flower, model kept", "Flower, model loaded per message"
MEASURED_FILE = "measured.json"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the cycles and leave `measured.json` in the run folder: one list of rounds per variant."""
    config, folder = load(Path(str(context.run_config["config-file"]))), Path(str(context.run_config["run-folder"]))
    with Telemetry(folder) as telemetry:
        telemetry.status("running", "measuring")
        together = config.simulation.model_copy(update={"clients_per_node": 0})
        assembly = assemble(config.model_copy(update={"simulation": together}))
        connected_nodes(grid, config.clients)
        with Ledger.create(folder / LEDGER_FILE, assembly.commitment) as ledger:
            strategy = make_strategy(assembly, folder, config.engine.workers, ledger)
            strategy.begin(assembly.start, PublicSignals(0, 1.0))
            usual = Usual(assembly, grid)
            measured: dict[str, list[dict[str, float]]] = {LACQUER: [], KEPT: [], REBUILT: []}

            def lacquer(round: int) -> int:
                messages = list(strategy.configure_train(round, ArrayRecord(), ConfigRecord(), grid))
                strategy.aggregate_train(
                    round, list(grid.send_and_receive(messages, timeout=config.engine.round_timeout))
                )
                strategy.observe(PublicSignals(round, 1.0))
                return len(messages)

            variants: dict[str, Callable[[int], int]] = {
                LACQUER: lacquer,
                KEPT: lambda round: usual.round(round, rebuild=False),
                REBUILT: lambda round: usual.round(round, rebuild=True),
            }
            for round in range(1, config.rounds + 1):
                for name, work in variants.items():
                    telemetry.status("running", f"cycle {round} of {config.rounds}: {name}")
                    measured[name].append(timed(work, round))
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


def timed(work: Callable[[int], int], round: int) -> dict[str, float]:
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


torch.set_num_threads(1)
