"""The ServerApp: reads the run's configuration, runs it or goes on with it, and leaves its folder complete."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, load, parse, unflatten
from server.config.schema import RunConfig
from server.evaluation.metrics import Evaluate, on_server, on_workers
from server.evaluation.rouge import adapter_rouge
from server.network.grid import roster
from server.run_folder.checkpoint import Checkpoint, Times, checkpoint_folder, load_checkpoint, save_checkpoint
from server.run_folder.names import CONFIG_FILE, LEDGER_FILE
from server.run_folder.progress import owned
from server.run_folder.provenance import write_environment
from server.run_folder.resume import Resumed, check_same_run, check_silos, claim, note_resumed, write_origin
from server.run_folder.telemetry import Telemetry
from server.runs.artefacts import RunResult, write_artefacts
from server.runs.assembly import Assembly, assemble, connected_nodes, make_strategy, secure_aggregation
from server.runs.cross_silo import run_cross_silo
from server.runs.loop import go_on, run_rounds
from server.runs.public_data import PublicTraining
from strategies.controllers.controller import PublicSignals
from strategies.dp_fedavg import DpFedAvg

log = logging.getLogger(__name__)

app = ServerApp()
SPECIAL_KEYS = ("config-file", "run-folder", "resume", "other-code")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what ``context.run_config`` describes, or go on with the run in the folder that its ``resume`` names."""
    keys = context.run_config
    config, resume, other_code = configuration(keys), str(keys.get("resume", "")), bool(keys.get("other-code", False))
    given = resume or str(keys.get("run-folder", ""))
    folder = Path(given) if given else Path(config.output).expanduser().resolve() / f"{config.name}-{context.run_id}"
    folder.mkdir(parents=True, exist_ok=True)
    if config.privacy.unit != "client":
        with owned(folder):
            check_silos(folder, resume=bool(resume))
            with held(folder, resume=False) as (telemetry, _):
                run_cross_silo(config, folder, grid, telemetry, resume=bool(resume), other_code=other_code)
        return
    with held(folder, resume=bool(resume)) as (telemetry, ledger):
        run(config, folder, grid, telemetry, ledger, other_code=other_code)


@contextmanager
def held(folder: Path, *, resume: bool) -> Iterator[tuple[Telemetry, Ledger | None]]:
    """A run's folder for its one owner: telemetry, and the ledger if it goes on. A failure is noted before it goes on.

    Raises:
        ConfigError: the folder already holds a run and this is another.
        CannotResume, CorruptRun: see :func:`server.run_folder.resume.claim`.
    """
    # Whoever holds the ledger owns the folder, so it comes before anything is written there.
    ledger = claim(folder) if resume else None
    if ledger is None and (folder / LEDGER_FILE).exists():
        raise ConfigError(f"run-folder = {str(folder)!r} already holds a run; a ledger is never overwritten")
    try:
        with Telemetry(folder) as telemetry:
            try:
                yield telemetry, ledger
            except BaseException as error:
                telemetry.status("failed", f"{type(error).__name__}: {error}")
                raise
    finally:
        if ledger is not None:
            ledger.close()


def configuration(run_config: Mapping[str, Any]) -> RunConfig:
    """The configuration of a Flower run: the file it names, that of the run it goes on with, else its flat keys."""
    if file := str(run_config.get("config-file", "")):
        return load(Path(file))
    if folder := str(run_config.get("resume", "")):
        return load(Path(folder) / CONFIG_FILE)
    return parse(unflatten({key: value for key, value in run_config.items() if key not in SPECIAL_KEYS}))


