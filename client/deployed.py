"""The ClientApp of a deployed node: hands each message to the node's resident process, see :mod:`client.resident`.

It imports nothing but Flower. Without a resident process it is :mod:`client.app`.
"""

import json
import os
import socket
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.supercore.task_identity import TaskIdentity

from client.handover import FAILED, SOCKET, VARIABLE, receive, send


class Failed(RuntimeError):
    """What the server is told of a failure on a node: the class of the exception."""


class HandingOver(ClientApp):
    """A ClientApp that lets another process do the work."""

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply; ``context`` is changed as the other process has changed it."""
        resident = _resident()
        if resident is None:
            from client.app import app as here

            return here(message=message, context=context)
        identity = {name: getattr(TaskIdentity, name) for name in ("run_id", "node_id", "task_id")}
        with resident:
            send(
                resident,
                json.dumps(identity).encode(),
                message_to_proto(message).SerializeToString(),
                context_to_proto(context).SerializeToString(),
            )
            reply, changed = receive(resident, 2)
        if reply == FAILED:
            raise Failed(changed.decode())
        context.state = context_from_proto(ContextProto.FromString(changed)).state
        return message_from_proto(MessageProto.FromString(reply))


def _resident() -> socket.socket | None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(Path(folder) / SOCKET))
    except OSError:
        connection.close()
        return None
    return connection


app = HandingOver()
