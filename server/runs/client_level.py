"""A run over clients: a server that is trusted with sums (or, with secure sums, with nothing) adds what they moved."""

from flwr.serverapp import Grid
from torch import Tensor

from server.evaluation.metrics import Evaluate, on_server, on_workers
from server.evaluation.rouge import adapter_rouge
from server.network.grid import answers, roster
from server.run_folder.names import ROSTER_FILE
from server.runs import guarantee
from server.runs.artefacts import Final, Outcome
from server.runs.assembly import (
    Assembly,
    CommittedAssembly,
    assemble,
    connected_nodes,
    make_strategy,
    secure_aggregation,
)
from server.runs.lifecycle import Run
from server.runs.loop import Loop
from server.runs.public_data import PublicTraining


def run_client_level(run: Run, grid: Grid) -> None:
    """One run from configuration to artefacts."""
    run.status("preparing data, model and noise")
    config, assembly = run.config, assemble(run.config, run.folder)
    public = PublicTraining.of(assembly)
    run.note_start(assembly.data, assembly.commitment)
    with run.paying(assembly.commitment) as ledger:
        nodes, evaluate = _connected(run, assembly, grid, public.used)
        strategy = make_strategy(assembly, run.folder, nodes, ledger)
        strategy.secure = secure_aggregation(config, run.folder, grid, ledger)
        strategy.grid = grid
        strategy.exchange = lambda messages: answers(grid, messages, config.engine.round_timeout)
        loop = Loop(
            strategy,
            evaluate,
            run.telemetry,
            run.folder,
            config.rounds,
            config.privacy.epsilon,
            evaluated=lambda round: round % config.evaluation.every == 0 or round == config.rounds,
            clock=run.clock,
        )
        stopped = run.train(loop, lambda: public.warm_start(assembly.start), assembly.start)
        run.telemetry.status("running", "evaluating on the test set")
        outcome = finished(run, assembly, loop, stopped)
        run.finish(outcome, guarantee.client_level(config, ledger), f"{config.rounds} rounds done")


def finished(run: Run, assembly: CommittedAssembly, loop: Loop, stopped: str | None) -> Outcome:
    """What a private training came to, on public data."""
    served: Tensor = loop.state.served
    rouge = adapter_rouge(run.config, assembly.data.test, served, assembly.layout, assembly.spec, run.telemetry)
    return Outcome(
        adapter=Final(served, assembly.layout, assembly.spec),
        validation=loop.evaluate(served, "validation"),
        test=loop.evaluate(served, "test"),
        data=assembly.data,
        rounds_done=loop.state.round,
        seconds=run.clock.taken().run,
        stopped=stopped,
        dimension=max(map(sum, assembly.setting.layouts)),
        rouge=rouge,
    )


def _connected(run: Run, assembly: Assembly, grid: Grid, used: int) -> tuple[int | tuple[int, ...], Evaluate]:
    """Nodes, and the evaluation on public data but the first ``used`` records of validation."""
    config, data = run.config, assembly.data
    splits = {"validation": (used, len(data.validation)), "test": (0, len(data.test))}
    if config.deployed:
        run.status("waiting for nodes")
        return roster(run.folder / ROSTER_FILE, grid, config.clients), on_server(assembly.job, data, splits)
    run.status("waiting for workers")
    nodes = connected_nodes(grid, config.clients if config.simulation.clients_per_node else config.engine.workers)
    tokens = {part: data.predicted_tokens(part, *rows) for part, rows in splits.items()}
    timeout = config.engine.round_timeout
    return nodes, on_workers(grid, min(nodes, 64), assembly.job.to_json(), splits, timeout, tokens)
