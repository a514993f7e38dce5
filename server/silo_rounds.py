"""A federation of silos: in every round each silo that takes part does some private steps, and the server averages.

The server holds no ledger: every silo has its own, in its own folder, and refuses for itself. What the run states of
privacy is what the silos say of their commitments. A run that was broken off is not gone on with here: the silos would
count on, but nothing says which of their steps this server's adapter has seen.
"""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from client.silo_wire import ACTION, SiloReply, SiloRequest
from client.tasks import Metrics
from privacy.rng import simulation_generator
from server.assembly import connected_nodes
from server.config import RunConfig
from server.environment import write_environment
from server.evaluation import Evaluate, on_server, on_workers
from server.exchange import answers
from server.resume import CONFIG_FILE
from server.roster import roster
from server.silo_artefacts import Outcome, write_silo_artefacts
from server.silo_assembly import Federation, assemble_federation
from server.telemetry import RoundRecord, Telemetry
from strategies.dispatch import RoundFailed
from strategies.replies import sound_replies
from strategies.silo_fedavg import SiloAnswer, combine_of, next_adapter

log = logging.getLogger(__name__)

STATE = "silos"
"""In the run folder of a simulation: a folder for every silo's own ledger."""


@dataclass
class _Seen:
    """What the silos said.

    Attributes:
        silos: of themselves, by number.
        steps: taken by all of them, in all rounds.
        refusals: of those that took no step when last asked, why, by number.
    """

    silos: dict[int, SiloReply] = field(default_factory=dict)
    steps: int = 0
    refusals: dict[int, str] = field(default_factory=dict)


def run_federated_silos(config: RunConfig, folder: Path, grid: Grid, telemetry: Telemetry) -> None:
    """One federation of silos, from configuration to artefacts."""
    started = time.monotonic()
    telemetry.status("preparing", "preparing data and model")
    ready = assemble_federation(config)
    (folder / CONFIG_FILE).write_text(config.to_toml())
    write_environment(folder)
    telemetry.status("preparing", "waiting for nodes")
    nodes, evaluate = _connected(ready, folder, grid)
    adapter, seen, done = ready.described.start, _Seen(), 0
    while done < config.rounds and len(seen.refusals) < config.clients:
        round = done + 1
        start = time.monotonic()
        telemetry.status("running", f"round {round} of {config.rounds}")
        adapter = _round(ready, folder, grid, nodes, adapter, round, seen)
        metrics = None
        if round % config.evaluation.every == 0 or round == config.rounds:
            metrics = evaluate(adapter, "validation")
        telemetry.round(_record(ready, round, metrics, seen, time.monotonic() - start))
        done = round
    telemetry.status("running", "evaluating on the test set")
    outcome = Outcome(evaluate(adapter, "validation"), evaluate(adapter, "test"), done, _ended(seen, config.clients))
    write_silo_artefacts(folder, ready, adapter, outcome, seen.silos, time.monotonic() - started)
    telemetry.status("stopped-budget" if outcome.stopped else "completed", outcome.stopped or f"{done} rounds done")


def _ended(seen: _Seen, silos: int) -> str | None:
    """Why no silo takes part any more, or None."""
    if len(seen.refusals) < silos:
        return None
    return "no silo goes on: " + "; ".join(f"silo {silo}: {reason}" for silo, reason in sorted(seen.refusals.items()))


def _connected(ready: Federation, folder: Path, grid: Grid) -> tuple[tuple[int, ...], Evaluate]:
    """The node of every silo, and the evaluation on public data."""
    config, data = ready.config, ready.data
    splits = {"validation": (0, len(data.validation)), "test": (0, len(data.test))}
    if config.deployed:
        return roster(folder, grid, config.clients), on_server(ready.described.job, data, splits)
    each = config.simulation.clients_per_node == 1
    count = connected_nodes(grid, config.clients if each else config.engine.workers)
    ids = sorted(grid.get_node_ids())[:count]
    tokens = {part: data.predicted_tokens(part, *rows) for part, rows in splits.items()}
    job, timeout = ready.described.job.to_json(), config.engine.round_timeout
    evaluate = on_workers(grid, min(count, 64), job, splits, timeout, tokens)
    return tuple(ids[silo % len(ids)] for silo in range(config.clients)), evaluate


def _round(
    ready: Federation, folder: Path, grid: Grid, nodes: tuple[int, ...], adapter: Tensor, round: int, seen: _Seen
) -> Tensor:
    """The next adapter. Who is asked is drawn by the public seed: no amplification is claimed for it.

    Raises:
        RoundFailed: most of those that were asked failed, or no silo ever takes part.
    """
    config, steps = ready.config, ready.config.silo.steps
    drawn = simulation_generator(config.seed, "silos", round).random(config.clients) < config.sampling_rate
    sent, messages = [], []
    for silo in np.flatnonzero(drawn).tolist():
        request = SiloRequest(
            round, adapter.numpy(), steps, silo, ready.silo, ready.described.job.to_json(), str(folder / STATE)
        )
        message = Message(content=request.to_records(), message_type=f"train.{ACTION}", dst_node_id=nodes[silo])
        messages.append(message)
        sent.append((message.metadata, silo))
    found: list[SiloAnswer] = []

    def take(content: Any, silo: int) -> None:
        reply = SiloReply.from_records(content, round, len(adapter), steps)
        if reply.population:
            seen.silos[silo] = reply
        seen.steps += reply.steps
        seen.refusals.pop(silo, None)
        if not reply.steps:
            seen.refusals[silo] = reply.refused
        update = torch.from_numpy(reply.update) if reply.steps else None
        found.append(SiloAnswer(silo, update, reply.steps, reply.refused))

    sound = sound_replies(sent, answers(grid, messages, config.engine.round_timeout), round, take)
    if 2 * sound < len(sent):
        raise RoundFailed(
            f"round {round}: {sound} of {len(sent)} silos answered soundly, at least half must; the run's log names "
            "the others and the kind of failure, their own logs have the details; what a silo charged stays spent"
        )
    if not seen.steps and (ended := _ended(seen, config.clients)):
        raise RoundFailed(f"round {round}: {ended}; nothing was trained")
    combine = combine_of(ready.methods.aggregation)
    return next_adapter(adapter, found, combine, ready.described.layout, round)


def _record(ready: Federation, round: int, metrics: Metrics | None, seen: _Seen, seconds: float) -> RoundRecord:
    config, silos = ready.config, list(seen.silos.values())
    return RoundRecord(
        phase="round",
        round=round,
        rounds=config.rounds,
        epsilon_spent=max((silo.epsilon for silo in silos), default=0.0),
        epsilon_budget=config.privacy.epsilon,
        noise_multiplier=min((silo.noise_multiplier for silo in silos), default=0.0),
        expected_cohort=config.expected_cohort,
        seconds=seconds,
        validation_loss=None if metrics is None else metrics.loss,
        validation_accuracy=None if metrics is None else metrics.accuracy,
        not_private=ready.silo.not_private,
    )
