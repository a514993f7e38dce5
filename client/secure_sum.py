"""A client's side of a secure sum: the five steps of :mod:`privacy.secagg.party` as handlers of Flower messages.

A deployed node has its identity and its own copy of the federation's list in its settings, beside its data:

    flower-supernode --node-config 'data=... identity="/keys/identity.key" federation="/keys/federation.json"
                                    secagg-state="/state/secagg"'

It then answers nothing but these steps: a request for an unmasked contribution is refused, and so is one for less noise
than the list allows. In a simulation the run has made identities for all and names their folder.

Every party keeps a ledger of its own (:mod:`client.node_state.own_ledger`) with what the list commits to. A vector is
charged there before its noise is drawn, under the name of its session, and refused beyond the commitment, in whichever
run and whatever the server says of its own ledger; a session that got a vector gets no second one. What else a party
remembers between two messages stays in the node's Flower context and is forgotten at the last step.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from client.node import Node, kept_here, own_worker, refuse_unless_for
from client.node_state.own_ledger import own_ledger
from client.node_state.owner import Owner, Policy
from client.worker import UnitsFailed, warm_worker
from privacy.contribution import Contribution
from privacy.events import Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At
from privacy.mechanism import noisy_share
from privacy.randomness.noise import InsecureZeroNoise
from privacy.secagg import keys, party
from privacy.secagg.federation import Federation, load_identity
from privacy.secagg.party import PartyState, Refused
from strategies.messages.client_update import TrainRequest
from strategies.messages.records import BadMessage
from strategies.messages.secure_sum import KeysRequest, StepRequest, content_digest, masked_records, table_records

LIST_FILE = "federation.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class Member:
    """The identity of this party in a secure sum.

    Attributes:
        federation: its own copy of the list.
        identity: private.
        state: folder of its own ledger.
        trusting: whether the run made all that (simulation).
        account: of its records; None where its owner keeps none.
    """

    federation: Federation
    identity: bytes
    number: int
    state: Path
    trusting: bool
    account: At | None = None

    @staticmethod
    def of(node_config: Mapping[str, Any], source: str, number: int) -> "Member":
        """Read the member from the node's settings if it has any of its own, else from the folder ``source`` of a
        simulation.
        """
        own = "identity" in node_config or "federation" in node_config or "data" in node_config
        if not own and source:
            folder = Path(source)
            federation = Federation.from_text((folder / LIST_FILE).read_text(encoding="ascii"))
            identity, state = load_identity(folder / identity_file(number)), folder / f"party-{number}"
            return Member(federation, identity, number, state, True)
        if "identity" not in node_config or "federation" not in node_config:
            raise BadMessage("a party needs identity and federation in its node's settings; name both files")
        if "secagg-state" not in node_config:
            raise BadMessage("a party needs a folder for its ledger in its node's settings; name one (secagg-state)")
        federation = Federation.from_text(Path(str(node_config["federation"])).read_text(encoding="ascii"))
        identity = load_identity(Path(str(node_config["identity"])))
        public = keys.public_identity(identity)
        if public not in federation.members:
            raise BadMessage("this node's identity is not on its list of the federation")
        state = Path(str(node_config["secagg-state"])).expanduser()
        number, owner = federation.members.index(public), Owner.of(node_config)
        if owner.policy != Policy():
            raise BadMessage("a party of secure sums is held to its federation's list, and to no policy; leave it out")
        return Member(federation, identity, number, state, False, owner.account)


def identity_file(number: int) -> str:
    """Name of a simulated party's identity."""
    return f"identity-{number}.key"


Handler = Callable[[Message, Context], Message]


def _step(answer: Callable[[RecordDict, Context], RecordDict]) -> Handler:
    @wraps(answer)
    def handle(message: Message, context: Context) -> Message:
        with kept_here(Node.of(context.node_config)):
            refuse_unless_for("secure", context.node_config)
            return Message(answer(message.content, context), reply_to=message)

    return handle


@_step
def announce_keys(content: RecordDict, context: Context) -> RecordDict:
    """Step 1: the party's number and its signed keys."""
    request = KeysRequest.from_records(content)
    member = Member.of(context.node_config, request.source, request.party)
    session = member.federation.session(request.run, request.label, request.round, request.attempt, request.content)
    with own_ledger(member.state, member.federation, member.account) as ledger:
        _refuse_twice(ledger, session)
    state, said = party.begin(member.identity, member.federation, member.number, session, request.content)
    _keep(context, state)
    return table_records({member.number: said.to_bytes()})


