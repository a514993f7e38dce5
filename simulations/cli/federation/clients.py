"""``lacquer admit``, ``lacquer expel``, ``lacquer clients``: who may take part in a federation, by their keys."""

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from rich.console import Console
from rich.table import Table

from privacy import durable
from simulations.cli.exits import FAILED, MISUSED, fail
from simulations.cli.federation.connection import ADDRESS, TRUST, Address, Trust, control

CLIENT_KEYS = os.environ.get("LACQUER_CLIENT_KEYS", "/keys/clients")
CLIENT_NAMES = os.environ.get("LACQUER_CLIENT_NAMES", "/admitted/clients.json")
"""Where `admit` notes which node a key is: Flower keeps keys and numbers, and names none of them."""
ADMITTED = os.environ.get("LACQUER_ADMITTED", "/admitted")
"""Folder of the keys that were let in, a file ``NODE.key`` each, for the gateway (docker/gateway.conf)."""


def admit_command(
    keys: Annotated[
        list[Path] | None, typer.Argument(help="Public keys of clients.", show_default=f"all in {CLIENT_KEYS}")
    ] = None,
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
) -> None:
    """Let clients in by their public keys; those that are in already stay in."""
    found = keys or sorted(Path(CLIENT_KEYS).glob("*.pub"))
    if not found:
        fail(f"no public key was given, and {CLIENT_KEYS} holds none; see `lacquer certificates`", FAILED)
    with control(address, ca) as superlink:
        for key in found:
            node = superlink.register(key)
            if node:
                _note(node, key.stem)
            _open_gateway(node or _latest(key.stem), key)
            typer.echo(f"{key.stem}: " + ("was let in before" if node is None else f"let in as node {node}"))


def expel_command(
    node: Annotated[str, typer.Argument(help="Number or name of the node, see `lacquer clients`.")],
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
) -> None:
    """Let a client in no longer; its key is worth nothing from then on."""
    number = _latest(node)
    if number is None and not node.isdecimal():
        fail(f"no client is called {node}; see `lacquer clients`", MISUSED)
    with control(address, ca) as superlink:
        superlink.unregister(number or node)
    (Path(ADMITTED) / f"{number or node}.key").unlink(missing_ok=True)


def clients_command(
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the clients and whether they are connected."""
    with control(address, ca) as superlink:
        if as_json:
            known = names()
            found = [{**_plain_node(node), "name": known.get(str(node["node-id"]), "")} for node in superlink.nodes()]
            typer.echo(json.dumps(found, indent=2))
            return
        table, known = Table.grid(padding=(0, 3, 0, 0)), names()
        for node in superlink.nodes():
            number = str(node["node-id"])
            table.add_row(number, str(node["status"]), known.get(number, ""))
        Console().print(table)


def _plain_node(node: Mapping[str, object]) -> dict[str, str]:
    return {"node": str(node["node-id"]), "status": str(node["status"])}


def names() -> dict[str, str]:
    """The names of nodes, in the order in which they were let in."""
    path = Path(CLIENT_NAMES)
    names: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return names


def _latest(name: str) -> str | None:
    return {known: number for number, known in names().items()}.get(name)


def _open_gateway(node: str | None, key: Path) -> None:
    """Put the key where the gateway looks for it, in the form that nodes send; without a gateway, do nothing."""
    folder = Path(ADMITTED)
    if node and folder.is_dir():
        pem = load_ssh_public_key(key.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        durable.write(folder / f"{node}.key", base64.b64encode(pem).decode() + "\n")


def _note(node: str, name: str) -> None:
    """Keep a name; without a folder for it the client is in all the same, and `clients` shows its number alone."""
    path = Path(CLIENT_NAMES)
    if path.parent.is_dir():
        durable.write(path, json.dumps(names() | {node: name}, indent=1) + "\n")
