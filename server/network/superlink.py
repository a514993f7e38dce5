"""Flower's SuperLink, whose counting of traffic may fail.

    python -m server.network.superlink ...

starts this in the place of ``flower-superlink``, with its options. Flower 1.41 carries a call out, then counts its
bytes. Where the database is locked in between, it answers HTTP 500 to a call that it has carried out: a message that a
node asked for counts as delivered and is lost, and its round waits for that node until ``engine.round-timeout``. Here
such a call is answered, and its bytes are not counted.
"""

import functools
import logging
from typing import Any

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


def main() -> None:
    """The command, with the options of this process."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.superlink.cli import flower_superlink

    uncounted(SqlLinkState)
    flower_superlink()


if __name__ == "__main__":
    main()
