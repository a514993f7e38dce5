"""A deployed node: one client with its own records, or many. What it is, is its operator's to say, not the server's.

``flower-supernode --node-config 'data="jsonl:/data/records.jsonl" authority="/keys/ca.crt" cache="/cache"'``:

- ``data`` (needed): the node's records, see :mod:`client.data.local`. Without it a node is a worker of a simulation.
- ``authority`` (needed): the federation's ``ca.crt``, by which it knows the server, see :mod:`client.instructed`.
- ``cache``: folder for what is prepared from them; default ``$XDG_CACHE_HOME/lacquer`` or ``~/.cache/lacquer``.
- ``model``: folder of the base model, for a base that the package does not bring. The server's settings then only name
  the model, and no path of theirs is opened here.
- ``account`` and ``policy``: what the records' owner allows, see :mod:`client.node_state.owner`.
- ``clients`` and ``clients-state`` (a node with many clients): the public number of its clients, and a folder for what
  it keeps of a run. Without them the node is one client.

A node that is one client trains itself: a request that names more would count its records more than once. What goes
wrong is told in full to the node's own log, and to the server as nothing but the exception's class: its text may quote
records, and Flower would send it.

A node with many clients (an organisation and its users) draws its part of every cohort itself, trains it as a worker of
a simulation does, and hands in one bounded sum. The draw is Poisson sampling with a secret that never leaves the node,
made when it joins the run (:mod:`client.node_state.joined`), so no one else, the server included, knows or chooses who
is in it. The same release and attempt give the same cohort after any restart. Rates, labels and numbers of draws are
held to the plan with which the node joined (:mod:`client.node_state.answered_draws`). How many were drawn is not told.
The public number may be larger than that of clients with records: neighbours, with one client more or less, then do not
differ in it. Nor do the others' rows: the seed of local randomness is the node's own, so to be another one in the order
of clients is to be drawn, and shuffled, by the same law.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from client.data.local import OwnData, open_own
from client.models.files import fingerprint
from client.node_state.answered_draws import admit_draw
from client.node_state.joined import Joined
from client.node_state.owner import SETTINGS as OWNER
from client.node_state.owner import Owner
from client.settings import cache_folder
from client.worker import Job, Worker
from privacy import durable
from privacy.commitment import Commitment
from privacy.contribution import Contribution
from privacy.ledger.account import TOLD, Account
from strategies.messages.client_update import TrainRequest
from strategies.messages.own_clients import Draw, JoinRequest, planned_draws
from strategies.messages.records import BadMessage

log = logging.getLogger(__name__)


SECURE = ("identity", "federation")
"""Settings of a node that takes part in secure sums: it answers nothing else."""
TERMS = ("epsilon-limit", "delta-limit", "privacy-unit")
"""Settings of a site that protects its own records (:mod:`client.record_level.participant`)."""
MANY = ("clients", "clients-state")
"""Settings of a node with many clients."""


class NodeFailed(RuntimeError):
    """A failure on a node in the words that the server is told: the class of the exception."""


class OtherModel(ValueError):
    """The node's base model is another than the server's: what it learnt would mean something else there."""


@dataclass(frozen=True)
class Node:
    """The settings of a node that owns its records."""

    data: str
    cache: str = ""
    model: str = ""
    clients: str = ""
    clients_state: str = ""
    account: str = ""
    account_state: str = ""
    policy: str = ""

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> "Node | None":
        """Read the node's settings from Flower's node configuration. None where the node has no records of its own."""
        if "data" not in node_config:
            return None
        names = ("data", "cache", "model", *MANY, *OWNER)
        return Node(**{name.replace("-", "_"): str(node_config.get(name, "")) for name in names})

    @property
    def folder(self) -> Path:
        """The folder for what is prepared from the records."""
        return Path(self.cache).expanduser() if self.cache else cache_folder()

    def contribution(self, request: TrainRequest) -> Contribution:
        """The clipped contribution of this one client, or of those that the node draws of its own.

        Raises:
            BadMessage: another number of clients is asked for than there is.
        """
        if request.own_draw is not None:
            return self._drawn(request, request.own_draw)
        if len(request.clients) != 1:
            raise BadMessage("a node with records of its own is one client")
        return own_worker(request.job, self, several_units=False).contribution(request)

    def join(self, request: JoinRequest) -> int:
        """Join a run with the clients there are now, and say their public number. Joining twice is joining once.

        Raises:
            BadMessage: there are more than the node's operator says, or other records than when the node joined.
        """
        clients = self._number()
        data = _clients_of(own_worker(request.job, self, several_units=True))
        if data.clients > clients:
            raise BadMessage(
                f"clients = {clients} in this node's settings, but its records are of {data.clients}: raise the "
                "number, which is public"
            )
        self._pay(request, clients)
        folder = self._folder(request.run)
        durable.new_folder(folder.parent)
        durable.make_folder(folder, lambda draft: Joined.begin(draft, clients, data.digest, request.draws))
        durable.close_to_others(folder)
        durable.sync(folder.parent)
        joined = Joined.load(folder)
        joined.refuse_others(clients, data)
        if joined.draws != request.draws:
            raise BadMessage("this node joined the run with another plan of draws, which stands")
        return clients

    def _pay(self, request: JoinRequest, clients: int) -> None:
        """Hold what the server says that it committed to against the owner's policy, then debit it: before any draw.

        Raises:
            BadMessage: the commitment is none, or is not that of the planned draws, or the policy does not allow it.
            AccountRefused: the account does not pay.
        """
        owner = self._owner()
        if owner == Owner():
            return
        try:
            commitment = Commitment.from_json(json.loads(request.commitment))
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"the run's commitment cannot be read: {type(error).__name__}") from None
        if commitment.mode == "floor" and planned_draws(commitment) != request.draws:
            raise BadMessage("the run's plan of draws is not that of the commitment that it names")
        job = Job.from_json(request.job)
        if reason := owner.refusal(
            epsilon=commitment.epsilon,
            releases=sum(planned.count for planned in request.draws.values()),
            task=job.task,
            model=job.model,
            others=commitment.population - clients,
        ):
            raise BadMessage(reason)
        if owner.account is not None:
            with Account.open(*owner.account) as account:
                account.debit(request.run, commitment, f"run {request.run}", basis=TOLD)

    def _owner(self) -> Owner:
        said = {name: getattr(self, name.replace("-", "_")) for name in OWNER}
        return Owner.of({name: value for name, value in said.items() if value})

    def _drawn(self, request: TrainRequest, draw: Draw) -> Contribution:
        folder = self._folder(draw.run)
        if not folder.is_dir():
            raise BadMessage(
                f"this node has not joined the run, or {folder} is gone, with the secret that draws its cohorts: "
                "restore it"
            )
        if (kept := self._owner().account) is not None:
            with Account.open(*kept, read_only=True) as account:
                if draw.run not in account.debits:
                    raise BadMessage("this node joined the run before it kept its account, or the account is older")
        joined = Joined.load(folder)
        worker = own_worker(Job.from_json(request.job).replace(seed=joined.seed).to_json(), self, several_units=True)
        data = _clients_of(worker)
        joined.refuse_others(self._number(), data)
        if draw.clients != joined.clients:
            raise BadMessage("the roster of the run has another number of clients for this node than it has said")
        admit_draw(folder, joined.draws, draw, request.round, _digest(request))
        own = replace(draw.sampling, population=joined.clients)
        drawn = joined.sampler.draw(own, request.round, draw.attempt, label=draw.label).ids
        present = drawn[drawn < data.clients]  # beyond them are places without a client
        if not len(present):
            return Contribution.zero(request.plan)
        return worker.contribution(replace(request, clients=present))

    def _number(self) -> int:
        if not self.clients.isdecimal() or int(self.clients) < 1:
            raise BadMessage(f"clients must be a number >= 1 in the settings of a node with many, got {self.clients!r}")
        return int(self.clients)

    def _folder(self, run: str) -> Path:
        """What is kept of a run; its name comes from the server and makes no path."""
        if not self.clients_state:
            raise BadMessage(
                "a node with many clients needs a folder for the secrets that draw its cohorts; name one in its "
                "settings (clients-state)"
            )
        return Path(self.clients_state).expanduser() / hashlib.sha256(run.encode()).hexdigest()[:24]


def _digest(request: TrainRequest) -> str:
    """Of all that a node's answer depends on."""
    plan = json.dumps([request.round, request.plan.to_json(), request.part.to_json(), request.job], sort_keys=True)
    clip = b"".join(values.numpy().tobytes() for _, values in sorted(request.plan.clip.arrays().items()))
    return hashlib.sha256(plan.encode() + request.adapter.tobytes() + clip).hexdigest()


