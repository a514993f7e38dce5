"""The pages of `lacquer calibrate`: a priced budget and its alternatives, or the noise that clients make together.

Every page takes some seconds of accounting.
"""

import math
import sys
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from privacy.accountants.calibration import calibrate, filter_commitment
from privacy.accountants.scenarios import Option, Refusal, Scenario, alternatives, by_accountant, price
from privacy.events import NoiseShares, Poisson
from server.config.load import parse
from simulations.report.notation import delta_text, epsilon_text, number_text, plain_table

_ACCOUNTANTS = {
    "pld": "upper bound, nearly exact",
    "rdp": "upper bound",
    "prv": "upper bound by Opacus, about 0.01 above pld",
    "gdp-approx": "optimistic, not a bound: never report it",
}
_LEGEND = (
    "Noise is in units of the clip bound C, which no mean of clipped updates exceeds. Over the run the signal adds up "
    "with the rounds and the noise with their square root; that is the last but one column, and the last compares it "
    "with now. More rounds also mean more training."
)


def advice(scenario: Scenario, dimension: int | None, width: int) -> RenderableType:
    """Draw the price of a way to run, by every accountant, and of the ways near it.

    The page fits a terminal of `width` characters.

    Raises:
        ValueError: no noise keeps the target.
    """
    now = price("now", scenario)
    accounts = plain_table()
    accounts.add_column("Accountant")
    accounts.add_column("Epsilon", justify="right")
    accounts.add_column("")
    for name, value in by_accountant(now.setting, now.noise_multiplier).items():
        style = "dim" if name == "gdp-approx" else ""
        if isinstance(value, str):
            accounts.add_row(name, "-", "cannot account this sampling", style="dim")
        else:
            used = "; calibrated with it" if name == "pld" else ""
            # an accountant's 0 means that delta alone covers the run; in print it would read as no cost at all
            accounts.add_row(name, epsilon_text(value or sys.float_info.min, 4), _ACCOUNTANTS[name] + used, style=style)
    others = alternatives(now)
    refusals = [Text(f"{other.name}: {other.reason}", style="dim") for other in others if isinstance(other, Refusal)]
    return Group(
        Text(_headline(now.setting), style="bold"),
        Padding(_facts(now, dimension), (1, 0, 1, 2)),
        Padding(accounts, (0, 0, 1, 2)),
        Text("What a change would buy, at the same epsilon and delta", style="bold"),
        Padding(_choices(now, others, dimension, 2 if width >= 90 else 1), (0, 0, 0, 2)),
        *(Padding(text, (1, 0, 0, 2)) for text in refusals),
        Padding(Text(_LEGEND, style="dim"), (1, 0, 0, 2)),
    )


def plain_price(scenario: Scenario, dimension: int | None) -> dict[str, float | str | None]:
    """Price a way to run, for programs; noise is in units of the clip bound.

    Raises:
        ValueError: no noise keeps the target.
    """
    now = price("now", scenario)
    norm = None if dimension is None else now.noise_on_mean * math.sqrt(dimension)
    return {
        "epsilon": scenario.epsilon,
        "delta": scenario.delta,
        "adjacency": scenario.adjacency,
        "noise_multiplier": now.noise_multiplier,
        "expected_cohort": now.cohort,
        "noise_on_mean": now.noise_on_mean,
        "noise_norm_on_mean": norm,
        "break_even_dimension": now.break_even_dimension,
    }


def _headline(setting: Scenario) -> str:
    return (
        f"Epsilon {number_text(setting.epsilon)} at delta {delta_text(setting.delta)}, {setting.adjacency}: "
        f"{setting.clients:,} clients, Poisson rate {setting.rate:g}, {setting.rounds:,} rounds"
    )


def _facts(now: Option, dimension: int | None) -> Table:
    noise, break_even = now.noise_on_mean, now.break_even_dimension
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts.add_row("Noise multiplier z", Text(f"{now.noise_multiplier:.4f}", style="bold"))
    facts.add_row("Expected cohort m", number_text(now.cohort))
    facts.add_row("Noise on the mean, per coordinate", f"z C / m = {number_text(noise)} C")
    if dimension is not None:
        norm = noise * math.sqrt(dimension)
        facts.add_row(
            f"Noise norm on the mean, d = {dimension:,}",
            f"z C sqrt(d) / m = {number_text(norm)} C, against a signal of at most C",
        )
    facts.add_row("Noise as long as C at", f"d = (m / z)^2 = {number_text(round(break_even))} parameters")
    return facts


def _choices(now: Option, others: Sequence[Option | Refusal], dimension: int | None, gap: int) -> Table:
    table = plain_table(gap)
    table.add_column("\nChange", no_wrap=True)
    per_round = "noise\n/ C" if dimension is None else "noise\nnorm / C"
    for name in ("\nclients", "\ncohort", "\nrounds", "\nz", per_round, "over\nthe run", "against\nnow"):
        table.add_column(name, justify="right", no_wrap=True)
    length = 1.0 if dimension is None else math.sqrt(dimension)
    for option in (now, *others):
        if isinstance(option, Refusal):
            table.add_row(option.name, *"-------", style="dim")
            continue
        setting = option.setting
        size = (f"{setting.clients:,}", number_text(option.cohort), f"{setting.rounds:,}")
        noise, total = option.noise_on_mean * length, option.noise_over_run * length
        against = f"{option.noise_over_run / now.noise_over_run:.2f} x"
        row = (f"{option.noise_multiplier:.4f}", number_text(noise), number_text(total), against)
        table.add_row(option.name, *size, *row, style="bold" if option is now else "")
    return table


def secagg(
    epsilon: float, delta: float, clients: int, rate: float, rounds: int, survivors: int, colluding: int
) -> RenderableType:
    """Draw the noise of the sum, of one client's share, and of a mean, without and with trust in the server.

    Args:
        clients: all of whom take part in every round.
        rate: of the run with a trusted server that stands beside it.
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
    table = plain_table()
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
    """The shares of noise that a run with these settings would agree on."""
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
