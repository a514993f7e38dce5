"""A run over clients: a server trusted with sums, or with nothing where sums are secure, adds their updates."""

import json

from flwr.serverapp import Grid
from torch import Tensor

from privacy.commitment import Commitment
from privacy.events import Poisson
from server.evaluation.private import PrivateEvaluation, default_bound
from server.network.grid import exchange_messages, node_names
from server.network.joining import join_nodes
from server.run_folder.names import CLIENTS_FILE, ROSTER_FILE
from server.run_folder.round_record import Presence
from server.runs import guarantee
from server.runs.artefacts import Final
from server.runs.assembly import assemble_client_level, make_strategy, secure_aggregation
from server.runs.commitment import held_out_sampling, round_sampling
from server.runs.lifecycle import Run, best_round, connect_trainers, ending_words, training_outcome
from server.runs.loop import Loop
from server.runs.public_data import PublicTraining
from strategies.dp_fedavg import DpFedAvg
from strategies.messages import own_clients
from strategies.messages.own_clients import JoinRequest, PlannedDraws


def presence(run: Run, strategy: DpFedAvg) -> Presence | None:
    """The nodes that were connected before the last draw; with secure sums, also how many are in the sum.

    None in a simulation.
    """
    nodes, away = strategy.nodes, strategy.away
    if isinstance(nodes, int) or away is None:
        return None
    called = zip(nodes, node_names(run.folder / CLIENTS_FILE, nodes), strict=True)
    missing = "; ".join(f"{name}: not connected" for node, name in called if node in away)
    handed_in = None if strategy.secure is None else strategy.secure.handed_in
    return Presence(len(nodes), len(nodes) - len(away), handed_in, missing)


def clients_of_nodes(run: Run, grid: Grid, nodes: int | tuple[int, ...], request: JoinRequest) -> tuple[int, ...]:
    """The number of clients at each node of a deployment. Empty where every node is one client, and in a simulation."""
    config = run.config
    if isinstance(nodes, int) or not config.data.nodes:
        return ()
    run.status("nodes join with their clients")
    timeout = config.engine.round_timeout
    return join_nodes(run.folder / ROSTER_FILE, grid, nodes, request, clients=config.clients, timeout=timeout)


def planned_draws(commitment: Commitment, rounds: int, sampling: Poisson) -> dict[str, PlannedDraws]:
    """The most draws of a run by label of releases, for nodes that hold requests against it.

    In filter mode a round that is lost may be done again within the budget, so each label has as many draws once more.
    """
    if commitment.mode == "filter":
        return {"histogram": PlannedDraws((sampling,), 2), "round": PlannedDraws((sampling,), 2 * rounds)}
    return own_clients.planned_draws(commitment)


def run_client_level(run: Run, grid: Grid) -> None:
    """Run a training over clients from configuration to artefacts."""
    run.status("preparing data, model and noise")
    config, assembly = run.config, assemble_client_level(run.config, run.folder)
    public = PublicTraining.of(assembly)
    run.note_start(assembly.data, assembly.commitment)
    with run.hold_ledger(assembly.commitment) as ledger:
        nodes, evaluate = connect_trainers(run, assembly, grid, public.num_records)
        draws = planned_draws(assembly.commitment, config.rounds, round_sampling(config))
        joining = JoinRequest(ledger.run_id, assembly.job.to_json(), draws, json.dumps(assembly.commitment.to_json()))
        held = clients_of_nodes(run, grid, nodes, joining)
        strategy = make_strategy(assembly, run.folder, nodes, ledger, held)
        strategy.secure = secure_aggregation(config, run.folder, grid, ledger)
        strategy.grid = grid
        strategy.tell = lambda text: run.telemetry.status("running", text)
        strategy.exchange = lambda messages: exchange_messages(grid, messages, config.engine.round_timeout)

        def keep(served: Tensor) -> None:
            if run.kept is None:
                listed = strategy.secure.federation.commitment if strategy.secure else None
                statement = guarantee.client_level_statement(config, ledger, listed, held)
                run.keep(Final(served, assembly.layout, assembly.spec), statement, assembly.data)

        asked = config.evaluation
        held_out = None
        if asked.data == "private":
            step = next(step for step in assembly.commitment.floor if step.label == "evaluation")
            bound = asked.loss_bound or default_bound(assembly.data.num_labels, config.model.task)
            classes = assembly.data.num_labels if asked.confusion else 0
            held_out = PrivateEvaluation(held_out_sampling(config), step.noise_multiplier, bound, classes, asked.tokens)
        loop = Loop(
            strategy,
            evaluate,
            run.telemetry,
            run.folder,
            config.rounds,
            config.privacy.epsilon,
            evaluated=lambda round: round % config.evaluation.every == 0 or round == config.rounds,
            clock=run.clock,
            presence=lambda: presence(run, strategy),
            watched=run.canary_watcher(config.clients),
            complete=keep,
            private=None if held_out is None else lambda: held_out.measure(strategy),
            best=best_round(config, run.folder),
        )
        stopped = run.train(loop, lambda: public.warm_start(assembly.start), assembly.start)
        run.finish(training_outcome(run, assembly, loop, stopped), ending_words(loop))
