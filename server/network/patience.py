"""A deployed run and Flower's executor outlive a SuperLink that fails for a moment.

Flower 1.41 repeats a call that cannot connect or gets 502, 503 or 504, for as long as it takes. An HTTP 500 it does not
repeat, which is what a SuperLink answers whose database is locked by somebody's large upload, nor an error whose text
names TLS, such as a handshake that timed out: one of them ended the run, or the executor and with it every run that
it had started. Here both are repeated, with Flower's own waits, until they have lasted :data:`LIMIT` seconds. Every
call of a ServerApp may be repeated: the SuperLink knows a message that it has already.

    python -m server.network.patience --runtime-api-address ...

starts ``flower-superexec``, with its own options, so that it is patient.
"""

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
from flwr.serverapp import Grid
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker

log = logging.getLogger(__name__)

LIMIT = 300.0
"""Seconds without one answer that is none of these errors."""


def patient(grid: Grid, limit: float = LIMIT, clock: Callable[[], float] = time.monotonic) -> Grid:
    """The same grid, if it speaks to a SuperLink, with calls that are repeated for so long."""
    invoker = getattr(grid, "_retry_invoker", None)  # of Flower's HttpGrid; a grid in this process has none
    if isinstance(invoker, RetryInvoker):
        repeating(invoker, limit, clock)
    return grid


def repeating(invoker: RetryInvoker, limit: float = LIMIT, clock: Callable[[], float] = time.monotonic) -> RetryInvoker:
    """The same invoker, which gives up only after so many seconds of errors that may pass."""
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
    return invoker


def executor() -> None:
    """``flower-superexec``, with the options of this process."""
    from flwr.supercore.cli import flower_superexec  # a second of imports, which no ServerApp needs

    module: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    module.make_simple_http_retry_invoker = lambda: repeating(make_simple_http_retry_invoker())
    flower_superexec()


def passing(error: Exception) -> bool:
    """Whether an error may pass and Flower would not wait for that."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    text = str(error).lower()
    return ("ssl" in text or "tls" in text) and "certificate" not in text


if __name__ == "__main__":
    executor()
