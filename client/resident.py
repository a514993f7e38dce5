"""A process that has imported everything already, and forks for every message.

Flower starts a process for each message to a SuperNode. Importing torch, transformers and the ClientApp takes such a
process five seconds of CPU; opening the node's records and its base model takes a fifth of one. So a node keeps one
process that imports and then waits; a message costs a fork of it, which ends with the message. Nothing is kept from one
message to the next, as in Flower's own processes.

    python -m client.resident flower-supernode --superlink ...

starts the SuperNode and ends with it. The processes that Flower starts load :mod:`client.deployed`, which hands their
message over through a socket in a private folder named by ``LACQUER_RESIDENT``. Where that is not set or nobody
answers, they do the work themselves.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from client.handover import FAILED, SOCKET, VARIABLE, receive, send

log = logging.getLogger(__name__)


def main(command: list[str]) -> int:
    """Run ``command`` and serve until it ends; its exit code."""
    with tempfile.TemporaryDirectory(prefix="lacquer-") as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(Path(folder) / SOCKET))  # a folder that only this user may enter
        listening.listen(64)
        listening.settimeout(0.5)
        node = subprocess.Popen(command, env={**os.environ, VARIABLE: folder})
        signal.signal(signal.SIGTERM, lambda *_: node.terminate())
        try:
            return serve(listening, node)
        finally:
            if node.poll() is None:
                node.terminate()
                node.wait()


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
    from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Context, Message
    from flwr.supercore.task_identity import TaskIdentity

    from client.node import NodeFailed

    identity, message, context = receive(connection, 3)
    for name, value in json.loads(identity).items():
        setattr(TaskIdentity, name, value)
    known = context_from_proto(Context.FromString(context))
    try:
        reply = app(message=message_from_proto(Message.FromString(message)), context=known)
    except Exception as error:
        log.exception("this message could not be answered")
        send(
            connection, FAILED, str(error).encode() if isinstance(error, NodeFailed) else type(error).__name__.encode()
        )
        return
    send(connection, message_to_proto(reply).SerializeToString(), context_to_proto(known).SerializeToString())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main(sys.argv[1:]))
