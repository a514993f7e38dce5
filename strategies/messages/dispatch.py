"""The asking of nodes in a round, and what becomes of the replies.

Out: the nodes that are there, and what each is given of the cohort, longest work first, so that no node is the one
everybody waits for. Back: one sum, of each sound reply once; everything else is refused by name and left out. A reply
left out contributes zero; noise and divisor stay as they are, so the guarantee does not depend on who answered. A shard
that is lost is asked again, client by client (:func:`split_shards`): one client must not take the others out of the
sum. What one node can do to the sum is bounded, whatever it sends: its encoded sum has at most the norm of as many
clipped updates as it was given clients, see :func:`privacy.contribution.validate`.

Logs name the node and the kind of failure. They repeat nothing that a node sent: the text of a client's exception may
quote its data, and anything may stand in a hostile reply.
"""

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from flwr.app import Message, Metadata, RecordDict
from flwr.serverapp import Grid
from jaxtyping import Int64

from privacy.contribution import Contribution, Plan
from privacy.secagg.aggregator import BadPart
from strategies.messages.client_update import read_contribution
from strategies.messages.records import BadMessage

log = logging.getLogger(__name__)

ALONE_AT_ONCE = 64
"""Most messages of single clients that wait for their replies together: each holds the whole adapter."""


PATIENCE = 600.0
"""Seconds for which nodes are waited for."""


class RoundFailed(RuntimeError):
    """A round that cannot be finished: too few nodes, or too few sound replies. Its charge stands."""


def split(
    clients: Int64[np.ndarray, " n"], nodes: int, work: Sequence[float] | np.ndarray | None = None
) -> list[Int64[np.ndarray, " k"]]:
    """The cohort as ``nodes`` disjoint, sorted arrays of client ids of about equal work.

    Greedy, longest first (Graham 1969): the largest share is at most 4/3 of the best possible. Ties go to the node with
    the lower number, so the split is a function of its arguments.

    Args:
        clients: ids of the cohort.
        nodes: >= 1.
        work: expected work of every client of the population, by id; None counts every client alike.
    """
    if nodes < 1:
        raise ValueError(f"nodes must be >= 1, got {nodes}; no node is connected")
    cost = np.ones(len(clients)) if work is None else np.asarray(work)[clients].astype(np.float64)
    shares: list[list[int]] = [[] for _ in range(nodes)]
    load = [(0.0, node) for node in range(nodes)]
    for position in np.argsort(-cost, kind="stable"):
        total, node = heapq.heappop(load)
        shares[node].append(int(clients[position]))
        heapq.heappush(load, (total + float(cost[position]), node))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def await_nodes(grid: Grid, nodes: int, patience: float, *, settle: float = 0.0) -> list[int]:
    """All node ids, sorted, as soon as there are ``nodes`` or more. The ServerApp may start before they are registered.

    Args:
        patience: seconds to wait.
        settle: seconds for which their number must have stayed the same.

    Raises:
        RoundFailed: there are fewer after ``patience`` seconds, or their number does not settle.
    """
    deadline, since, seen = time.monotonic() + patience, time.monotonic(), -1
    while True:
        ids = sorted(grid.get_node_ids())
        if len(ids) != seen:
            seen, since = len(ids), time.monotonic()
        if seen >= nodes and time.monotonic() - since >= settle:
            return ids
        if time.monotonic() > deadline:
            raise RoundFailed(f"{seen} of {nodes} nodes connected within {patience:g} s")
        time.sleep(0.1)


Tell = Callable[[str], None]
"""Takes words for whoever watches the run."""


def await_roster(grid: Grid, roster: Sequence[int], least: int, patience: float, tell: Tell) -> frozenset[int]:
    """Wait until at least ``least`` nodes of a roster are connected, and give those that are.

    It is called before a cohort is drawn and knows nothing of cohorts: how long it waits tells of connections only.

    Args:
        patience: seconds to wait; a grid with a ``patience`` of its own says otherwise.
        tell: is told how many are there, as often as that changes.

    Raises:
        RoundFailed: there are fewer after that. Nothing was charged.
    """
    patience, told = float(getattr(grid, "patience", patience)), -1
    deadline = time.monotonic() + patience
    while True:
        there = frozenset(roster) & frozenset(grid.get_node_ids())
        if len(there) >= least:
            if told >= 0:
                tell(f"{len(there)} of {len(roster)} nodes are connected")
            return there
        said = f"{len(there)} of {len(roster)} nodes are connected"
        said += f", at least {least} must be" if least < len(roster) else ""
        if time.monotonic() >= deadline:
            raise RoundFailed(f"{said}; they were waited for {patience:g} s, and nothing was charged meanwhile")
        if len(there) != told:
            told = len(there)
            log.info("%s; waiting", said)
            tell(f"waiting for nodes: {said}")
        time.sleep(min(0.5, patience))