@_step
def share_keys(content: RecordDict, context: Context) -> RecordDict:
    """Step 2: sealed shares for every other party."""
    request = StepRequest.from_records(content, keys.ANNOUNCEMENT_BYTES)
    member, state = _member(request, context)
    said = [keys.Announcement.from_bytes(number, data) for number, data in request.table.items()]
    state, sealed = party.share(state, member.federation, said)
    _keep(context, state)
    return table_records(sealed)


@_step
def send_masked(content: RecordDict, context: Context) -> RecordDict:
    """Step 3: train, clip, add the share of the noise, mask."""
    request = StepRequest.from_records(content, party.SEALED_BYTES)
    member, state = _member(request, context)
    train = TrainRequest.from_records(content)
    if len(train.clients) != 1 or train.own_draw is not None:
        raise BadMessage("a party of a secure sum is one client")
    kind = "discrete"
    try:
        state = party.accept(state, member.federation, content_digest(content, kind), request.table)
    except Refused:
        if not member.trusting:
            raise
        kind = "insecure-zero"
        state = party.accept(state, member.federation, content_digest(content, kind), request.table)
    if kind == "discrete" and train.plan.effective_noise_multiplier < member.federation.least_noise_multiplier:
        raise Refused("the plan has less noise than the federation agreed on at least")
    noise = InsecureZeroNoise() if kind == "insecure-zero" else None
    contribution, shares = _contribution(train, context), member.federation.noise_shares
    everybody = Poisson(1.0, shares.parties)
    event = ReleaseEvent(state.session.hex(), train.round, everybody, train.plan.components(), shares)
    with own_ledger(member.state, member.federation, member.account) as ledger:
        _refuse_twice(ledger, state.session)
        ledger.charge(event)  # one line a vector: the file is read whole at every message
        vector = noisy_share(contribution, train.plan, shares, noise)
        state, masked = party.mask_vector(state, member.federation, vector.numpy())
        _keep(context, state)
    return masked_records(masked)


@_step
def confirm_survivors(content: RecordDict, context: Context) -> RecordDict:
    """Step 4: a signature of the list of survivors."""
    request = StepRequest.from_records(content, 0)
    member, state = _member(request, context)
    state, signature = party.confirm(state, member.federation, member.identity, list(request.table))
    _keep(context, state)
    return table_records({member.number: signature})


@_step
def reveal_shares(content: RecordDict, context: Context) -> RecordDict:
    """Step 5: one share of every party; the round is forgotten."""
    request = StepRequest.from_records(content, keys.SIGNATURE_BYTES)
    member, state = _member(request, context)
    revealed = party.reveal(state, member.federation, request.table)
    del context.state[_name(member.number)]
    return table_records(revealed)


def _contribution(train: TrainRequest, context: Context) -> Contribution:
    """The client's row; zero where its own work raises, which a server that nobody trusts must not learn.

    Raises:
        Exception: the model, or the records, cannot be loaded.
    """
    node = Node.of(context.node_config)
    worker = warm_worker(train.job) if node is None else own_worker(train.job, node, several_units=False)
    try:
        return worker.contribution(train)
    except Exception as error:  # of another's text it is not known whether it quotes records
        said = error if isinstance(error, UnitsFailed) else type(error).__name__
        log.error("this client's work failed (%s): it hands in its share of the noise alone", said)
        return Contribution.zero(train.plan)


def _member(request: StepRequest, context: Context) -> tuple[Member, PartyState]:
    member = Member.of(context.node_config, request.source, request.party)
    kept = context.state.config_records.get(_name(member.number))
    if kept is None:
        raise Refused("this party is in no round; its node may have been restarted")
    state = PartyState.from_text(str(kept["state"]))
    if state.session != request.session:
        raise Refused("this party is in another round")
    return member, state


def _refuse_twice(ledger: Ledger, session: bytes) -> None:
    if any(event.label == session.hex() for event in ledger.events):
        raise Refused("this party has handed in a vector for this round already")


def _keep(context: Context, state: PartyState) -> None:
    context.state[_name(state.party)] = ConfigRecord({"state": state.to_text()})


def _name(number: int) -> str:
    return f"secagg-{number}"


HANDLERS: dict[str, Handler] = {
    "secagg_keys": announce_keys,
    "secagg_shares": share_keys,
    "secagg_masked": send_masked,
    "secagg_confirm": confirm_survivors,
    "secagg_reveal": reveal_shares,
}
"""The handler of every step, see :data:`strategies.messages.secure_sum.STEPS`."""
