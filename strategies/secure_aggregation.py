"""A round whose sum is opened by its clients together: five exchanges of messages around one charge.

    keys -> shares -> charge -> masked vectors, noise included -> list of survivors signed -> shares revealed -> release

The charge comes before any client is asked to make noise. What fails before it costs nothing; what fails behind it is
paid for and releases nothing. A client that does not answer a step, or wrongly, has dropped out; the sum is that of the
clients whose masked vectors came, and there must be as many of them as were agreed on.

Guarantee: see ``privacy/events/noise.py`` (what is released) and ``privacy/secagg`` (that nothing else is seen).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from flwr.app import Message, Metadata, RecordDict

from privacy.ledger.ledger import Ledger, Receipt
from privacy.mechanism import Release, Requested, charged_request, released_sum
from privacy.randomness.sampling import Cohort
from privacy.secagg import keys, primitives
from privacy.secagg.aggregator import Aggregator, BadPart, NotOpened
from privacy.secagg.federation import Federation
from privacy.secagg.party import SEALED_BYTES
from strategies.messages.client_update import TrainRequest
from strategies.messages.dispatch import RoundFailed, sound_replies
from strategies.messages.secure_sum import STEPS, KeysRequest, StepRequest, content_digest, read_masked, read_table
from strategies.private_training import PlannedRelease

Ask = Callable[[Iterable[Message]], Iterable[Message]]
"""Send messages, and give what comes back of replies within the time a step is given."""


Seat = tuple[int, TrainRequest]
"""The node of a party, and its work."""


@dataclass(frozen=True)
class _Round:
    """A round between its messages for training and their replies."""

    number: int
    aggregator: Aggregator
    requested: Requested[Receipt]
    seats: Mapping[int, Seat]
    sent: list[tuple[Metadata, int]]


class SecureAggregation:
    """The settings and state with which the clients of a run open their sums.

    Args:
        federation: the list, as every client has it.
        ask: sends the messages of the short steps.
        source: folder with the identities of a simulation; "" in a deployment.
        insecure: ask the clients for no noise; the run is stamped NOT PRIVATE.

    Attributes:
        handed_in: how many masked vectors the last sum is made of.
    """

    def __init__(self, federation: Federation, run: str, ask: Ask, *, source: str = "", insecure: bool = False) -> None:
        self.federation = federation
        self.run = run
        self.ask = ask
        self.source = source
        self.insecure = insecure
        self.handed_in: int | None = None
        self._round: _Round | None = None

    def begin(self, planned: PlannedRelease, cohort: Cohort, requests: Sequence[Seat], ledger: Ledger) -> list[Message]:
        """Exchange keys and shares, charge the release, and give the messages that ask for masked vectors.

        Args:
            cohort: everybody, drawn for this release.
            requests: node and work of every client, one client each.

        Raises:
            RoundFailed: too few clients share their keys; nothing was charged.
            BudgetExceeded: the ledger cannot pay; nobody was asked for a vector.
        """
        if any(len(request.clients) != 1 for _, request in requests):
            raise ValueError("clients_per_node must be 1 for secure sums, got None; every client is a party of its own")
        if not requests:
            raise RoundFailed(f"round {planned.round}: no client is connected; nothing was charged")
        content = content_digest(requests[0][1].to_records(), "insecure-zero" if self.insecure else "discrete")
        session = self.federation.session(self.run, planned.label, planned.round, cohort.attempt, content)
        aggregator = Aggregator(self.federation, session, sum(part.dim for part in planned.event.components))
        seats = self._keys(planned, cohort.attempt, content, requests, aggregator)
        self._enough("announced their keys", len(seats), planned.round, "nothing was charged")
        self._shares(planned.round, seats, aggregator)
        self._enough("shared their keys", len(aggregator.sharers), planned.round, "nothing was charged")
        requested = charged_request(
            planned.plan,
            cohort,
            noise_shares=self.federation.noise_shares,
            ledger=ledger,
            insecure=self.insecure,
        )
        messages = {
            party: self._step(2, seats[party], party, aggregator.session, aggregator.sealed_for(party), work=True)
            for party in aggregator.sharers
        }
        sent = [(message.metadata, party) for party, message in messages.items()]
        self._round = _Round(planned.round, aggregator, requested, seats, sent)
        return list(messages.values())

    def release(self, replies: Iterable[Message], ledger: Ledger) -> Release:
        """Take the masked vectors, let the survivors confirm and reveal, and decode the sum.

        Raises:
            RoundFailed: the sum could not be opened; the charge stands, nothing was released.
        """
        assert self._round is not None, "begin() comes first"
        this, self._round = self._round, None
        aggregator, bytes_each = this.aggregator, self.federation.noise_shares.modulus_bits // 8

        def add(content: RecordDict, party: int) -> None:
            aggregator.add_masked(party, read_masked(content, aggregator.length * bytes_each))

        sound_replies(this.sent, replies, this.number, add)
        paid = "the round is charged and nothing was released"
        self.handed_in = len(aggregator.survivors)
        self._enough("handed in a masked vector", self.handed_in, this.number, paid)
        self._confirm(this)
        threshold = self.federation.noise_shares.threshold
        self._enough("confirmed the survivors", len(aggregator.signatures), this.number, paid, threshold)
        self._reveal(this)
        self._enough("revealed their shares", len(aggregator.revealers), this.number, paid, threshold)
        try:
            return released_sum(torch.from_numpy(aggregator.open_sum()), this.requested, ledger)
        except (NotOpened, ValueError) as error:
            raise RoundFailed(f"round {this.number}: {error}; {paid}") from error

    def _keys(
        self, planned: PlannedRelease, attempt: int, content: bytes, requests: Sequence[Seat], aggregator: Aggregator
    ) -> dict[int, Seat]:
        """Who announced keys, and where each sits: a deployed client says itself which member it is."""
        seats: dict[int, Seat] = {}
        messages = []
        for node, request in requests:
            party = int(request.clients[0])
            asked = KeysRequest(self.run, planned.label, planned.round, attempt, content, party, self.source)
            messages.append(_message(0, node, asked.to_records()))

        def add(reply: RecordDict, seat: int) -> None:
            for party, data in read_table(reply, keys.ANNOUNCEMENT_BYTES, 1).items():
                aggregator.add_announcement(party, data)
                seats[party] = requests[seat]

        self._exchange(list(enumerate(messages)), planned.round, add)
        return seats

    def _shares(self, round: int, seats: Mapping[int, Seat], aggregator: Aggregator) -> None:
        said = {party: one.to_bytes() for party, one in aggregator.announcements.items()}
        messages = [(party, self._step(1, seats[party], party, aggregator.session, said)) for party in sorted(said)]

        def add(reply: RecordDict, party: int) -> None:
            aggregator.add_sealed(party, read_table(reply, SEALED_BYTES, len(said)))

        self._exchange(messages, round, add)

    def _confirm(self, this: _Round) -> None:
        aggregator, listed = this.aggregator, dict.fromkeys(this.aggregator.survivors, b"")
        messages = [(party, self._step(3, this.seats[party], party, aggregator.session, listed)) for party in listed]

        def add(reply: RecordDict, party: int) -> None:
            table = read_table(reply, keys.SIGNATURE_BYTES, 1)
            if set(table) != {party}:
                raise BadPart("a signature of the survivors must be the member's own")
            aggregator.add_signature(party, table[party])

        self._exchange(messages, this.number, add)

    def _reveal(self, this: _Round) -> None:
        aggregator, signed = this.aggregator, dict(this.aggregator.signatures)
        messages = [(party, self._step(4, this.seats[party], party, aggregator.session, signed)) for party in signed]

        def add(reply: RecordDict, party: int) -> None:
            aggregator.add_revealed(party, read_table(reply, primitives.SHARE_BYTES, len(aggregator.sharers)))

        self._exchange(messages, this.number, add)

    def _exchange(
        self, messages: Sequence[tuple[int, Message]], round: int, take: Callable[[RecordDict, int], None]
    ) -> None:
        sent = [(message.metadata, number) for number, message in messages]
        sound_replies(sent, self.ask([message for _, message in messages]), round, take)

    def _step(
        self, step: int, seat: Seat, party: int, session: bytes, table: Mapping[int, bytes], *, work: bool = False
    ) -> Message:
        node, request = seat
        asked = StepRequest(session, party, table, self.source)
        return _message(step, node, asked.to_records(request.to_records() if work else None))

    def _enough(self, did: str, count: int, round: int, outcome: str, least: int | None = None) -> None:
        least = self.federation.noise_shares.survivors if least is None else least
        if count < least:
            raise RoundFailed(
                f"round {round}: {count} clients {did}, at least {least} must; {outcome}; the run's log names the "
                "nodes and the kind of failure"
            )


def _message(step: int, node: int, content: RecordDict) -> Message:
    return Message(content=content, message_type=f"train.{STEPS[step]}", dst_node_id=node)
