"""Flower's SuperLink that its operator alone commands, that takes replies only from nodes, and whose counting may fail.

    python -m server.network.superlink ...

starts this in the place of ``flower-superlink``, with its options. Flower 1.41 carries a call out, then counts its
bytes. Where the database is locked in between, it answers HTTP 500 to a call that it has carried out: a message that a
node asked for counts as delivered and is lost, and its round waits for that node until ``engine.round-timeout``. Here
such a call is answered, and its bytes are not counted.

It also stores what a node sends in another one's or the server's name: a node that was let in could keep another busy
with forged instructions, which Flower hands out by a date that the sender chooses. And a time that is no number makes
every later request of the server for replies fail. Here a node may send replies in its own name (:func:`refusal`).

Who may start runs is in :mod:`server.network.operator_key`.
"""

import functools
import importlib
import logging
import math
import os
from typing import Any

from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from sqlalchemy.exc import OperationalError

from server.network.operator_key import operators_only

COUNTING = ("store_traffic", "add_clientapp_runtime")
"""What Flower's state counts after a call."""

MOST_OBJECTS = 1000
"""Most objects of one reply. One of this package has some tens; each costs the SuperLink several looks at its files."""
LONGEST = 604_800.0
"""Seconds, a week: most that a node may say it worked on a message."""

log = logging.getLogger(__name__)


def forgive_counting(state: Any) -> None:
    """Make the counting of a class of Flower's states miss what it cannot write.

    Args:
        state: such a class, as ``SqlLinkState``.
    """
    for name in COUNTING:
        setattr(state, name, _forgiving(getattr(state, name)))


def _forgiving(count: Any) -> Any:
    @functools.wraps(count)
    def counted(*arguments: Any, **named: Any) -> None:
        try:
            count(*arguments, **named)
        except OperationalError as error:
            log.warning("the traffic of a call is not counted: %s", error.orig)

    return counted


def refusal(request: Any) -> str:
    """The reason why a message of a node is not taken; empty if it is a reply in the node's own name.

    Args:
        request: Flower's ``PushMessagesRequest``; its ``node`` is the one whose key signed the call.
    """
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return "it is not one message"
    metadata = request.messages_list[0].metadata
    if not metadata.reply_to_message_id:
        return "it is an instruction, and nodes send replies only"
    if metadata.src_node_id != request.node.node_id:
        return "it is in another node's name"
    if not (math.isfinite(metadata.created_at) and math.isfinite(metadata.ttl)):
        return "its time is no number"
    if sum(1 for _ in iterate_object_tree(request.message_object_trees[0])) > MOST_OBJECTS:
        return f"it names more than {MOST_OBJECTS} objects"
    return ""


def refuse_forgeries(handlers: Any) -> None:
    """Make a SuperLink refuse what :func:`refusal` names, with HTTP 403, and count no runtime that cannot be.

    Args:
        handlers: Flower's module ``flwr.superlink.servicer.fleet.fleet_handlers``, whose callers use it by name.
    """
    push = handlers.push_messages

    @functools.wraps(push)
    def pushed(request: Any, state: Any) -> Any:
        if reason := refusal(request):
            raise FlowerError(
                ApiErrorCode.NO_PERMISSIONS, f"what node {request.node.node_id} sends is refused: {reason}"
            )
        if not all(0.0 <= seconds <= LONGEST for seconds in request.clientapp_runtime_list):
            log.warning("the runtime that node %d tells is not counted: it cannot be", request.node.node_id)
            request.ClearField("clientapp_runtime_list")
        return push(request=request, state=state)

    handlers.push_messages = pushed


def main() -> None:
    """Run Flower's SuperLink with these changes and the options of this process."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers

    os.umask(0o077)  # the database holds the tokens of tasks
    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    command._run_superlink_http_api = operators_only(command._run_superlink_http_api)
    forgive_counting(SqlLinkState)
    refuse_forgeries(fleet_handlers)
    flower_superlink()


if __name__ == "__main__":
    main()
