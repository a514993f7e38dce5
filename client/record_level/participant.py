"""A site's part in a run over sites: some private steps of its own from the global adapter, or a refusal.

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
from client.record_level.messages import SiteReply, SiteRequest
from client.record_level.public_subspace import PublicSpan, in_public_span
from client.record_level.settings import RecordLevelSettings
from client.record_level.state import OtherSite, commit_reading, site_state
from client.record_level.training import private_training
from client.record_level.units import UnitIndex
from client.worker import Job, warm_worker
from privacy.errors import AccountRefused
from privacy.ledger.place import At
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

    def refusal(self, site: RecordLevelSettings) -> str:
        """Explain to the server why this guarantee is not given; empty if it is."""
        if site.not_private:
            return f"this site trains under a guarantee only; this has none: {site.not_private}"
        if site.epsilon > self.epsilon:
            return f"this site guarantees an epsilon of at most {self.epsilon:g}"
        if site.delta > self.delta:
            return f"this site guarantees a delta of at most {self.delta:g}"
        if self.unit and site.unit != self.unit:
            return f"this site protects {self.unit}, not {site.unit}"
        for method in (site.controller, site.optimizer, site.aggregation):
            if ":" in method and method not in self.methods:
                return "this site runs the methods of the package, and others only if its operator names them (methods)"
        return ""


def take_part(
    request: SiteRequest, records: Records, engine: Engine, folder: Path, account: At | None = None
) -> SiteReply:
    """The private steps of one site in one round.

    Args:
        folder: the site's own, see :mod:`client.record_level.state`.
        account: of its records, see there.
    """
    site = request.site
    if not len(records):
        return refusal(request, "this site has no records")
    index = UnitIndex.of(records, grouped=site.unit != "record", most=site.records_per_unit, seed=site.seed)
    if site.sampling_level != "user":
        return refusal(request, "this site draws whole units; ask with site.sampling-level = 'user'")
    if site.batch_size > len(index):
        return refusal(request, f"this site has fewer than {site.batch_size} units")
    engine.set_residual(None if request.residual is None else torch.from_numpy(request.residual))
    try:
        with site_state(folder, site, index, account) as state:
            training = private_training(site, engine, index, state.ledger, state.multipliers, state.sampler)
            if request.texts is not None:
                training = in_public_span(training, PublicSpan(engine, request.texts, "coefficients"))
            adapter = torch.from_numpy(request.adapter.copy())
            training.begin(adapter, PublicSignals(0, None))
            state.put_into(training)
            before, refused = state.steps, ""
            while state.steps - before < request.steps:
                if (said := training.refusal()) is not None:
                    refused = f"this site's budget is spent: {said}"
                    break
                training.step()
                training.observe(PublicSignals(training.state.round, None, state.ledger.rho_spent))
            state.take_from(training)
            taken, guaranteed = state.steps - before, state.ledger.epsilon_guaranteed()
            update = _sent(training, adapter, coefficients=request.texts is not None) if taken else _NOTHING
    except OtherSite as error:
        return refusal(request, str(error))
    except AccountRefused as error:
        log.error("%s", error)
        return refusal(request, "the account of this site's records does not pay for that; its own log says what fits")
    return SiteReply(request.round, update, taken, refused, guaranteed, len(index), state.multipliers[0])


_NOTHING = np.empty(0, np.float32)


def _sent(training: PrivateSgd, before: torch.Tensor, *, coefficients: bool) -> np.ndarray:
    """What the steps moved, or the coefficients that the only one released."""
    if not coefficients:
        return (training.state.adapter - before).numpy()
    release = training.release
    assert release is not None, "a step was taken"
    assert release.encoded is not None, "by this process"
    return (release.encoded / release.expected_units).to(torch.float32).numpy()


def refusal(request: SiteRequest, reason: str) -> SiteReply:
    """The reply of a site that releases nothing."""
    return SiteReply(request.round, _NOTHING, 0, reason, math.inf, 0)


def answer(message: Message, context: Context) -> Message:
    """The handler of ``train.site``: a worker's simulated site, or the node's own records."""
    node = Node.of(context.node_config)
    with kept_here(node):
        refuse_unless_for("site", context.node_config)
        request = SiteRequest.from_records(message.content)
        if node is None:
            worker, folder, account = warm_worker(request.job), Path(request.state) / str(request.client), None
        else:
            folder, owner = state_folder(context.node_config), Owner.of(context.node_config)
            account, limits = owner.account, OperatorLimits.of(context.node_config)
            if reason := not_allowed(request, owner) or refused_unread(request, limits, folder):
                return Message(refusal(request, reason).to_records(), reply_to=message)
            worker = own_worker(request.job, node, several_units=True)
        reply = take_part(request, worker.data.client(request.client), worker.engine, folder, account)
        return Message(reply.to_records(), reply_to=message)


def not_allowed(request: SiteRequest, owner: Owner) -> str:
    """Explain why the owner's policy refuses a request; empty if it does not."""
    job, site = Job.from_json(request.job), request.site
    return owner.refusal(epsilon=site.epsilon, releases=site.steps, task=job.task, model=job.model, others=None)


def refused_unread(request: SiteRequest, limits: OperatorLimits, folder: Path) -> str:
    """Explain why a deployed site takes no part, as far as that is known without its records; empty if it may."""
    site, reading = request.site, Job.from_json(request.job).reading
    if reason := limits.refusal(site):
        return reason
    column = reading.unit_column if reading else ""
    if site.unit not in ("record", f"group:{column}"):
        return f"a guarantee for {site.unit} is asked for, but records would be grouped by {column!r}"
    try:
        commit_reading(folder, reading, site.unit)
    except OtherSite as error:
        return str(error)
    return ""


def state_folder(node_config: Mapping[str, Any]) -> Path:
    """The folder in which a deployed site keeps its ledger; BadMessage if its operator has not said, for nothing may be
    lost.
    """
    folder = node_config.get("site-state", node_config.get("silo-state"))  # the name in older settings
    if folder is None:
        raise BadMessage("this node has no folder for its ledger; name one in its settings (site-state)")
    return Path(str(folder)).expanduser()
