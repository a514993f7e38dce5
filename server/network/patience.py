"""A deployed run and Flower's executor outlive a SuperLink that fails for a moment.

Flower 1.41 gives up at an HTTP 500 or an error of TLS: one of them ended the run, or the executor and with it every run
that it had started. Here both are repeated (:func:`client.supernode.repeat_calls`), and a message whose first sending
was cut short is completed (:class:`client.supernode.Completing`).

    python -m server.network.patience --runtime-api-address ...

starts ``flower-superexec``, with its own options, so that it is patient. Like a SuperNode it touches a file when the
SuperLink answers, so ``python -m client.supernode --healthy`` is its health check.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

from client.supernode import PATIENCE, Completing, execute, mark, repeat_calls


class RuntimeClient(Completing, RuntimeHttpClient):
    """A grid's client for the SuperLink that hands on one reply a call, once all its objects are there.

    Flower's grid takes a reply when it is announced, then waits for up to two hours for the objects that the node named
    and may never upload, while the other replies wait behind it. And of several that it takes together, one that cannot
    be read loses the others.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._announced: dict[str, tuple[Any, ObjectTree, list[str]]] = {}
        """Reply, its tree and which of its objects have not been seen, by the name of the message it answers."""
        self._fetched: dict[str, PullObjectResponse] = {}
        """Objects of the reply that is handed on: it is read next."""

    def PushMessages(self, request: Any) -> Any:
        self._announced.clear()  # a new exchange begins: what is not whole by now is late
        return super().PushMessages(request)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        self._fetched.clear()
        names = list(request.message_ids)
        if unknown := [name for name in names if name not in self._announced]:
            found = super().PullMessages(PullAppMessagesRequest(message_ids=unknown))
            for reply, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                parts = list({node.object_id: None for node in iterate_object_tree(tree)})
                self._announced[reply.metadata.reply_to_message_id] = reply, tree, parts
        whole = next((name for name in names if name in self._announced and self._whole(name)), None)
        if whole is None:
            return PullAppMessagesResponse()
        reply, tree, _ = self._announced.pop(whole)
        return PullAppMessagesResponse(messages_list=[reply], message_object_trees=[tree])

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        return self._fetched.pop(request.object_id, None) or super().PullObject(request)

    def _whole(self, name: str) -> bool:
        """Whether nothing more of a reply is to come; what the SuperLink has given up will not come."""
        reply, _, missing = self._announced[name]
        while missing:
            asked = PullObjectRequest(
                node=Node(node_id=SUPERLINK_NODE_ID), run_id=reply.metadata.run_id, object_id=missing[-1]
            )
            response = super().PullObject(asked)
            if response.object_found and not response.object_available:
                self._fetched.clear()
                return False
            self._fetched[missing.pop()] = response
        return True


def make_patient(grid: Grid, limit: float = PATIENCE, clock: Callable[[], float] = time.monotonic) -> Grid:
    """Make a grid that speaks to a SuperLink repeat its calls; another grid is returned as it is.

    Args:
        limit: seconds for which a call is repeated.
    """
    invoker = getattr(grid, "_retry_invoker", None)  # of Flower's HttpGrid; a grid in this process has none
    if isinstance(invoker, RetryInvoker):
        repeat_calls(invoker, limit, clock)
        invoker.max_time = limit  # else a SuperLink that is gone is called for ever, and the run never ends
        module: Any = importlib.import_module("flwr.superlink.grid.http_grid")
        module.RuntimeHttpClient = RuntimeClient  # by this name a grid makes its client, with its first call
    return grid


def run_executor() -> None:
    """Run ``flower-superexec``, made patient, with the options of this process."""
    module: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    module.make_simple_http_retry_invoker = lambda: repeat_calls(note_answers(make_simple_http_retry_invoker()))
    execute(sys.argv[1:])


def note_answers(invoker: RetryInvoker) -> RetryInvoker:
    """Make an invoker note in a file that a call was answered; returns it. The executor asks for work every second."""
    succeeded = invoker.on_success

    def on_success(state: Any) -> None:
        mark().touch()
        if succeeded is not None:
            succeeded(state)

    invoker.on_success = on_success
    return invoker


if __name__ == "__main__":
    os.umask(0o077)
    run_executor()
