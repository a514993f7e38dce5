"""A federation's authority and the server's key for instructions, for tests of deployed nodes."""

import functools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.app import Message

from server.network.certificates import make_authority, make_signing_key
from server.network.instructions import VARIABLE, load_signing_key
from strategies.messages.instruction import sign

_KEPT = tempfile.TemporaryDirectory(prefix="lacquer-keys-")


@dataclass(frozen=True)
class Server:
    """Keys as `lacquer certificates` makes them."""

    folder: Path

    @staticmethod
    def of(folder: Path) -> "Server":
        make_authority(folder / "authority")
        make_signing_key(folder / "executor", folder / "authority")
        return Server(folder)

    @property
    def authority(self) -> str:
        return str(self.folder / "authority" / "ca.crt")

    @property
    def key(self) -> Path:
        return self.folder / "executor" / "signing.key"

    def signed(self, message: Message) -> Message:
        sign(message, *load_signing_key(self.key), time.time_ns())
        return message


@functools.cache
def server() -> Server:
    """One for all tests of a process."""
    return Server.of(Path(_KEPT.name))


@pytest.fixture
def signing(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server whose key ServerApps of this test sign with."""
    monkeypatch.setenv(VARIABLE, str(server().key))
    return server()
