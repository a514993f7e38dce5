"""Flower's SuperLink, whose counting of traffic may fail, and where every node answers for itself.

    python -m server.network.superlink ...

starts this in the place of ``flower-superlink``, with its options. Flower 1.41 carries a call out, then counts its
bytes. Where the database is locked in between, it answers HTTP 500 to a call that it has carried out: a message that a
node asked for counts as delivered and is lost, and its round waits for that node until ``engine.round-timeout``. Here
such a call is answered, and its bytes are not counted. And it knows who calls, but not that a reply is the caller's.
"""

import functools
import logging
from typing import Any

from flwr.supercore.error import ApiErrorCode, FlowerError
from sqlalchemy.exc import OperationalError

COUNTING = ("store_traffic", "add_clientapp_runtime")
"""What Flower's state counts after a call."""

log = logging.getLogger(__name__)


def uncounted(state: Any) -> None:
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


def each_for_itself(handlers: Any) -> None:
    """Make a SuperLink refuse a node's reply in the name of another node, with HTTP 403.

    Args:
        handlers: Flower's module ``flwr.superlink.servicer.fleet.fleet_handlers``, whose callers use it by name.
    """
    push = handlers.push_messages

    @functools.wraps(push)
    def pushed(request: Any, state: Any) -> Any:
        for message in request.messages_list:
            if message.metadata.reply_to_message_id and message.metadata.src_node_id != request.node.node_id:
                text = f"node {request.node.node_id} answers for node {message.metadata.src_node_id}"
                raise FlowerError(ApiErrorCode.NO_PERMISSIONS, text)
        return push(request=request, state=state)

    handlers.push_messages = pushed


def main() -> None:
    """The command, with the options of this process."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers

    uncounted(SqlLinkState)
    each_for_itself(fleet_handlers)
    flower_superlink()


if __name__ == "__main__":
    main()
