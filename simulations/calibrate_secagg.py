"""`lacquer calibrate --trust secagg`: the noise that clients make together, beside what a trusted server would need."""

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from privacy.calibration import calibrate, filter_commitment
from privacy.distributed_noise import NoiseShares
from privacy.events import Poisson
from server.config import parse
from simulations.notation import delta_text, number_text


def secagg_page(
    epsilon: float, delta: float, clients: int, rate: float, rounds: int, survivors: int, colluding: int
) -> RenderableType:
    """Noise of the sum, of one client's share, and of a mean, without and with trust in the server.

    Args:
        epsilon, delta: the guarantee.
        clients: all of whom take part in every round.
        rate: of the run with a trusted server that stands beside it.
        rounds: T.
        survivors: as ``privacy.secagg.min-survivors``, 0 for its default.
        colluding: as ``privacy.secagg.colluding``.

    Raises:
        ValueError: no noise keeps the target, or these clients cannot form a federation.
    """
    everyone = Poisson(1.0, clients)
    shares = shares_of(clients, survivors, colluding)
    _, z = filter_commitment(epsilon, delta, everyone, rounds, adjacency="zero_out", noise_shares=shares)
    bits = shares.grid_bits([z])
    whole = z * math.sqrt(clients / shares.honest)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("Noise, in clip bounds C")
    for column in ("on the sum", "on the mean", "of one client's share"):
        table.add_column(column, justify="right")
    share = f"{z / math.sqrt(shares.honest):.4f}"
    table.add_row(f"secagg, {shares.survivors} clients left: what is guaranteed", f"{z:.4f}", _mean(z, clients), share)
    table.add_row(f"secagg, all {clients:,} left", f"{whole:.4f}", _mean(whole, clients), share)
    for sampling in dict.fromkeys((everyone, Poisson(rate, clients))):
        central = calibrate(epsilon, delta, sampling, rounds)
        cohort = "everybody in every round" if sampling.rate == 1.0 else f"a share of {rate:g} in every round"
        name = f"trusted server, {cohort}"
        table.add_row(name, f"{central:.4f}", _mean(central, sampling.expected_units), "", style="dim")
    headline = (
        f"Epsilon {number_text(epsilon)} at delta {delta_text(delta)} against everybody, the server included: "
        f"{clients:,} clients, {rounds:,} rounds"
    )
    note = (
        f"At most {colluding} clients may tell the server what they know; {shares.survivors} must hand in a vector, "
        f"{shares.threshold} open a sum. Sums modulo 2^{shares.modulus_bits} of integers on a grid of 2^{bits} points "
        "a clip bound. Accounted in Rényi terms and without amplification by sampling, for one client's contribution "
        "replaced by zero; a trusted server is accounted by PLD, for one client added or removed."
    )
    return Group(
        Text(headline, style="bold"), Padding(table, (1, 0, 1, 2)), Padding(Text(note, style="dim"), (0, 0, 0, 2))
    )


def shares_of(clients: int, survivors: int, colluding: int) -> NoiseShares:
    """What a run with these settings would agree on."""
    config = parse(
        {
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
    )
    assert config.noise_shares is not None
    return config.noise_shares


def _mean(noise: float, units: float) -> str:
    return f"{noise / units:.5f}"
