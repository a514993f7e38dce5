"""The SuperLink that a command speaks to: where it is, how each knows the other, and its Control API meanwhile."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from server.config.load import ConfigError
from server.network.operator_key import VARIABLE, keep_credentials, key_file
from simulations.cli.exits import FAILED, fail, refusals
from simulations.cli.federation.control import Control
from simulations.engines.flower import RunFailed

ADDRESS = os.environ.get("LACQUER_SUPERLINK", "127.0.0.1:8000")
TRUST = os.environ.get("LACQUER_CA", "/keys/ca.crt")

Address = Annotated[str, typer.Option(help="HOST:PORT of the SuperLink.")]
Trust = Annotated[Path, typer.Option(help="Certificate that signed the SuperLink's.")]


@contextmanager
def control(address: str, ca: Path) -> Iterator[Control]:
    """Open the Control API for as long as a command runs; what it refuses ends the command in words."""
    with refusals():
        check_trust(ca)
    with tempfile.TemporaryDirectory(prefix="lacquer-") as home:
        try:
            keep_credentials(Path(home), address, key_file().read_bytes())
            with Control(Path(home), address, ca).open() as superlink:
                yield superlink
        except RunFailed as failure:
            if "Authentication failed" in str(failure):
                fail(f"{address}: the SuperLink has another operator.key than {key_file()}; give it its own", FAILED)
            fail(str(failure), FAILED)


def check_trust(ca: Path) -> None:
    """Check for the certificate that identifies the SuperLink, and the key by which it knows its operator.

    Raises:
        ConfigError: one of them is missing.
    """
    if not ca.is_file():
        raise ConfigError(
            f"--ca {ca}: there is no such file; run this in the executor's container, or give the "
            "ca.crt that `lacquer certificates` made"
        )
    if not os.access(key_file(), os.R_OK):
        raise ConfigError(
            f"{key_file()}: cannot be read; run this in the executor's container, or let {VARIABLE} name the "
            "operator.key that `lacquer certificates` made (run it again: it makes what is missing)"
        )
