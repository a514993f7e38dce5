"""A process that has imported everything already, and forks for every message.

Flower starts a process for each message to a SuperNode. Importing torch, transformers and the ClientApp takes such a
process five seconds of CPU; opening the node's records and its base model takes a fifth of one. So a node keeps one
process that imports and then waits; a message costs a fork of it, which ends with the message. Nothing is kept from one
message to the next, as in Flower's own processes.

    python -m client.fork_server flower-supernode --superlink ...

starts the SuperNode and ends with it, which it does when its server is out of reach (:mod:`client.supernode`). The
processes that Flower starts load this module as their ClientApp, which imports nothing but Flower and hands their
message over, in framed bytes, through a socket in a private folder named by ``LACQUER_RESIDENT``. Where that is not set
or nobody answers, they do the work themselves, as :mod:`client.app` does.
"""

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.supercore.task_identity import TaskIdentity

log = logging.getLogger(__name__)

VARIABLE = "LACQUER_RESIDENT"
"""Names the private folder of the socket."""
SOCKET = "resident"
FAILED = b"failed"
"""Instead of a reply; the exception's class follows."""

_LENGTH = struct.Struct(">Q")


def send(connection: socket.socket, *parts: bytes) -> None:
    """Send parts, each behind its length."""
    for part in parts:
        connection.sendall(_LENGTH.pack(len(part)))
        connection.sendall(part)


def receive(connection: socket.socket, count: int) -> list[bytes]:
    """Receive so many parts; ConnectionError if the other side has gone before that."""
    return [_exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]) for _ in range(count)]


def _exactly(connection: socket.socket, size: int) -> bytes:
    taken = bytearray()
    while len(taken) < size:
        part = connection.recv(min(size - len(taken), 2**20))
        if not part:
            raise ConnectionError("the other side has gone")
        taken += part
    return bytes(taken)


def main(command: list[str]) -> int:
    """Run ``command`` and serve until it ends; its exit code."""
    with tempfile.TemporaryDirectory(prefix="lacquer-") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(Path(folder) / SOCKET))  # a folder that only this user may enter
        listening.listen(64)
        listening.settimeout(0.5)
        node = subprocess.Popen(watched_command(command), env={**os.environ, VARIABLE: folder})
        signal.signal(signal.SIGTERM, lambda *_: node.terminate())
        try:
            return serve(listening, node)
        finally:
            if node.poll() is None:
                node.terminate()
                node.wait()


def watched_command(command: list[str]) -> list[str]:
    """Flower's command in the form that ends when it no longer reaches its server, see :mod:`client.supernode`."""
    if Path(command[0]).name != "flower-supernode":
        return command
    return [sys.executable, "-m", "client.supernode", *command[1:]]


def serve(listening: socket.socket, node: "subprocess.Popen[bytes]") -> int:
    """Fork for every message until ``node`` ends; its exit code."""
    import client.app  # before the first fork, and after the SuperNode was started: it connects meanwhile

    children: set[int] = set()
    while node.poll() is None:
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(None)
            if child := os.fork():
                children.add(child)
                continue
            code = 1
            try:
                listening.close()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                answer(connection, client.app.app)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # the parent's folder and its SuperNode are not this process's to end
    return node.returncode


def answer(connection: socket.socket, app: Any) -> None:
    """Answer the one message of a connection; what an exception says stays here, as it does without this module."""
    from client.node import NodeFailed

    identity, message, context = receive(connection, 3)
    for name, value in json.loads(identity).items():
        setattr(TaskIdentity, name, value)
    known = context_from_proto(ContextProto.FromString(context))
    try:
        reply = app(message=message_from_proto(MessageProto.FromString(message)), context=known)
    except Exception as error:
        log.exception("this message could not be answered")
        said = str(error) if isinstance(error, NodeFailed) else type(error).__name__
        send(connection, FAILED, said.encode())
        return
    send(connection, message_to_proto(reply).SerializeToString(), context_to_proto(known).SerializeToString())


class Failed(RuntimeError):
    """A failure on a node in the words that the server is told: the class of the exception."""


class ForwardingApp(ClientApp):
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


app = ForwardingApp()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main(sys.argv[1:]))
