"""What choosing among private runs costs in noise: a random number of tries, all tries released, and equal shares.

Run: `python -m simulations.benchmarks privacy.price_of_tuning`. Pure accounting, no data; a minute.

The same run (1,000 clients, rate 0.05, 20 rounds) as one of several candidates, at one epsilon for tuning and training
together (docs/tuning.md): the noise multiplier of each candidate.
"""

from typing import Any

import typer
from scipy.optimize import brentq

from privacy.accountants import composition, selection
from privacy.accountants.calibration import calibrate
from privacy.commitment import POISSON, Tries
from privacy.events import Poisson
from privacy.randomness.tries import chance_of_at_most
from simulations.benchmarks.harness.markdown import Columns, Row, provenance, table
from simulations.benchmarks.harness.results import write

EPSILON, DELTA, ROUNDS = 4.0, 1e-5, 20
SAMPLING = Poisson(0.05, 1000, "client")
TRIES = (2, 4, 10, 30)
LAWS = {"Poisson": POISSON, "geometric": 1.0, "logarithmic": 0.0}


def of_a_candidate(tries: Tries) -> float:
    """The least noise multiplier with which releasing the best of so many tries keeps the target."""
    return float(
        brentq(lambda z: selection.epsilon(tries, [[(SAMPLING, z, ROUNDS)]], DELTA)[0] - EPSILON, 0.3, 20.0, xtol=1e-4)
    )


def main() -> None:
    """Price every number of tries and write the results."""
    lines: list[dict[str, Any]] = []
    for count in TRIES:
        line: dict[str, Any] = {"tries": count}
        for name, shape in LAWS.items():
            tries = Tries(float(count), shape)
            line[name] = {"noise": of_a_candidate(tries), "at_most_one": chance_of_at_most(1, tries)}
        line["composed"] = calibrate(EPSILON, DELTA, SAMPLING, ROUNDS * count)
        line["share"] = calibrate(EPSILON / count, DELTA, SAMPLING, ROUNDS)
        lines.append(line)
    single = calibrate(EPSILON, DELTA, SAMPLING, ROUNDS)
    by_renyi = composition.epsilon([(SAMPLING, single, ROUNDS)], DELTA, accountant="rdp")
    write("price-of-tuning", {"single": single, "single_by_renyi": by_renyi, "lines": lines})


def prices(results: Row) -> str:
    """A row for every number of tries expected."""
    columns: Columns = {
        "tries expected": "{tries}",
        **{name: f"{{{name}[noise]:.2f}} ({{{name}[at_most_one]:.0%}})" for name in LAWS},
        "all tries released, composed by PLD": "{composed:.2f}",
        "ε / tries": "{share:.2f}",
    }
    single = (
        f"\nNoise multipliers for ε = {EPSILON:g} at δ = {DELTA:g} in total; in brackets the chance of at most one "
        f"try. One run alone takes {results['single']:.3f}, which is ε = {EPSILON:.2f} by PLD and "
        f"{results['single_by_renyi']:.2f} by RDP.\n"
    )
    return table(results["lines"], columns, "r") + single + provenance(results)


if __name__ == "__main__":
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