def run(
    config: RunConfig,
    folder: Path,
    grid: Grid,
    telemetry: Telemetry,
    ledger: Ledger | None = None,
    *,
    other_code: bool = False,
) -> None:
    """One run from configuration to artefacts.

    Args:
        ledger: of the run that goes on, held; None starts one.
        other_code: go on although the code has changed.
    """
    started = time.monotonic()
    telemetry.status("preparing", "preparing data, model and noise")
    assembly = assemble(config)
    changes: list[str] = []
    if ledger is not None:
        changes = check_same_run(config, assembly.data.folder.name, assembly.commitment, folder, ledger, other_code)
    (folder / CONFIG_FILE).write_text(config.to_toml())
    write_environment(folder)
    public = PublicTraining.of(assembly)
    if ledger is None:
        write_origin(folder, config, assembly.data.folder.name)
    with ledger or Ledger.create(folder / LEDGER_FILE, assembly.commitment) as ledger:
        telemetry.status("preparing", "waiting for nodes" if config.deployed else "waiting for workers")
        if config.deployed:
            nodes: int | tuple[int, ...] = roster(folder, grid, config.clients)
        else:
            nodes = connected_nodes(
                grid, config.clients if config.simulation.clients_per_node else config.engine.workers
            )
        strategy = make_strategy(assembly, folder, nodes, ledger)
        splits = {"validation": (public.used, len(assembly.data.validation)), "test": (0, len(assembly.data.test))}
        if isinstance(nodes, tuple):
            evaluate = on_server(assembly.job, assembly.data, splits)
        else:
            tokens = {part: assembly.data.predicted_tokens(part, *rows) for part, rows in splits.items()}
            timeout = config.engine.round_timeout
            evaluate = on_workers(grid, min(nodes, 64), assembly.job.to_json(), splits, timeout, tokens)
        strategy.secure = secure_aggregation(config, folder, grid, ledger)
        if checkpoint_folder(folder) is not None:
            before = _go_on(strategy, evaluate, assembly, telemetry, folder, changes)
        else:
            before = 0.0
            _begin(strategy, evaluate, assembly, telemetry, folder, public)

        def elapsed() -> float:
            return before + time.monotonic() - started

        refusal = run_rounds(strategy, grid, evaluate, config, telemetry, folder, elapsed=elapsed)
        _finish(strategy, evaluate, assembly, telemetry, folder, elapsed, refusal)
    telemetry.status("stopped-budget" if refusal else "completed", refusal or f"{config.rounds} rounds done")


def _begin(
    strategy: DpFedAvg,
    evaluate: Evaluate,
    assembly: Assembly,
    telemetry: Telemetry,
    folder: Path,
    public: PublicTraining,
) -> None:
    """From nothing to the state before the first release, which is checkpointed."""
    if assembly.config.public.warm_start_epochs:
        telemetry.status("preparing", "warm start on public records")
    start = public.warm_start(assembly.start)
    telemetry.status("preparing", "first evaluation")
    strategy.begin(start, PublicSignals(0, evaluate(start, "validation").loss))
    assert strategy.state is not None
    save_checkpoint(folder, Checkpoint.after(strategy.state, None, strategy.ledger.head, Times()))


def _go_on(
    strategy: DpFedAvg,
    evaluate: Evaluate,
    assembly: Assembly,
    telemetry: Telemetry,
    folder: Path,
    changes: list[str],
) -> float:
    """Back to where the last checkpoint left the run; the seconds it had taken."""
    strategy.begin(assembly.start, PublicSignals(0, 1.0))  # only for the form of a state
    assert strategy.state is not None
    first = strategy.state.round
    checkpoint = load_checkpoint(folder, strategy.state)
    round = checkpoint.state.round
    telemetry.status("preparing", f"resuming after round {max(round, 0)}")
    lost = len(strategy.ledger.charges) - (round - first)
    note_resumed(folder, Resumed(round, time.time(), lost, tuple(changes)))
    go_on(strategy, evaluate, assembly.config, telemetry, checkpoint)
    return checkpoint.taken.run


def _finish(
    strategy: DpFedAvg,
    evaluate: Evaluate,
    assembly: Assembly,
    telemetry: Telemetry,
    folder: Path,
    elapsed: Callable[[], float],
    refusal: str | None,
) -> None:
    """Test the served adapter and write what the run leaves behind."""
    assert strategy.state is not None
    served = strategy.state.served
    telemetry.status("running", "evaluating on the test set")
    validation, test = evaluate(served, "validation"), evaluate(served, "test")
    rouge = adapter_rouge(assembly.config, assembly.data.test, served, assembly.layout, assembly.spec, telemetry)
    result = RunResult(validation, test, strategy.state.round, elapsed(), refusal, rouge)
    write_artefacts(folder, assembly, strategy.state, strategy.ledger, result)