def refuse_unless_for(request: str, node_config: Mapping[str, Any], *others: str) -> None:
    """BadMessage where the node's operator set it up for requests that trust the server less.

    Args:
        request: ``"sum"`` of clipped contributions without noise, ``"drawn"`` where the node draws whose, ``"secure"``
            sum, ``"site"`` with noise of its own.
        node_config: Flower's.
        others: what the request may be instead, before it is read.
    """
    if request == "sum" and not others and (said := [name for name in OWNER if name in node_config]):
        raise BadMessage(
            f"this node is one client, and is told no commitment that {' and '.join(said)} could be held against: "
            "protect its records (site-state), sum in secret (identity), or say how many clients it has (clients)"
        )
    for settings, kind, what in (
        (SECURE, "secure", "secure sums"),
        (TERMS, "site", "what it protects by itself"),
        (MANY, "drawn", "sums over clients that it draws itself"),
    ):
        said = [name for name in settings if name in node_config]
        if said and kind not in (request, *others):
            raise BadMessage(f"this node answers requests for {what} only: {', '.join(said)} in its settings")


@contextmanager
def kept_here(node: Node | None) -> Iterator[None]:
    """Log an exception here, within the block, on a node with its own records; it loses its text on the way out.

    Raises:
        NodeFailed: instead of any other exception.
    """
    try:
        yield
    except Exception as error:
        if node is None:
            raise
        said = "this message could not be answered; the server is told the exception's class and nothing else"
        if full := durable.full_disk(error, node.folder):
            log.error("%s: %s", said, full)
        else:
            log.exception(said)
        raise NodeFailed(type(error).__name__) from None


