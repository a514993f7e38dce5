"""When noise that is correlated over rounds (BandMF) beats independent noise at the same epsilon, and by how much.

Run: `python -m simulations.benchmarks privacy.correlated_noise`. Pure accounting and matrices, no data; ten minutes.

For every target, sampling rate and number of rounds: both kinds of noise calibrated for the same expected cohort, and
the root mean square, over rounds and coordinates, of the noise in the server's parameters (sums of releases).
"""

from functools import partial
from typing import Any

import typer

from privacy.accountants.factorisation import choose
from simulations.benchmarks.harness.markdown import Columns, Row, provenance, table
from simulations.benchmarks.harness.results import say, write

CLIENTS, DELTA = 10_000, 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
RATES = (0.01, 0.05, 0.1, 0.25)
ROUNDS = (50, 200, 1000)


def measured(epsilon: float, rate: float, rounds: int) -> dict[str, Any]:
    """One way to run: every number of bands that was tried, the best first."""
    tried = choose(epsilon, DELTA, CLIENTS, rate, rounds)
    independent = next(one for one in tried if one.correlation.bands == 1)
    line = {
        "epsilon": epsilon,
        "rate": rate,
        "rounds": rounds,
        "bands": tried[0].correlation.bands,
        "against_independent": tried[0].error / independent.error,
        "tried": [
            {
                "bands": one.correlation.bands,
                "noise_multiplier": one.noise_multiplier,
                "error": one.error,
                "against_independent": one.error / independent.error,
            }
            for one in sorted(tried, key=lambda one: one.correlation.bands)
        ],
    }
    say({key: line[key] for key in ("epsilon", "rate", "rounds", "bands", "against_independent")})
    return line


def main() -> None:
    """Price every way to run and write the results."""
    lines = [measured(epsilon, rate, rounds) for rounds in ROUNDS for rate in RATES for epsilon in EPSILONS]
    write("correlated-noise", {"clients": CLIENTS, "delta": DELTA, "lines": lines})


def errors(results: Row) -> str:
    """A row for every number of rounds and rate, a column for every epsilon: the ratio of errors and the bands."""
    lines: dict[tuple[int, float], dict[float, Row]] = {}
    for line in results["lines"]:
        lines.setdefault((line["rounds"], line["rate"]), {})[line["epsilon"]] = line
    rows = [{"rounds": rounds, "rate": rate, "of": of} for (rounds, rate), of in lines.items()]
    columns: Columns = {
        "rounds T": "{rounds:,}",
        "rate q": "{rate:g}",
        **{f"ε = {epsilon:g}": partial(_cell, epsilon) for epsilon in EPSILONS},
    }
    return table(rows, columns) + provenance(results)


def _cell(epsilon: float, row: Row) -> str:
    line = row["of"][epsilon]
    return "independent" if line["bands"] == 1 else f"{line['against_independent']:.2f} ({line['bands']} bands)"


if __name__ == "__main__":
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
