"""A site's part in a cross-silo run: some private steps of its own from the global adapter, or a refusal.

Guarantee: every site's records (or groups of them) are protected by the site's own ledger over all rounds, against
everybody, the server and the other sites included; the server adds nothing and needs no trust. A site that has spent
its budget takes no step and says so, whatever the server asks; a request without a guarantee it refuses in any case.

Which guarantees it may be asked for is for its operator to say, beside the node's records and not by the server:
``--node-config 'epsilon-limit=2.0 delta-limit=1e-6 privacy-unit="group:patient_nbr"'``; each may be left out. Without
the unit a server could ask for epsilon 2 of single records where the operator thinks of patients, and without the delta
an epsilon says little. ``methods="my_pkg.my_mod:MyController"`` lists methods that are not the package's: a name in a
request would otherwise import and call whatever it names.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message

from client.data.records import Records
from client.engine.engine import Engine
from client.node import Node, kept_here, own_worker, refuse_unless_for
from client.node_state.owner import Owner
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.messages import SiloReply, SiloRequest
from client.record_level.public_subspace import PublicSpan, in_public_span
from client.record_level.settings import RecordLevelSettings
from client.record_level.state import OtherSilo, commit_reading, silo_state
from client.record_level.training import private_training
from client.record_level.units import UnitIndex
from client.worker import Job, warm_worker
from privacy.errors import AccountRefused
from privacy.ledger.account import At
from strategies.controllers.controller import PublicSignals
from strategies.messages.records import BadMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OperatorLimits:
    """The least a site asks of a guarantee.

    Attributes:
        epsilon: the largest it accepts.
        delta: the largest it accepts.
        unit: ``"record"``, or ``"group:COLUMN"`` for its operator's column of that name; empty for either.
        methods: controllers, optimizers and aggregations by ``module:Class`` that it runs besides the package's own.
    """

    epsilon: float = math.inf
    delta: float = 1.0
    unit: str = ""
    methods: tuple[str, ...] = ()

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> "OperatorLimits":
        """Read the operator's limits from Flower's node configuration.

        Raises:
            BadMessage: a value that means nothing; guessing could accept what the operator does not want.
        """
        unit = str(node_config.get("privacy-unit", ""))
        if unit not in ("", "record") and not (unit.startswith("group:") and unit != "group:"):
            raise BadMessage(f"privacy-unit must be 'record' or 'group:COLUMN', got {unit!r}")
        limits = {}
        for name, default in (("epsilon-limit", math.inf), ("delta-limit", 1.0)):
            try:
                limits[name] = float(node_config.get(name, default))
            except ValueError:
                limits[name] = math.nan
            if not limits[name] > 0:
                raise BadMessage(f"{name} must be a number > 0, got {node_config[name]!r}")
        methods = tuple(str(node_config.get("methods", "")).split())
        return OperatorLimits(limits["epsilon-limit"], limits["delta-limit"], unit, methods)

    def refusal(self, silo: RecordLevelSettings) -> str:
        """Explain to the server why this guarantee is not given; empty if it is."""
        if silo.not_private:
            return f"this site trains under a guarantee only; this has none: {silo.not_private}"
        if silo.epsilon > self.epsilon:
            return f"this site guarantees an epsilon of at most {self.epsilon:g}"
        if silo.delta > self.delta:
            return f"this site guarantees a delta of at most {self.delta:g}"
        if self.unit and silo.unit != self.unit:
            return f"this site protects {self.unit}, not {silo.unit}"
        for method in (silo.controller, silo.optimizer, silo.aggregation):
            if ":" in method and method not in self.methods:
                return "this site runs the methods of the package, and others only if its operator names them (methods)"
        return ""


def take_part(
    request: SiloRequest, records: Records, engine: Engine, folder: Path, account: At | None = None
) -> SiloReply:
    """The private steps of one site in one round.

    Args:
        folder: the site's own, see :mod:`client.record_level.state`.
        account: of its records, see there.
    """
    silo = request.silo
    if not len(records):
        return _refusal(request, "this site has no records")
    index = UnitIndex.of(records, grouped=silo.unit != "record", most=silo.records_per_unit, seed=silo.seed)
    if silo.sampling_level != "user":
        return _refusal(request, "this site draws whole units; ask with silo.sampling-level = 'user'")
    if silo.batch_size > len(index):
        return _refusal(request, f"this site has fewer than {silo.batch_size} units")
    engine.set_residual(None if request.residual is None else torch.from_numpy(request.residual))
    try:
        with silo_state(folder, silo, index, account) as state:
            training = private_training(silo, engine, index, state.ledger, state.multipliers, state.sampler)
            if request.texts is not None:
                training = in_public_span(training, PublicSpan(engine, request.texts, "coefficients"))
            adapter = torch.from_numpy(request.adapter.copy())
            training.begin(adapter, PublicSignals(0, None))
            state.put_into(training)
            before, refusal = state.steps, ""
            while state.steps - before < request.steps:
                if (said := training.refusal()) is not None:
                    refusal = f"this site's budget is spent: {said}"
                    break
                training.step()
                training.observe(PublicSignals(training.state.round, None, state.ledger.rho_spent))
            state.take_from(training)
            taken, guaranteed = state.steps - before, state.ledger.epsilon_guaranteed()
            update = _sent(training, adapter, coefficients=request.texts is not None) if taken else _NOTHING
    except OtherSilo as error:
        return _refusal(request, str(error))
    except AccountRefused as error:
        log.error("%s", error)
        return _refusal(request, "the account of this site's records does not pay for that; its own log says what fits")
    return SiloReply(request.round, update, taken, refusal, guaranteed, len(index), state.multipliers[0])


_NOTHING = np.empty(0, np.float32)


def _sent(training: PrivateSgd, before: torch.Tensor, *, coefficients: bool) -> np.ndarray:
    """What the steps moved, or the coefficients that the only one released."""
    if not coefficients:
        return (training.state.adapter - before).numpy()
    release = training.release
    assert release is not None, "a step was taken"
    assert release.encoded is not None, "by this process"
    return (release.encoded / release.expected_units).to(torch.float32).numpy()


def _refusal(request: SiloRequest, reason: str) -> SiloReply:
    return SiloReply(request.round, _NOTHING, 0, reason, math.inf, 0)


def answer(message: Message, context: Context) -> Message:
    """The handler of ``train.silo``: a worker's simulated site, or the node's own records."""
    node = Node.of(context.node_config)
    with kept_here(node):
        refuse_unless_for("silo", context.node_config)
        request = SiloRequest.from_records(message.content)
        if node is None:
            worker, folder, account = warm_worker(request.job), Path(request.state) / str(request.client), None
        else:
            folder, owner = state_folder(context.node_config), Owner.of(context.node_config)
            account, limits = owner.account, OperatorLimits.of(context.node_config)
            if reason := _not_allowed(request, owner) or refused_unread(request, limits, folder):
                return Message(_refusal(request, reason).to_records(), reply_to=message)
            worker = own_worker(request.job, node, several_units=True)
        reply = take_part(request, worker.data.client(request.client), worker.engine, folder, account)
        return Message(reply.to_records(), reply_to=message)


def _not_allowed(request: SiloRequest, owner: Owner) -> str:
    job, silo = Job.from_json(request.job), request.silo
    return owner.refusal(epsilon=silo.epsilon, releases=silo.steps, task=job.task, model=job.model, others=None)


def refused_unread(request: SiloRequest, limits: OperatorLimits, folder: Path) -> str:
    """Explain why a deployed site takes no part, as far as that is known without its records; empty if it may."""
    silo, reading = request.silo, Job.from_json(request.job).reading
    if reason := limits.refusal(silo):
        return reason
    column = reading.unit_column if reading else ""
    if silo.unit not in ("record", f"group:{column}"):
        return f"a guarantee for {silo.unit} is asked for, but records would be grouped by {column!r}"
    try:
        commit_reading(folder, reading, silo.unit)
    except OtherSilo as error:
        return str(error)
    return ""


def state_folder(node_config: Mapping[str, Any]) -> Path:
    """The folder in which a deployed site keeps its ledger; BadMessage if its operator has not said, for nothing may be
    lost.
    """
    if "silo-state" not in node_config:
        raise BadMessage("this node has no folder for its ledger; name one in its settings (silo-state)")
    return Path(str(node_config["silo-state"])).expanduser()
