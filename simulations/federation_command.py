"""``lacquer identity`` and ``lacquer federation``: what clients need before they open sums together (docs/trust.md).

Every client makes its own identity where it will be used and tells the others its public half. Somebody makes the list,
everybody gets the same file, and compares it by its digest over a way that the server does not control.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from privacy.commitment import WEAKEST_NOISE_MULTIPLIER
from simulations.endings import MISUSED, fail


def identity_command(
    path: Annotated[Path, typer.Argument(help="The private identity; made if it does not exist.")],
) -> None:
    """Make a client's identity, and print its public half."""
    from privacy.secagg import keys  # only these commands need cryptography
    from privacy.secagg.federation import load_identity, save_identity

    try:
        if not path.exists():
            save_identity(path, keys.fresh_identity())
        Console().print(keys.public_identity(load_identity(path)).hex(), highlight=False, soft_wrap=True)
    except (OSError, ValueError) as error:
        fail(str(error), MISUSED)


def federation_command(
    path: Annotated[Path, typer.Argument(help="The list to write, or to show if no member is given.")],
    member: Annotated[list[str] | None, typer.Option(help="A client's public identity. Repeatable.")] = None,
    survivors: Annotated[int, typer.Option(help="Least number of clients left in a round; 0 is four fifths.")] = 0,
    colluding: Annotated[int, typer.Option(help="Clients that may collude with the server.")] = 0,
    least_noise: Annotated[
        float, typer.Option(help="Least noise multiplier of a release that a client takes part in.")
    ] = WEAKEST_NOISE_MULTIPLIER,
) -> None:
    """Write the list of a federation, or show one, with the digest that everybody compares."""
    from privacy.secagg.federation import Federation
    from simulations.calibrate_secagg import shares_of

    try:
        if member:
            public = tuple(_identity(one) for one in member)
            made = Federation(public, shares_of(len(public), survivors, colluding), least_noise)
            with path.open("x", encoding="ascii") as file:
                file.write(made.to_text())
        federation = Federation.from_text(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}", MISUSED)
    shares, console = federation.noise_shares, Console()
    console.print(
        f"{shares.parties} clients, {shares.survivors} must hand in a vector, {shares.colluding} may collude, "
        f"{shares.threshold} open a sum; noise multiplier at least {federation.least_noise_multiplier:g}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"digest {federation.digest.hex()}", highlight=False, soft_wrap=True)


def _identity(member: str) -> bytes:
    """A public identity as it was printed; ValueError naming what is none."""
    try:
        return bytes.fromhex(member)
    except ValueError:
        raise ValueError(
            f"--member {member}: is no public identity, which is hexadecimal; give what `lacquer identity` printed"
        ) from None
