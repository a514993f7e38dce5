"""A deployed run and Flower's executor outlive a SuperLink that fails for a moment.

Flower 1.41 gives up at an HTTP 500 or an error of TLS: one of them ended the run, or the executor and with it every run
that it had started. Here both are repeated (:func:`client.supernode.repeating`), and a message whose first sending was
cut short is completed (:class:`client.supernode.Completing`).

    python -m server.network.patience --runtime-api-address ...

starts ``flower-superexec``, with its own options, so that it is patient. Like a SuperNode it touches a file when the
SuperLink answers, so ``python -m client.supernode --healthy`` is its health check.
"""

import importlib
import time
from collections.abc import Callable
from typing import Any

from flwr.serverapp import Grid
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

from client.supernode import PATIENCE, Completing, mark, repeating


class RuntimeClient(Completing, RuntimeHttpClient):
    """What a grid calls the SuperLink by."""


def patient(grid: Grid, limit: float = PATIENCE, clock: Callable[[], float] = time.monotonic) -> Grid:
    """The same grid, if it speaks to a SuperLink, with calls that are repeated for so long."""
    invoker = getattr(grid, "_retry_invoker", None)  # of Flower's HttpGrid; a grid in this process has none
    if isinstance(invoker, RetryInvoker):
        repeating(invoker, limit, clock)
        module: Any = importlib.import_module("flwr.superlink.grid.http_grid")
        module.RuntimeHttpClient = RuntimeClient  # by this name a grid makes its client, with its first call
    return grid


def executor() -> None:
    """``flower-superexec``, with the options of this process."""
    from flwr.supercore.cli import flower_superexec  # a second of imports, which no ServerApp needs

    module: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    module.make_simple_http_retry_invoker = lambda: repeating(noting(make_simple_http_retry_invoker()))
    flower_superexec()


def noting(invoker: RetryInvoker) -> RetryInvoker:
    """The same invoker, which notes in a file that a call was answered: the executor asks for work every second."""
    succeeded = invoker.on_success

    def on_success(state: Any) -> None:
        mark().touch()
        if succeeded is not None:
            succeeded(state)

    invoker.on_success = on_success
    return invoker


if __name__ == "__main__":
    executor()
