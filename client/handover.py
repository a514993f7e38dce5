"""How a message gets from the process that Flower starts to the one that has everything imported: framed bytes."""

import socket
import struct

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
