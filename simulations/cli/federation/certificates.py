"""``lacquer certificates``, ``lacquer identity``, ``lacquer federation``: what a federation needs before its first run.

``certificates`` makes everything secret in one command:

authority/   ca.key ca.crt             signs certificates; needed by nobody while the federation runs
superlink/   ca.crt server.crt server.key operator.key
executor/    ca.crt operator.key signing.crt signing.key clients/NAME.pub
gateway/     ca.crt server.crt server.key
NAME/        ca.crt key key.pub        one folder for every client; goes to that client

The other two are for clients that open sums together (docs/trust.md). Every client makes its own identity where it will
be used and tells the others its public half. Somebody makes the list, everybody gets the same file, and compares it by
its digest over a way that the server does not control.
"""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privacy.commitment import WEAKEST_NOISE_MULTIPLIER
from simulations.cli.exits import MISUSED, fail

if TYPE_CHECKING:
    from privacy.commitment import Commitment

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
SUPERLINK = ("superlink", "localhost", "127.0.0.1")
RESERVED = ("authority", "superlink", "executor", "gateway")
SERVERS = "servers"


def certificates_command(
    folder: Annotated[Path, typer.Argument(help="Where keys are kept.")],
    client: Annotated[list[str] | None, typer.Option(help="Name of a client. Repeatable.")] = None,
    address: Annotated[
        list[str] | None, typer.Option(help="A further name or address by which clients reach the gateway. Repeatable.")
    ] = None,
    renew: Annotated[
        list[str] | None,
        typer.Option(help="Make anew what exists: the name of a client, or 'servers' for all of theirs."),
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
    """Make the key of the client whose host this is, if there is none; returns the public half, one line."""
    from server.network import certificates

    if not (folder / "key").exists():
        certificates.make_node_key(folder)
    return (folder / "key.pub").read_text(encoding="ascii").strip()


def make_keys(folder: Path, clients: list[str], addresses: list[str], renew: set[str]) -> list[str]:
    """Make the keys that are missing or to be renewed; returns what was made, in words."""
    from server.network.certificates import (
        make_authority,
        make_certificate,
        make_node_key,
        make_operator_key,
        make_signing_key,
    )

    signer, made = folder / "authority", []
    if make_authority(signer):
        made.append("authority: a new certificate authority")
    for server, names in (("superlink", SUPERLINK), ("gateway", ("gateway", "localhost", "127.0.0.1", *addresses))):
        if SERVERS in renew or not (folder / server / "server.key").exists():
            make_certificate(folder / server, "server", names, signer)
            made.append(f"{server}: a certificate for {', '.join(names)}")
    superlink, executor = folder / "superlink", folder / "executor"
    executor.mkdir(exist_ok=True, mode=0o700)
    for name in ("signing.key", "signing.crt", "clients", "federation.json"):  # where they were kept before
        if (superlink / name).exists() and not (executor / name).exists():
            shutil.move(superlink / name, executor / name)
            made.append(f"executor: {name}, which was in {superlink}")
    (executor / "ca.crt").write_bytes((signer / "ca.crt").read_bytes())
    if SERVERS in renew or not (executor / "signing.key").exists():
        make_signing_key(executor, signer)
        made.append("executor: a key that signs instructions to clients")
    if SERVERS in renew or not all((part / "operator.key").exists() for part in (superlink, executor)):
        make_operator_key(superlink, executor)
        made.append("superlink, executor: the operator's key")
    for name in clients:
        if name not in renew and (folder / name / "key").exists():
            continue
        public = make_node_key(folder / name)
        (folder / name / "ca.crt").write_bytes((signer / "ca.crt").read_bytes())
        known = executor / "clients"
        known.mkdir(exist_ok=True, mode=0o700)
        (known / f"{name}.pub").write_bytes(public)
        made.append(f"{name}: a key; its public half is {known / name}.pub")
    return made


def identity_command(
    path: Annotated[Path, typer.Argument(help="The private identity; made if it does not exist.")],
) -> None:
    """Make a client's identity, and print its public half."""
    from privacy.secagg import federation, keys

    try:
        if not path.exists():
            federation.save_identity(path, keys.fresh_identity())
        Console().print(keys.public_identity(federation.load_identity(path)).hex(), highlight=False, soft_wrap=True)
    except (OSError, ValueError) as error:
        fail(str(error), MISUSED)


def federation_command(
    path: Annotated[Path, typer.Argument(help="The list to write, or to show if no member is given.")],
    member: Annotated[list[str] | None, typer.Option(help="A client's public identity. Repeatable.")] = None,
    survivors: Annotated[int, typer.Option(help="Least number of clients left in a round; 0 is four fifths.")] = 0,
    colluding: Annotated[int, typer.Option(help="Clients that may collude with the server.")] = 0,
    epsilon: Annotated[
        float, typer.Option(help="What all runs on this list may cost together; every client refuses beyond it.")
    ] = 0.0,
    delta: Annotated[float, typer.Option(help="Failure probability of that guarantee, below one over clients.")] = 0.0,
    least_noise: Annotated[
        float, typer.Option(help="Least noise multiplier of a release that a client takes part in.")
    ] = WEAKEST_NOISE_MULTIPLIER,
) -> None:
    """Write the list of a federation, or show one, with the digest that everybody compares."""
    from privacy.secagg.federation import Federation

    try:
        if member:
            public = tuple(_identity(one) for one in member)
            made = Federation(public, _committed(len(public), survivors, colluding, epsilon, delta), least_noise)
            with path.open("x", encoding="ascii") as file:
                file.write(made.to_text())
        federation = Federation.from_text(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}", MISUSED)
    shares, console = federation.noise_shares, Console()
    commitment = federation.commitment
    console.print(
        f"{shares.parties} clients, {shares.survivors} must hand in a vector, {shares.colluding} may collude, "
        f"{shares.threshold} open a sum; noise multiplier at least {federation.least_noise_multiplier:g}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"all runs together: epsilon {commitment.epsilon:g} at delta {commitment.delta:g} (Rényi divergence "
        f"{commitment.rho:.6g} at order {commitment.order})",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"digest {federation.digest.hex()}", highlight=False, soft_wrap=True)


def _committed(clients: int, survivors: int, colluding: int, epsilon: float, delta: float) -> "Commitment":
    from privacy.accountants.calibration import filter_commitment
    from privacy.events import Poisson
    from server.config.load import parse

    settings = {
        "clients": clients,
        "sampling-rate": 1.0,
        "privacy": {
            "delta": 0.5 / clients,
            "trust": "secagg",
            "mode": "filter",
            "noise": "discrete",
            "secagg": {"min-survivors": survivors, "colluding": colluding},
        },
        "simulation": {"clients-per-node": 1},
    }
    shares = parse(settings).noise_shares
    if epsilon <= 0.0 or delta <= 0.0:
        raise ValueError(
            f"--epsilon and --delta must be > 0, got {epsilon:g} and {delta:g}; they say what every client lets all "
            "runs on this list cost together, for example --epsilon 4 --delta 1e-3"
        )
    everybody = Poisson(1.0, clients)  # the best order does not depend on how the budget is shared out over rounds
    return filter_commitment(epsilon, delta, everybody, 1, adjacency="zero_out", noise_shares=shares)[0]


def _identity(member: str) -> bytes:
    """Read a public identity as it was printed; ValueError naming what is none."""
    try:
        return bytes.fromhex(member)
    except ValueError:
        raise ValueError(
            f"--member {member}: is no public identity, which is hexadecimal; give what `lacquer identity` printed"
        ) from None
