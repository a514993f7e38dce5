"""What buffers (BLT) leave of the noise in a fraction of the memory that bands (BandMF) take, at the same epsilon.

Run: `python -m simulations.benchmarks privacy.buffered_noise`. Pure accounting and matrices, no data; a minute.

As in `correlated_noise`: noise calibrated for the same expected cohort, its root mean square, over rounds and
coordinates, in the server's parameters, against that of independent noise.
"""

from typing import Any

import typer

from privacy.accountants import buffered, factorisation
from simulations.benchmarks.harness import markdown
from simulations.benchmarks.harness.markdown import Columns, Row
from simulations.benchmarks.harness.results import say, write

CLIENTS, DELTA = 10_000, 1e-5
EPSILONS = (1.0, 4.0, 8.0)
RATES = (0.01, 0.05)
ROUNDS = (200, 1000)


def measured(epsilon: float, rate: float, rounds: int) -> dict[str, Any]:
    """One way to run: the best number of bands, the number of buffers that is taken."""
    run = (epsilon, DELTA, CLIENTS, rate, rounds)
    bands, buffers = factorisation.choose(*run), buffered.choose(*run)[0]
    independent = next(one.error for one in bands if one.correlation.bands == 1)
    line = {
        "epsilon": epsilon,
        "rate": rate,
        "rounds": rounds,
        "groups": buffers.sampling.groups,
        "bands": bands[0].correlation.bands,
        "of_bands": bands[0].error / independent,
        "buffers": buffers.correlation.buffers,
        "of_buffers": buffers.error / independent,
    }
    say(line)
    return line


def main() -> None:
    """Price every way to run and write the results."""
    lines = [measured(epsilon, rate, rounds) for rounds in ROUNDS for rate in RATES for epsilon in EPSILONS]
    write("buffered-noise", {"clients": CLIENTS, "delta": DELTA, "lines": lines})


def table(results: Row) -> str:
    """A row for every way to run: noise against independent noise, and vectors kept."""
    columns: Columns = {
        "rounds T": "{rounds:,}",
        "rate q": "{rate:g}",
        "ε": "{epsilon:g}",
        "bands: noise": lambda row: "independent" if row["bands"] == 1 else f"{row['of_bands']:.2f}",
        "vectors kept by bands": lambda row: str(row["bands"] - 1),
        "buffers: noise": "{of_buffers:.2f}",
        "vectors kept by buffers": "{buffers}",
        "groups": "{groups}",
    }
    return markdown.table(results["lines"], columns) + markdown.provenance(results)


if __name__ == "__main__":
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