def quorum(roster: Sequence[int]) -> int:
    """The number of nodes of a roster that must be connected before a round is drawn: half of them, as must answer
    soundly.
    """
    return (len(roster) + 1) // 2


def nodes_to_ask(
    grid: Grid, nodes: int | tuple[int, ...], patience: float, least: int = 0, tell: Tell = lambda text: None
) -> tuple[list[int], frozenset[int]]:
    """The nodes of a round, and those of them that are known to be away: their shares fail without being sent.

    Workers of a simulation are interchangeable and waited for. A deployed client is its node; a round waits for a
    :func:`quorum` of them, or ``least`` if that is more, and for nobody by name.
    """
    if isinstance(nodes, int):
        return await_nodes(grid, nodes, patience)[:nodes], frozenset()
    return list(nodes), frozenset(nodes) - await_roster(grid, nodes, max(least, quorum(nodes)), patience, tell)


def shares(
    cohort: Int64[np.ndarray, " n"],
    nodes: Sequence[int],
    work: Sequence[float] | np.ndarray | None,
    clients_per_node: int | None,
) -> list[tuple[int, Int64[np.ndarray, " k"]]]:
    """Node and clients of every message; nobody is asked to train no client.

    Args:
        cohort: sorted ids.
        work: expected work of each client of the population; None counts all alike.
        clients_per_node: None splits the cohort over the nodes; 1 gives every client a message to its own node.
    """
    if clients_per_node is not None:
        return [(nodes[client % len(nodes)], cohort[i : i + 1]) for i, client in enumerate(cohort.tolist())]
    split_over = zip(nodes, split(cohort, len(nodes), work), strict=True)
    return [(node, clients) for node, clients in split_over if len(clients)]


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


def sum_replies(
    sent: Sequence[tuple[Metadata, int]], replies: Iterable[Message], plan: Plan, round: int
) -> tuple[Contribution, frozenset[int]]:
    """The sum of all sound replies, and the positions in ``sent`` of the messages they answer.

    Sums are integers: the order of arrival does not matter.

    Args:
        sent: metadata of every message that went out, and how many clients its reply can be a sum over.
        replies: what came back; each is read and let go before the next is taken.
    """
    total, answered = Contribution.zero(plan), set[int]()

    def add(content: RecordDict, position: int) -> None:
        nonlocal total
        total = total + read_contribution(content, plan, round, sent[position][1])
        answered.add(position)

    sound_replies([(metadata, position) for position, (metadata, _) in enumerate(sent)], replies, round, add)
    return total, frozenset(answered)


def split_shards(
    lost: Sequence[Int64[np.ndarray, " k"]], nodes: Sequence[int]
) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Node and the one client of every further message, for shards that were lost; in lists of bounded size.

    Args:
        lost: clients of each of them.
        nodes: who is asked, in turn.
    """
    clients = np.concatenate(lost)
    for start in range(0, len(clients), ALONE_AT_ONCE):
        wave = range(start, min(start + ALONE_AT_ONCE, len(clients)))
        yield [(nodes[i % len(nodes)], clients[i : i + 1]) for i in wave]


def sound_replies(
    sent: Sequence[tuple[Metadata, int]],
    replies: Iterable[Message],
    round: int,
    take: Callable[[RecordDict, int], None],
    missed: dict[int, str] | None = None,
) -> int:
    """Hand what every node replied to ``take``, once for each message; the number of replies that it took.

    Args:
        sent: metadata of every message that went out, and a number that ``take`` is told with its reply.
        replies: what came back; each is read and let go before the next is taken.
        round: its number, for the log.
        take: raises BadMessage or BadPart for a reply that is refused.
        missed: is given the numbers of messages without a sound reply, and why, in the server's own words.
    """
    missed = {} if missed is None else missed
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
            missed[number] = error_text(reply)
            log.warning("round %d: node %d failed: %s", round, node, missed[number])
            continue
        try:
            take(reply.content, number)
            sound += 1
        except (BadMessage, BadPart) as error:
            missed[number] = f"its reply was refused: {error}"
            log.warning("round %d: reply of node %d refused: %s", round, node, error)
        except Exception as error:  # whatever a node makes us stumble over, the others' work must not be lost for it
            missed[number] = f"its reply was refused: reading it raised {type(error).__name__}"
            log.error("round %d: reply of node %d refused: reading it raised %s", round, node, type(error).__name__)
    missed |= {number: "it did not answer in time" for _, number in waiting.values()}
    if foreign:
        log.warning("round %d: replies that were not asked for, or came twice, were dropped: %d", round, foreign)
    return sound


def error_text(reply: Message) -> str:
    """Name the kind of failure that an error reply tells of. Nothing of its free text."""
    code = reply.error.code
    return ERRORS.get(code, "failed") if type(code) is int else "failed"
