"""A silo's part in a federation: some private steps of its own from the global adapter, or a refusal.

Guarantee: every silo's records (or groups of them) are protected by the silo's own ledger over all rounds, against
everybody, the server and the other silos included; the server adds nothing and needs no trust. A silo that has spent
its budget takes no step and says so, whatever the server asks. What a deployed silo may be asked to promise is for its
operator to say (:mod:`client.silo_terms`); a request without a guarantee it refuses in any case.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message

from client.engine import Engine
from client.job import Job
from client.node import Node, kept_here, own_worker
from client.own_data import Reading
from client.records import Records
from client.silo import Silo, private_training
from client.silo_state import OtherSilo, silo_state
from client.silo_terms import SiloTerms
from client.silo_wire import SiloReply, SiloRequest
from client.unit_index import UnitIndex
from client.wire_records import BadMessage
from client.worker import warm_worker
from strategies.controller import PublicSignals


def take_part(
    request: SiloRequest, records: Records, engine: Engine, folder: Path, *, terms: SiloTerms | None = None
) -> SiloReply:
    """The private steps of one silo in one round.

    Args:
        request: what the server asks.
        records: the silo's own.
        engine: on the base model.
        folder: the silo's own, see :mod:`client.silo_state`.
        terms: what a deployed silo asks of a guarantee. None, for a simulated silo, takes every request.
    """
    silo = request.silo
    if terms is not None and (reason := terms.refusal(silo)):
        return _refusal(request, reason, 0)
    if not len(records):
        return _refusal(request, "this silo has no records", 0)
    index = UnitIndex.of(records, grouped=silo.unit != "record", most=silo.records_per_unit, seed=silo.seed)
    if silo.batch_size > len(index):
        return _refusal(request, f"this silo has fewer than {silo.batch_size} units", 0)
    try:
        with silo_state(folder, silo, index) as state:
            training = private_training(silo, engine, index, state.ledger, state.multipliers, state.sampler)
            adapter = torch.from_numpy(request.adapter.copy())
            training.begin(adapter, PublicSignals(0, None))
            state.put_into(training)
            before, refusal = state.steps, ""
            while state.steps - before < request.steps:
                if (said := training.refusal()) is not None:
                    refusal = f"this silo's budget is spent: {said}"
                    break
                training.step()
                training.observe(PublicSignals(training.state.round, None, state.ledger.rho_spent))
            state.take_from(training)
            taken, guaranteed = state.steps - before, state.ledger.guaranteed()
            update = (training.state.adapter - adapter).numpy() if taken else np.empty(0, np.float32)
    except OtherSilo as error:
        return _refusal(request, str(error), len(index))
    return SiloReply(request.round, update, taken, refusal, guaranteed, len(index), state.multipliers[0])


def _refusal(request: SiloRequest, reason: str, population: int) -> SiloReply:
    return SiloReply(request.round, np.empty(0, np.float32), 0, reason, math.inf, population)


def answer(message: Message, context: Context) -> Message:
    """The handler of ``train.silo``: a worker's simulated silo, or the node's own records."""
    node = Node.of(context.node_config)
    with kept_here(node):
        request = SiloRequest.from_records(message.content)
        if node is None:
            worker, folder, terms = warm_worker(request.job), Path(request.state) / str(request.client), None
        else:
            terms, folder = SiloTerms.of(context.node_config), state_folder(context.node_config)
            worker = own_worker(request.job, node)
            check_groups(request.silo, Job.from_json(request.job).reading)
        records = worker.data.client(request.client)
        reply = take_part(request, records, worker.engine, folder, terms=terms)
        return Message(reply.to_records(), reply_to=message)


def check_groups(silo: Silo, reading: Reading | None) -> None:
    """BadMessage if the records are grouped by another column than the guarantee names."""
    column = reading.unit_column if reading else ""
    if silo.unit not in ("record", f"group:{column}"):
        raise BadMessage(f"a guarantee for {silo.unit} is asked for, but records are grouped by {column!r}")


def state_folder(node_config: Mapping[str, Any]) -> Path:
    """Where a deployed silo keeps its ledger; BadMessage if its operator has not said, for nothing may be lost."""
    if "silo-state" not in node_config:
        raise BadMessage("this node has no folder for its ledger; name one in its settings (silo-state)")
    return Path(str(node_config["silo-state"])).expanduser()
