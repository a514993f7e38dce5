"""From the replies of a round to one sum: each sound reply once, everything else refused by name and left out.

A reply left out contributes zero; noise and divisor stay as they are, so the guarantee does not depend on who answered.
What one node can do to the sum is bounded, whatever it sends: its encoded sum has at most the norm of as many clipped
updates as it was given clients, see :func:`privacy.contribution.validate`.

Logs name the node and the kind of failure. They repeat nothing that a node sent: the text of a client's exception may
quote its data, and anything may stand in a hostile reply.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message, Metadata, RecordDict

from privacy.contribution import Contribution, Plan
from privacy.secagg.aggregator import BadPart
from strategies.messages.client_update import read_contribution
from strategies.messages.records import BadMessage

log = logging.getLogger(__name__)

ERRORS = {
    0: "its worker died, or failed outside the client's code",
    1: "its code could not be loaded",
    2: "the client's code raised an exception; its own log has the traceback",
    3: "the message was not available",
    4: "its reply was not available",
    5: "the node was not available",
    8: "the client's process crashed",
}
"""Flower's error codes (``flwr.common.constant.ErrorCode``) in words; others are named by nothing but "failed"."""


def summed(
    sent: Sequence[tuple[Metadata, int]], replies: Iterable[Message], plan: Plan, round: int
) -> tuple[Contribution, int]:
    """The sum of all sound replies and their number. Sums are integers: the order of arrival does not matter.

    Args:
        sent: metadata of every message that went out, and the number of clients it named.
        replies: what came back; each is read and let go before the next is taken.
        plan: of the round.
        round: its number.
    """
    total = Contribution.zero(plan)

    def add(content: RecordDict, clients: int) -> None:
        nonlocal total
        total = total + read_contribution(content, plan, round, clients)

    sound = sound_replies(sent, replies, round, add)
    return total, sound


def sound_replies(
    sent: Sequence[tuple[Metadata, int]],
    replies: Iterable[Message],
    round: int,
    take: Callable[[RecordDict, int], None],
) -> int:
    """Hand what every node replied to ``take``, once for each message; the number of replies that it took.

    Args:
        sent: metadata of every message that went out, and a number that ``take`` is told with its reply.
        replies: what came back; each is read and let go before the next is taken.
        round: its number, for the log.
        take: raises BadMessage or BadPart for a reply that is refused.
    """
    # The grid names a message when it sends it. A second reply to one would count its clients twice.
    waiting = {metadata.message_id: (metadata.dst_node_id, number) for metadata, number in sent}
    sound, foreign = 0, 0
    for reply in replies:
        key, failed = reply.metadata.reply_to_message_id, reply.has_error()
        asked = waiting.get(key)
        # An error may come from the server's own side, which then stands in for the node.
        if asked is None or not (failed or reply.metadata.src_node_id == asked[0]):
            foreign += 1
            continue
        node, number = waiting.pop(key)
        if failed:
            log.warning("round %d: node %d failed: %s", round, node, error_text(reply))
            continue
        try:
            take(reply.content, number)
            sound += 1
        except (BadMessage, BadPart) as error:
            log.warning("round %d: reply of node %d refused: %s", round, node, error)
        except Exception as error:  # whatever a node makes us stumble over, the others' work must not be lost for it
            log.error("round %d: reply of node %d refused: reading it raised %s", round, node, type(error).__name__)
    if foreign:
        log.warning("round %d: replies that were not asked for, or came twice, were dropped: %d", round, foreign)
    return sound


def error_text(reply: Message) -> str:
    """What kind of failure an error reply tells of; nothing of its free text."""
    code = reply.error.code
    return ERRORS.get(code, "failed") if type(code) is int else "failed"
