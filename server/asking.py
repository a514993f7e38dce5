"""Statistics of the private units of a federation: the same question to everybody who holds records, answered once.

- Clients that trust the server (simulated, or at nodes with many each): the server adds the noise to their sum, and the
  owner of a node with many debits what the server signs.
- Clients that do not (``privacy.trust = "secagg"``): each charges its own ledger and account, adds its share of the
  noise and masks; only the noisy sum is opened.
- Sites that protect their own records: each charges its own, answers with noise of its own, and the server adds up.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from client.data.columns.shares import parts_of
from client.data.prepare import prepare
from client.record_level.messages import SiteReply, SiteRequest
from client.record_level.settings import RecordLevelSettings
from client.record_level.statistics import ACTION, Question, price
from privacy import durable
from privacy.accountants import filter_commitment
from privacy.events import Poisson
from server.config.load import ConfigError
from server.config.methods import methods
from server.config.schema import RunConfig
from server.evaluation.statistics import answers, uncut
from server.network.grid import exchange_messages, node_names
from server.run_folder.names import ANSWERS_FILE, CLIENTS_FILE, QUESTION_FILE, SITES_FOLDER
from server.runs.assembly import (
    Assembly,
    data_spec,
    make_assembly,
    make_strategy,
    node_reading,
    secure_aggregation,
    with_noise,
)
from server.runs.client_level import clients_of_nodes
from server.runs.lifecycle import Run, connect_nodes, open_run
from strategies.calibration import Calibrated
from strategies.messages.dispatch import RoundFailed, sound_replies
from strategies.messages.own_clients import JoinRequest, planned_draws


@dataclass(frozen=True)
class Target:
    """The most that the answers may cost each unit."""

    epsilon: float
    delta: float

    def write_new(self, folder: Path) -> None:
        """Leave it in the new folder of a run, which then asks and does not train."""
        durable.new_folder(folder)
        durable.write(folder / QUESTION_FILE, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(folder: Path) -> "Target | None":
        """The target of a folder; None where the run trains."""
        file = folder / QUESTION_FILE
        return Target(**json.loads(file.read_text())) if file.is_file() else None


def refuse_unanswerable(config: RunConfig) -> None:
    """Refuse settings under which nobody has units to count.

    Raises:
        ConfigError: naming the setting.
    """
    if config.is_deployed and config.privacy.unit == "client" and not config.data.nodes and not config.noise_shares:
        raise ConfigError(
            "privacy.unit = 'client' with one client at every node: a node keeps its account for what it can hold "
            "against it only. Protect each node's records (privacy.unit = 'record' or 'group'), sum in secret "
            "(privacy.trust = 'secagg') or say how many clients nodes have (data.nodes)"
        )


def price_over_clients(config: RunConfig, labels: tuple[str, ...], target: Target) -> Question:
    """Price the question to the clients of a run; nothing is spent. ValueError where no noise keeps the target."""
    shares, everyone = config.noise_shares, Poisson(1.0, config.clients)
    if shares is None:
        return price(config.clients, config.unit, labels, target.epsilon, target.delta)
    paid, z = filter_commitment(target.epsilon, target.delta, everyone, 1, adjacency="zero_out", noise_shares=shares)
    return Question(paid, z, labels, math.sqrt(shares.parties / shares.honest))  # the most that a sum carries


def ask_in_folder(config: RunConfig, folder: Path, grid: Grid, target: Target) -> None:
    """Ask what the folder's target pays for, and leave the answers there."""
    with open_run(config, folder, resume=False, ledger=not config.several_sites) as run:
        run.status("preparing the question")
        refuse_unanswerable(config)
        whole = uncut(config)
        ready = make_assembly(config, methods(config), prepare(data_spec(whole)), folder)
        reading = node_reading(whole, ready.data.label_names)
        ready = replace(ready, job=ready.job.replace(asks=True, reading=reading))
        found = _of_sites(run, ready, grid, target) if config.several_sites else _of_clients(run, ready, grid, target)
        durable.write(folder / ANSWERS_FILE, json.dumps(found, indent=2) + "\n")
        run.telemetry.status("completed", "the question is answered")