@functools.lru_cache(maxsize=1)
def own_worker(text: str, node: Node, *, several_units: bool) -> Worker:
    """The worker on a node's own records.

    Args:
        several_units: whether several protected units are computed together. Then it works in one thread, as a
            simulation's workers do: there what a unit contributes does not depend on the others, to the last bit.
    """
    if several_units:
        torch.set_num_threads(1)
    job = Job.from_json(text)
    reading = job.reading
    if reading is None:
        raise ValueError("the server's job says nothing of how to read a node's own records (data.held-by = 'nodes')")
    if job.task != reading.task or job.num_labels != len(reading.labels):
        # a loss that some labels make raise would tell the server of records that have them
        raise ValueError(
            f"the server's job trains for {job.task} with {job.num_labels} labels, but records would be read for "
            f"{reading.task} with {len(reading.labels)}"
        )
    if not node.model and (job.model.startswith(("/", ".", "~")) or Path(job.model).exists()):
        raise ValueError("no model of that name is on this node; name its folder in the node's own settings (model)")
    job = job.replace(model=node.model or job.model)
    if fingerprint(job.model) != job.fingerprint:
        raise OtherModel(f"the base model {job.model!r} of this node is not the server's; copy the server's folder")
    data = open_own(node.data, reading, job.model, node.folder)
    return Worker(job.replace(data=str(data.folder), canaries=0), data)


def _clients_of(worker: Worker) -> OwnData:
    """The records of a node with many clients; BadMessage where the server does not say whose a record is."""
    data = worker.data
    if not isinstance(data, OwnData) or data.stops is None:
        raise BadMessage("the server's job does not name the column that says whose a record is (data.client-column)")
    return data
