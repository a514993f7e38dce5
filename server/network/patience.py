"""A deployed run outlives a SuperLink that fails for a moment.

Flower 1.41 repeats a call that cannot connect or gets 502, 503 or 504, for as long as it takes. An HTTP 500 it does not
repeat, which is what a SuperLink answers whose database is locked by somebody's large upload, nor an error whose text
names TLS, such as a handshake that timed out: one of them ended the run. Here both are repeated, with Flower's own
waits, until they have lasted :data:`LIMIT` seconds. Every call of a ServerApp may be repeated: the SuperLink knows a
message that it has already.
"""

import logging
import time
from collections.abc import Callable

import httpx
from flwr.serverapp import Grid
from flwr.supercore.retry import RetryInvoker

log = logging.getLogger(__name__)

LIMIT = 300.0
"""Seconds without one answer that is none of these errors."""


def patient(grid: Grid, limit: float = LIMIT, clock: Callable[[], float] = time.monotonic) -> Grid:
    """The same grid, if it speaks to a SuperLink, with calls that are repeated for so long."""
    invoker = getattr(grid, "_retry_invoker", None)  # of Flower's HttpGrid; a grid in this process has none
    if not isinstance(invoker, RetryInvoker):
        return grid
    gives_up, succeeded = invoker.should_giveup, invoker.on_success
    failing_since: float | None = None

    def should_giveup(error: Exception) -> bool:
        nonlocal failing_since
        if not passing(error):
            return gives_up is not None and gives_up(error)
        failing_since = clock() if failing_since is None else failing_since
        lasted = clock() - failing_since
        log.warning("the SuperLink fails (%s), for %.0f s now; it is asked again for %g s", error, lasted, limit)
        return lasted >= limit

    def on_success(state: object) -> None:
        nonlocal failing_since
        failing_since = None
        if succeeded is not None:
            succeeded(state)  # type: ignore[arg-type]

    invoker.should_giveup, invoker.on_success = should_giveup, on_success
    return grid


def passing(error: Exception) -> bool:
    """Whether an error may pass and Flower would not wait for that."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    text = str(error).lower()
    return ("ssl" in text or "tls" in text) and "certificate" not in text
