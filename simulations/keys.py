"""``lacquer keys``: everything secret that a federation needs, in one command.

authority/   ca.key ca.crt             signs certificates; needed by nobody while the federation runs
superlink/   ca.crt server.crt server.key clients/NAME.pub
gateway/     ca.crt server.crt server.key
NAME/        ca.crt key key.pub        one folder for every client; goes to that client
"""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from simulations.endings import MISUSED, fail

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
SUPERLINK = ("superlink", "localhost", "127.0.0.1")
RESERVED = ("authority", "superlink", "gateway")
SERVERS = "servers"


def keys_command(
    folder: Annotated[Path, typer.Argument(help="Where keys are kept.")],
    client: Annotated[list[str] | None, typer.Option(help="Name of a client. Repeatable.")] = None,
    address: Annotated[
        list[str] | None, typer.Option(help="A further name or address by which clients reach the gateway. Repeatable.")
    ] = None,
    renew: Annotated[
        list[str] | None,
        typer.Option(help="Make anew what exists: the name of a client, or 'servers' for both certificates."),
    ] = None,
    owner: Annotated[int | None, typer.Option(help="User id that the files shall belong to (needs root).")] = None,
    own: Annotated[
        bool,
        typer.Option(
            "--own", help="On a client's host: make its key in FOLDER if there is none; print the public half."
        ),
    ] = False,
) -> None:
    """Make certificates and client keys; what exists is kept."""
    clients, again = client or [], set(renew or [])
    for name in clients:
        if not NAME.fullmatch(name) or name in RESERVED or name == SERVERS:
            fail(f"--client {name}: must be small letters, digits and '-', and none of {', '.join(RESERVED)}", MISUSED)
    if unknown := again - {SERVERS, *clients}:
        fail(f"--renew {sorted(unknown)[0]}: must be 'servers' or one of the clients named by --client", MISUSED)
    try:
        made = [own_key(folder)] if own else make_keys(folder, clients, address or [], again)
        if owner is not None:
            for path in folder.rglob("*"):  # the folder itself may be a mount of the container
                os.chown(path, owner, owner)
    except OSError as error:
        place = error.filename or folder
        fail(f"{folder}: cannot keep keys there: {place}: {error.strerror}; name a folder that can be written", MISUSED)
    typer.echo("\n".join(made) if made else "everything exists; nothing was made")


def own_key(folder: Path) -> str:
    """Make the key of the client whose host this is, if there is none; the public half, one line."""
    from server.certificates import node_key

    if not (folder / "key").exists():
        node_key(folder)
    return (folder / "key.pub").read_text(encoding="ascii").strip()


def make_keys(folder: Path, clients: list[str], addresses: list[str], renew: set[str]) -> list[str]:
    """Make what is missing or to be renewed; what was made, in words."""
    from server.certificates import authority, certificate, node_key  # only this command needs cryptography

    signer, made = folder / "authority", []
    if authority(signer):
        made.append("authority: a new certificate authority")
    for server, names in (("superlink", SUPERLINK), ("gateway", ("gateway", "localhost", "127.0.0.1", *addresses))):
        if SERVERS in renew or not (folder / server / "server.key").exists():
            certificate(folder / server, "server", names, signer)
            made.append(f"{server}: a certificate for {', '.join(names)}")
    for name in clients:
        if name not in renew and (folder / name / "key").exists():
            continue
        public = node_key(folder / name)
        (folder / name / "ca.crt").write_bytes((signer / "ca.crt").read_bytes())
        known = folder / "superlink" / "clients"
        known.mkdir(exist_ok=True, mode=0o700)
        (known / f"{name}.pub").write_bytes(public)
        made.append(f"{name}: a key; its public half is {known / name}.pub")
    return made
