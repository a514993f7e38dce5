"""`lacquer plan --correlated`: what noise that is correlated over rounds buys against independent noise.

Every number of bands or buffers takes a calibration, about a second.
"""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from privacy.accountants import buffered, composition
from privacy.accountants.factorisation import Strategy, choose
from privacy.commitment import FloorStep, check_delta
from privacy.events import Banded
from simulations.report.notation import delta_text, epsilon_text, number_text, plain_table

_LEGEND = (
    "Noise in the server's parameters after a round, root mean square over the rounds and per coordinate, in units of "
    "the clip bound C: sums of releases, for FedAvg without momentum. With b bands clients lie in b groups that take "
    "turns; a client is sampled at b times the rate in every b-th round, and the expected cohort stays. BLT d is "
    "a buffered Toeplitz strategy: as many groups as that allows, nothing amplified by sampling, and d vectors in the "
    "server's memory where b bands need b - 1."
)


def plain_prices(epsilon: float, delta: float, clients: int, rate: float, rounds: int) -> dict[str, Any]:
    """Price every number of bands, and of buffers, that was tried, the best first, for programs.

    Raises:
        ValueError: no noise keeps the target.
    """
    check_delta(delta, clients)
    tried = choose(epsilon, delta, clients, rate, rounds)
    independent = next(one for one in tried if one.correlation.bands == 1)

    def line(one: Strategy[Any]) -> dict[str, Any]:
        step = FloorStep("round", one.sampling, one.noise_multiplier, rounds, one.correlation)
        kept = (
            {"bands": one.correlation.bands}
            if isinstance(one.correlation, Banded)
            else {"buffers": one.correlation.buffers, "groups": one.sampling.groups}
        )
        return {
            **kept,
            "rate_in_group": one.sampling.rate,
            "most_participations": math.ceil(rounds / one.sampling.groups),
            "noise_multiplier": one.noise_multiplier,
            "epsilon": composition.tightest_bound([step], delta)[0],
            "error": one.error,
            "against_independent": one.error / independent.error,
        }

    return {
        "delta": delta,
        "adjacency": "add_remove",
        "tried": [line(one) for one in tried],
        "buffered": [line(one) for one in _buffered(epsilon, delta, clients, rate, rounds)],
    }


def _buffered(epsilon: float, delta: float, clients: int, rate: float, rounds: int) -> Sequence[Strategy[Any]]:
    """Price the numbers of buffers.

    None are priced at an epsilon so large that one Gaussian of it protects no one, where bands may still be fine.
    """
    try:
        return buffered.choose(epsilon, delta, clients, rate, rounds)
    except ValueError:
        return ()


def page(epsilon: float, delta: float, clients: int, rate: float, rounds: int) -> RenderableType:
    """Draw the prices for people, in order of the bands, then of the buffers; errors as for :func:`plain_prices`."""
    found = plain_prices(epsilon, delta, clients, rate, rounds)
    tried = sorted(found["tried"], key=lambda one: int(one["bands"]))
    tried += sorted(found["buffered"], key=lambda one: int(one["buffers"]))
    best = min((*found["tried"][:1], *found["buffered"][:1]), key=lambda one: float(one["error"]))
    table = plain_table()
    for name in (
        "Strategy",
        "rate in a group",
        "rounds of a client",
        "z",
        "epsilon",
        "noise / C",
        "against independent",
    ):
        table.add_column(name, justify="right")
    for one in tried:
        table.add_row(
            _name(one),
            f"{one['rate_in_group']:.3g}",
            f"{one['most_participations']:,}",
            f"{one['noise_multiplier']:.4f}",
            epsilon_text(one["epsilon"], 4),
            number_text(one["error"]),
            f"{one['against_independent']:.2f} x",
            style="bold" if one is best else "",
        )
    verdict = (
        "Independent noise is best here: amplification by sampling is worth more than correlation."
        if best.get("bands") == 1
        else f"{_name(best)}: {best['against_independent']:.0%} of the noise of independent noise "
        f"(privacy.noise-correlation = {_settings(best)}, strategy.controller = 'fixed')."
    )
    headline = (
        f"Epsilon {number_text(epsilon)} at delta {delta_text(delta)}, add_remove: {clients:,} clients, "
        f"sampling rate {rate:g}, {rounds:,} rounds"
    )
    if not found["buffered"]:
        verdict += " BLT is left out: no noise multiplier of 0.3 or more costs a run as much as this epsilon."
    return Group(
        Text(headline, style="bold"),
        Padding(table, (1, 0, 1, 2)),
        Text(verdict),
        Padding(Text(_LEGEND, style="dim"), (1, 0, 0, 2)),
    )


def _name(one: dict[str, Any]) -> str:
    if "buffers" in one:
        return f"BLT {one['buffers']}"
    return "none" if one["bands"] == 1 else f"{one['bands']} bands"


def _settings(one: dict[str, Any]) -> str:
    if "buffers" in one:
        return f"'blt', privacy.buffers = {one['buffers']}"
    return f"'banded', privacy.bands = {one['bands']}"
