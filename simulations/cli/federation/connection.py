"""The SuperLink that a command speaks to: where it is, whose certificate it shows, and its Control API meanwhile."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from server.config.load import ConfigError
from simulations.cli.exits import FAILED, fail, refusals
from simulations.engines.control import Control
from simulations.engines.flower import RunFailed

ADDRESS = os.environ.get("LACQUER_SUPERLINK", "127.0.0.1:8000")
TRUST = os.environ.get("LACQUER_CA", "/keys/ca.crt")

Address = Annotated[str, typer.Option(help="HOST:PORT of the SuperLink.")]
Trust = Annotated[Path, typer.Option(help="Certificate that signed the SuperLink's.")]


@contextmanager
def control(address: str, ca: Path) -> Iterator[Control]:
    """The Control API for as long as a command runs; what it refuses ends the command in words."""
    with refusals():
        check_trust(ca)
    with tempfile.TemporaryDirectory(prefix="lacquer-") as home:
        try:
            yield Control(Path(home), address, ca).open()
        except RunFailed as failure:
            fail(str(failure), FAILED)


def check_trust(ca: Path) -> None:
    """ConfigError unless there is a certificate to know the SuperLink by."""
    if not ca.is_file():
        raise ConfigError(
            f"--ca {ca}: there is no such file; run this in the executor's container, or give the "
            "ca.crt that `lacquer certificates` made"
        )