def _of_clients(run: Run, ready: Assembly, grid: Grid, target: Target) -> dict[str, Any]:
    config = run.config
    asked = price_over_clients(config, tuple(ready.data.label_names), target)
    noise = Calibrated(asked.commitment, (asked.noise_multiplier,) * config.rounds)
    committed = with_noise(ready, noise)
    nodes = connect_nodes(run, grid)
    with run.hold_ledger(asked.commitment) as ledger:
        paid, job = asked.commitment, ready.job.to_json()
        draws = {} if paid.mode == "filter" else planned_draws(paid)
        held = clients_of_nodes(run, grid, nodes, JoinRequest(ledger.run_id, job, draws, json.dumps(paid.to_json())))
        strategy = make_strategy(committed, run.folder, nodes, ledger, held)
        strategy.secure = secure_aggregation(config, run.folder, grid, ledger)
        strategy.grid = grid
        strategy.tell = lambda text: run.telemetry.status("running", text)
        strategy.exchange = lambda messages: exchange_messages(grid, messages, config.engine.round_timeout)
        release = strategy.ask(asked.plan, Poisson(1.0, config.clients))
    return answers(asked, release.update, everyone=not config.is_deployed and strategy.secure is None)


def _of_sites(run: Run, ready: Assembly, grid: Grid, target: Target) -> dict[str, Any]:
    config, folder = run.config, run.folder
    nodes = connect_nodes(run, grid)
    if isinstance(nodes, int):
        workers = sorted(grid.get_node_ids())[:nodes]
        nodes = tuple(workers[site % len(workers)] for site in range(config.clients))
    terms = RecordLevelSettings(
        epsilon=target.epsilon, delta=target.delta, unit=config.unit, steps=1, controller="fixed", seed=config.seed
    )
    nothing, job, place = np.empty(0, dtype=np.float32), ready.job.to_json(), str(folder / SITES_FOLDER)
    messages = [
        Message(SiteRequest(0, nothing, 1, site, terms, job, place).to_records(), node, f"train.{ACTION}")
        for site, node in enumerate(nodes)
    ]
    labels = tuple(ready.data.label_names)
    size = sum(parts_of(len(labels)).values())
    found, missing = dict[int, SiteReply](), dict[int, str]()

    def take(content: RecordDict, site: int) -> None:
        reply = SiteReply.from_records(content, 0, size, 1)
        if reply.steps:
            found[site] = reply
        else:
            missing[site] = reply.refused

    replies = exchange_messages(grid, messages, config.engine.round_timeout)
    sound_replies([(message.metadata, site) for site, message in enumerate(messages)], replies, 0, take, missing)
    called = node_names(folder / CLIENTS_FILE, nodes) if config.is_deployed else [f"site {site}" for site in nodes]
    refused = {called[site]: reason for site, reason in sorted(missing.items())}
    if not found:
        raise RoundFailed("no site answered: " + "; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    return {**_added_up(list(found.values()), config, labels, target), "sites": len(found), "refused": refused}


def _added_up(found: list[SiteReply], config: RunConfig, labels: tuple[str, ...], target: Target) -> Mapping[str, Any]:
    """The answers of several sites as one: their noisy sums over all their units, with the noise of all of them."""
    units = sum(reply.population for reply in found)
    asked = price(units, config.unit, labels, target.epsilon, target.delta)
    loudest = math.hypot(*(reply.noise_multiplier for reply in found)) / asked.noise_multiplier
    total = sum(reply.population * torch.from_numpy(reply.update.copy()).double() for reply in found)
    assert isinstance(total, torch.Tensor)
    return answers(replace(asked, louder=loudest), total / units)
