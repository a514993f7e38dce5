"""From the replies of a round to one sum: each sound reply once, everything else refused by name and left out.

A reply left out contributes zero; noise and divisor stay as they are, so the guarantee does not depend on who answered.
"""

import logging
from collections.abc import Iterable, Sequence

from flwr.app import Message, Metadata

from client.wire import BadMessage, read_contribution
from privacy.mechanism import Contribution, Plan

log = logging.getLogger(__name__)


def summed(
    sent: Sequence[tuple[Metadata, int]], replies: Iterable[Message], plan: Plan, round: int
) -> tuple[Contribution, int]:
    """The sum of all sound replies and their number. Sums are integers: the order of arrival does not matter.

    Args:
        sent: metadata of every message that went out, and the number of clients it named.
        replies: what came back.
        plan: of the round.
        round: its number.
    """
    # The grid names a message when it sends it. A second reply to one would count its clients twice.
    waiting = {metadata.message_id: (metadata.dst_node_id, clients) for metadata, clients in sent}
    sound, total = 0, Contribution.zero(plan)
    for reply in replies:
        asked = waiting.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            log.warning("round %d: a reply that was not asked for was dropped", round)
            continue
        node, clients = asked
        if reply.has_error():
            log.warning("round %d: node %d failed: %s", round, node, reply.error.reason)
            continue
        try:
            total = total + read_contribution(reply.content, plan, round, clients)
            sound += 1
        except BadMessage as error:
            log.warning("round %d: reply of node %d refused: %s", round, node, error)
    return total, sound
