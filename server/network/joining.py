"""Nodes with many clients join a run: each says how many it has, and the roster keeps these numbers to the run's end.

The population of the privacy statement, the divisor of every mean and the bound on every node's sum follow from the
numbers, so they are public, set by each node's operator, and settled before anybody is drawn or charged. Who leaves or
comes does so between runs.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from privacy import durable
from privacy.errors import CorruptRun
from server.config.load import ConfigError
from server.network.grid import exchange_messages
from strategies.messages.client_update import code_fingerprint
from strategies.messages.dispatch import RoundFailed, sound_replies
from strategies.messages.own_clients import JOIN, JoinRequest, read_join_reply

log = logging.getLogger(__name__)


def join_nodes(
    file: Path, grid: Grid, nodes: Sequence[int], request: JoinRequest, *, clients: int, timeout: float
) -> tuple[int, ...]:
    """Ask each node of a roster how many clients it has; once a run, then it is read from the roster's file.

    Args:
        file: the roster's, which names the nodes already.
        clients: of the configuration: what the numbers must add up to.
        timeout: seconds for which nodes may prepare their records.

    Raises:
        ConfigError: the numbers do not add up to ``clients``.
        RoundFailed: a node did not join; its own log says why. Nothing was charged.
        CorruptRun: the file's list is not of this run.
    """
    kept = json.loads(file.read_text(encoding="utf-8"))
    if "clients" in kept:
        return _kept(file, kept["clients"], nodes, clients)
    messages = [Message(request.to_records(), node, f"{MessageType.QUERY}.{JOIN}") for node in nodes]
    replies = exchange_messages(grid, messages, timeout)
    said, missed = dict[int, int](), dict[int, str]()

    def take(content: RecordDict, position: int) -> None:
        said[position] = read_join_reply(content, code_fingerprint())

    sound_replies([(message.metadata, i) for i, message in enumerate(messages)], replies, 0, take, missed)
    if missed:
        why = "; ".join(f"node {nodes[position]}: {reason}" for position, reason in sorted(missed.items()))
        raise RoundFailed(f"not every node joined the run with its clients, and nothing was charged: {why}")
    numbers = tuple(said[position] for position in range(len(nodes)))
    if sum(numbers) != clients:
        each = ", ".join(f"node {node} has {number:,}" for node, number in zip(nodes, numbers, strict=True))
        raise ConfigError(f"clients = {clients}, but the nodes have {sum(numbers)} ({each}); set clients to their sum")
    durable.write(file, json.dumps(kept | {"clients": numbers}) + "\n")
    return numbers


def _kept(file: Path, numbers: object, nodes: Sequence[int], clients: int) -> tuple[int, ...]:
    whole = isinstance(numbers, list) and all(type(number) is int and number > 0 for number in numbers)
    if not whole or not isinstance(numbers, list) or len(numbers) != len(nodes) or sum(numbers) != clients:
        raise CorruptRun(f"{file} does not say how many clients each node has; restore it")
    return tuple(numbers)
