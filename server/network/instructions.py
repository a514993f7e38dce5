"""The grid of a deployed run: whatever leaves it bears the server's signature.

What is signed says :mod:`strategies.messages.instruction`. The key and its certificate lie where the ServerApp runs:
``signing.key`` and ``signing.crt`` of the folder that ``lacquer certificates`` makes for the executor.
``LACQUER_SIGNING_KEY`` names the key elsewhere.
"""

import datetime
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from flwr.app import Message
from flwr.serverapp import Grid

from server.config.load import ConfigError
from strategies.messages.instruction import sign

VARIABLE = "LACQUER_SIGNING_KEY"
USUAL = "/keys/signing.key"


class SigningGrid(Grid):
    """A grid that signs every message on its way out through another grid.

    Raises:
        ConfigError: there is no key to sign with.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._key, self._certificate = load_signing_key(Path(os.environ.get(VARIABLE) or USUAL))
        self._last = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)  # how often it may be asked, and what else grids differ in

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        return self._grid.create_message(*arguments, **named)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sign the messages and send them."""
        return self._grid.push_messages([self._signed(message) for message in messages])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Sign the messages, send them and wait for the replies."""
        return self._grid.send_and_receive([self._signed(message) for message in messages], timeout=timeout)

    def _signed(self, message: Message) -> Message:
        # The clock, so that the numbers of a run that is resumed under the same identifier are larger too.
        self._last = max(self._last + 1, time.time_ns())
        sign(message, self._key, self._certificate, self._last)
        return message


def load_signing_key(path: Path) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    """Load the key by which nodes know the server's instructions, and the certificate beside it.

    Raises:
        ConfigError: they are not there, are something else, or the certificate has run out.
    """
    remedy = (
        f"{VARIABLE} must name the signing.key that `lacquer certificates` makes for the executor (run it again: it "
        "makes what is missing), with signing.crt beside it; nodes follow signed instructions only"
    )
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(path.with_suffix(".crt").read_bytes())
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror}; {remedy}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no key with a certificate ({type(error).__name__}); {remedy}") from error
    if not isinstance(key, Ed25519PrivateKey) or certificate.public_key() != key.public_key():
        raise ConfigError(f"{path} is no Ed25519 key of the certificate beside it; {remedy}")
    now, crt = datetime.datetime.now(datetime.UTC), path.with_suffix(".crt")
    if certificate.not_valid_after_utc < now:
        raise ConfigError(
            f"{crt} was good until {certificate.not_valid_after_utc:%Y-%m-%d}; nodes would refuse "
            "every instruction: renew it (`lacquer certificates --renew servers`)"
        )
    if certificate.not_valid_before_utc > now:
        raise ConfigError(
            f"{crt} is good from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and this host's clock says "
            f"{now:%Y-%m-%d %H:%M}; nodes would refuse every instruction: set the clock that is wrong, and if the "
            "certificate was made by it, renew it (`lacquer certificates --renew servers`)"
        )
    return key, certificate
