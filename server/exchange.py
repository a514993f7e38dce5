"""Messages out, replies in: each reply is handed on as it comes, and one that cannot even be read costs only itself.

Flower's ``Grid.send_and_receive`` keeps all replies until the last is there, and a reply whose bytes are no message
makes it raise: one hostile node would end the run. Here a reply can be summed and let go before the next is taken, and
what Flower cannot read counts as not sent. An unreachable SuperLink is still an error.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Most replies fetched in one request: what is in memory at once, and what an unreadable reply can take along."""


def answers(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
    """Send ``messages`` now; the replies, in the order in which they come within ``timeout`` seconds."""
    # Now: a message has its name from here on. What the SuperLink does not take (a node unregistered since) has none.
    waiting = [identifier for identifier in grid.push_messages(messages) if identifier is not None]
    return _arriving(grid, waiting, timeout)


def _arriving(grid: Grid, waiting: list[str], timeout: float) -> Iterator[Message]:
    deadline = time.monotonic() + timeout
    interval = float(getattr(grid, "pull_interval", 1.0))
    while waiting and time.monotonic() < deadline:
        came: set[str] = set()
        for start in range(0, len(waiting), AT_ONCE):
            for reply in _pulled(grid, waiting[start : start + AT_ONCE], came):
                came.add(reply.metadata.reply_to_message_id)
                yield reply
        waiting = [identifier for identifier in waiting if identifier not in came]
        if waiting:
            time.sleep(min(interval, max(0.0, deadline - time.monotonic())))
    if waiting:
        log.warning("%g s are over; what has not come by now is not waited for", timeout)


def _pulled(grid: Grid, batch: Sequence[str], given_up: set[str]) -> list[Message]:
    """The replies of a batch that are there; identifiers of unreadable ones are added to ``given_up``."""
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
