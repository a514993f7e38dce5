"""The nodes of a run: who they are, messages to them, and their replies, each handed on as it comes.

Flower's ``Grid.send_and_receive`` keeps all replies until the last is there, and a reply whose bytes are no message
makes it raise: one hostile node would end the run. Here a reply can be summed and let go before the next is taken, and
what Flower cannot read counts as not sent. An unreachable SuperLink is still an error.

Which node is which client of a deployed run is settled at its start and stays so until its end (:func:`roster`). The
population of the privacy statement is the number of nodes in the federation. It is public, so it stands in the
configuration (``clients``), and the run starts when exactly so many are connected: more would leave open who takes
part. A node that goes away stays a client; in a round that samples it, it contributes zero. A resumed run waits for its
nodes as a new one does, and goes on without those that stay away if it has a quorum. A node that joins later takes part
in the next run. Flower knows a node by its key, so it has the same number after a restart of either side.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from privacy import durable
from privacy.errors import CorruptRun
from server.config.load import ConfigError
from strategies.messages.dispatch import PATIENCE, RoundFailed, Tell, await_nodes, await_roster, quorum

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Most replies fetched in one request: what is in memory at once, and what an unreadable reply can take along."""


def exchange_messages(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send ``messages`` at once and yield the replies in the order in which they come.

    Args:
        timeout: seconds after which no reply is waited for any more.
    """
    # Now: a message has its name from here on. What the SuperLink does not take (a node unregistered since) has none.
    waiting = [identifier for identifier in grid.push_messages(messages) if identifier is not None]
    return _arriving(grid, waiting, timeout)


def _arriving(grid: Grid, waiting: list[str], timeout: float) -> Iterator[Message]:
    deadline = time.monotonic() + timeout
    interval = float(getattr(grid, "pull_interval", 1.0))
    while waiting and time.monotonic() < deadline:
        came: set[str] = set()
        for start in range(0, len(waiting), AT_ONCE):
            batch = waiting[start : start + AT_ONCE]
            # A grid may hand on one reply a call, see server.network.patience.RuntimeClient.
            while time.monotonic() < deadline and (replies := _pulled(grid, batch, came)):
                for reply in replies:
                    came.add(reply.metadata.reply_to_message_id)
                    yield reply
                batch = [identifier for identifier in batch if identifier not in came]
        waiting = [identifier for identifier in waiting if identifier not in came]
        if waiting:
            time.sleep(min(interval, max(0.0, deadline - time.monotonic())))
    if waiting:
        log.warning("%g s are over; what has not come by now is not waited for", timeout)


def _pulled(grid: Grid, batch: Sequence[str], given_up: set[str]) -> list[Message]:
    """Pull the replies of a batch that are there; names of unreadable ones are added to ``given_up``."""
    if not batch:
        return []
    try:
        return list(grid.pull_messages(batch))
    except (OSError, httpx.HTTPError):
        raise
    except Exception as error:  # Flower names no type for bytes that are no message: it is whatever its readers raise
        if len(batch) == 1:
            log.warning("a reply could not be read by Flower (%s); it is left out", type(error).__name__)
            given_up.update(batch)
            return []
        return [reply for identifier in batch for reply in _pulled(grid, [identifier], given_up)]


def roster(
    file: Path,
    grid: Grid,
    clients: int,
    *,
    of_many: bool = False,
    patience: float = PATIENCE,
    tell: Tell = lambda text: None,
) -> tuple[int, ...]:
    """Find the node of every client, in the order of the clients' ids; kept in a file from the first time on.

    Args:
        file: the roster's; where it exists, its nodes are waited for.
        clients: number of nodes that must be connected.
        of_many: nodes have many clients each, and ``clients`` is ``data.nodes``.
        patience: seconds to wait for them; then their number must stay the same for some more (``settle`` of the grid).
        tell: is told what is waited for.

    Raises:
        ConfigError: more nodes are connected than the configuration has clients.
        RoundFailed: fewer are, after ``patience`` seconds; of a run that is resumed, fewer than half.
        CorruptRun: the file's list is not of this run.
    """
    if file.exists():
        kept = _kept(file, clients)
        try:
            await_roster(grid, kept, len(kept), patience, tell)
        except RoundFailed as missing:
            await_roster(grid, kept, quorum(kept), 0.0, tell)
            log.warning("%s; the run goes on without the others", missing)
        return kept
    nodes = await_nodes(grid, clients, patience, settle=float(getattr(grid, "settle", 5.0)))
    if len(nodes) > clients:
        key = "data.nodes" if of_many else "clients"
        raise ConfigError(
            f"{key} = {clients}, but {len(nodes)} nodes are connected; set {key} = {len(nodes)}, the size of "
            "the federation, or stop the nodes that are not part of it"
        )
    durable.write(file, json.dumps({"nodes": nodes}) + "\n")
    return tuple(nodes)


def node_names(file: Path, roster: Sequence[int]) -> list[str]:
    """The names of a roster's nodes: those that `lacquer admit` gave, else their numbers.

    Args:
        file: names by node; need not be there.

    Raises:
        CorruptRun: the file cannot be read.
    """
    try:
        known = dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except (ValueError, TypeError) as error:
        raise CorruptRun(f"{file} cannot be read: {error}; remove it") from error
    return [str(known.get(str(node)) or f"node {node}") for node in roster]


def _kept(path: Path, clients: int) -> tuple[int, ...]:
    try:
        nodes = tuple(int(node) for node in json.loads(path.read_text(encoding="utf-8"))["nodes"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRun(f"{path} cannot be read: {error}; restore it") from error
    if len(nodes) != clients:
        raise CorruptRun(f"{path} names {len(nodes)} nodes, the run has {clients} clients; restore it")
    return nodes
