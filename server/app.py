"""The ServerApp: reads the run's configuration, runs it, and leaves its folder complete, whatever happens."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from privacy.ledger import Ledger
from server.artefacts import RunResult, write_artefacts
from server.assembly import LEDGER_FILE, assemble, connected_nodes, make_strategy
from server.config import ConfigError, RunConfig, load, parse, unflatten
from server.environment import write_environment
from server.evaluation import on_workers
from server.loop import run_rounds
from server.public import PublicTraining
from server.telemetry import Telemetry
from strategies.controller import PublicSignals

log = logging.getLogger(__name__)

app = ServerApp()
SPECIAL_KEYS = ("config-file", "run-folder")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what ``context.run_config`` describes."""
    config = configuration(context.run_config)
    given = str(context.run_config.get("run-folder", ""))
    folder = Path(given) if given else Path(config.output).expanduser().resolve() / f"{config.name}-{context.run_id}"
    folder.mkdir(parents=True, exist_ok=True)
    with Telemetry(folder) as telemetry:
        try:
            run(config, folder, grid, telemetry)
        except BaseException as error:
            telemetry.status("failed", f"{type(error).__name__}: {error}")
            raise


def configuration(run_config: Mapping[str, Any]) -> RunConfig:
    """The configuration of a Flower run: the file it names, else its flat keys."""
    if file := str(run_config.get("config-file", "")):
        return load(Path(file))
    return parse(unflatten({key: value for key, value in run_config.items() if key not in SPECIAL_KEYS}))


def run(config: RunConfig, folder: Path, grid: Grid, telemetry: Telemetry) -> None:
    """One run from configuration to artefacts."""
    started = time.monotonic()
    telemetry.status("preparing", "preparing data, model and noise")
    (folder / "config.toml").write_text(config.to_toml())
    write_environment(folder)
    assembly = assemble(config)
    if (folder / LEDGER_FILE).exists():
        raise ConfigError(f"run-folder = {str(folder)!r} already holds a run; a ledger is never overwritten")
    public = PublicTraining.of(assembly)
    ledger = Ledger.create(folder / LEDGER_FILE, assembly.commitment)
    try:
        telemetry.status("preparing", "waiting for workers")
        expected = config.clients if config.simulation.clients_per_node else config.engine.workers
        nodes = connected_nodes(grid, expected)
        strategy = make_strategy(assembly, folder, nodes, ledger, public if config.public.subspace else None)
        if config.public.warm_start_epochs:
            telemetry.status("preparing", "warm start on public records")
        start = public.warm_start(assembly.start)
        splits = {"validation": (public.used, len(assembly.data.validation)), "test": (0, len(assembly.data.test))}
        workers = min(nodes, 64)
        evaluate = on_workers(grid, workers, assembly.job.to_json(), splits, config.engine.round_timeout)
        telemetry.status("preparing", "first evaluation")
        strategy.begin(start, PublicSignals(0, evaluate(start, "validation").loss))
        refusal = run_rounds(strategy, grid, evaluate, config, telemetry, folder)
        assert strategy.state is not None
        telemetry.status("running", "evaluating on the test set")
        result = RunResult(
            validation=evaluate(strategy.state.served, "validation"),
            test=evaluate(strategy.state.served, "test"),
            rounds_done=strategy.state.round,
            seconds=time.monotonic() - started,
            stopped=refusal,
        )
        write_artefacts(folder, assembly, strategy.state, ledger, result)
    finally:
        ledger.close()
    telemetry.status("stopped-budget" if refusal else "completed", refusal or f"{config.rounds} rounds done")
