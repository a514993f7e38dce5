"""What the audits find in the release path and in broken copies of it.

Run: `python -m simulations.benchmarks privacy.mechanism_audit`. Half a minute on two cores.

Writes results/mechanism-audit.json and results/audit-power.json, the tables of docs/results/guarantee.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from privacy.audit.bounds import epsilon_lower_clopper_pearson, epsilon_lower_gdp, gdp_mu
from privacy.audit.one_run import audit_one_run, inclusion
from privacy.audit.two_world import TwoWorldAudit
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.randomness.noise import DiscreteGaussianNoise
from privacy.randomness.rng import simulation_generator
from simulations.benchmarks.harness.markdown import Columns, Row, provenance, table
from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.privacy import planted_bugs
from simulations.benchmarks.privacy.planted_bugs import BOUND, DIM, Parts

PATHS: dict[str, Callable[[], TwoWorldAudit]] = {
    "the real path, z = 1/2": Parts().audit,
    "the real path, z = 1": Parts(plan=Plan(FlatClip(BOUND, DIM), 1.0)).audit,
    "the real path, exact noise": Parts(noise=DiscreteGaussianNoise).audit,
    "the real path, all queries in the joint event": lambda: _every_query(),
    "the real path, difference of two rounds": Parts().audit_successive,
    "planted: noise / population instead of / cohort": lambda: planted_bugs.noise_over_population().audit(),
    "planted: weights by number of examples": lambda: planted_bugs.weighted_by_examples().audit(),
    "planted: noise zC/m before averaging": lambda: planted_bugs.noise_before_averaging().audit(),
    "planted: clipping per tensor (8), noise for the whole": lambda: planted_bugs.clipped_per_tensor().audit(),
    "planted: noise used again, difference of two rounds": lambda: planted_bugs.reused_noise().audit_successive(),
    "planted: realised divisor (caught by arithmetic instead)": lambda: planted_bugs.realised_divisor().audit(),
}
EPSILONS, RUNS, CANARIES = (1.0, 2.0, 4.0, 8.0), (100, 300, 1000, 3000), (300, 1000, 5000)
DELTA, ALPHA, REPEATS = 1e-5, 0.05, 25


def _every_query() -> TwoWorldAudit:
    parts, direction = planted_bugs.every_query()
    return parts.audit(direction=direction)


def two_world_medians(epsilon: float, runs: int) -> dict[str, float]:
    """Median lower bounds of a Gaussian mechanism of this epsilon, by Gaussian DP and by Clopper-Pearson."""
    mu, found = gdp_mu(epsilon, DELTA), []
    for repeat in range(REPEATS):
        rng = simulation_generator(0, "two-world power", int(epsilon), runs, repeat)
        scores = rng.standard_normal(runs) + mu, rng.standard_normal(runs)
        found.append(
            [bound(*scores, delta=DELTA, alpha=ALPHA) for bound in (epsilon_lower_gdp, epsilon_lower_clopper_pearson)]
        )
    return dict(zip(("gdp", "clopper_pearson"), _medians(found), strict=True))


def one_run_medians(epsilon: float, canaries: int) -> dict[str, float]:
    """Median lower bounds from one run with as many independent canaries, a tenth guessed in and a tenth out."""
    mu, found = gdp_mu(epsilon, DELTA), []
    for repeat in range(REPEATS):
        coins = inclusion(canaries, repeat)
        noise = simulation_generator(0, "one-run power", int(epsilon), canaries, repeat).standard_normal(canaries)
        tenth = canaries // 10
        result = audit_one_run(noise + mu * coins, coins, guesses_in=tenth, guesses_out=tenth, delta=DELTA, alpha=ALPHA)
        found.append([result.epsilon_lower, result.epsilon_lower_gdp])
    return dict(zip(("any_mechanism", "gdp"), _medians(found), strict=True))


def _medians(found: Sequence[Sequence[float]]) -> list[float]:
    middle: NDArray[np.float64] = np.median(np.asarray(found), axis=0)
    return [float(value) for value in middle]


def power() -> list[dict[str, Any]]:
    """One line per true epsilon."""
    return [
        {
            "epsilon": epsilon,
            "two_world": {str(runs): two_world_medians(epsilon, runs) for runs in RUNS},
            "one_run": {str(canaries): one_run_medians(epsilon, canaries) for canaries in CANARIES},
        }
        for epsilon in EPSILONS
    ]


def main() -> None:
    """Measure and write both results."""
    lines = []
    for name, run in PATHS.items():
        result = run()
        lines.append({"path": name, "passed": result.passed, **asdict(result)})
        say(f"{name}: {'PASS' if result.passed else 'FAIL'} {result}")
    write("mechanism-audit", {"lines": lines})
    write("audit-power", {"lines": power()})


def audits(results: Row) -> str:
    """Two-world audits of the release path and of broken copies of it."""
    columns: Columns = {
        "path": "{path}",
        "claimed μ": "{claimed_mu:.3g}",
        "estimate": "{mu_estimate:.3g}",
        "μ ≥": "{mu_lower:.2f}",
        "claimed ε": "{epsilon_claimed:.2f}",
        "ε ≥ Gaussian (any mechanism)": "{epsilon_lower_gdp:.2f} ({epsilon_lower_clopper_pearson:.2f})",
        "verdict": lambda row: "PASS" if row["passed"] else "FAIL",
    }
    return table(results["lines"], columns) + provenance(results)


def powers(results: Row) -> str:
    """Median lower bounds by true epsilon and by what the audit may cost."""
    rows = results["lines"]

    def medians(kind: str, cost: str, first: str, second: str) -> Columns:
        def cell(n: str) -> Callable[[Row], str]:
            return lambda row: f"{row[kind][n][first]:.2f} ({row[kind][n][second]:.2f})"

        return {cost.format(n): cell(n) for n in rows[0][kind]}

    columns: Columns = {
        "true ε": "{epsilon:g}",
        **medians("two_world", "two-world, R = {}", "gdp", "clopper_pearson"),
        **medians("one_run", "one run, m = {}", "any_mechanism", "gdp"),
    }
    return table(rows, columns) + provenance(results)


if __name__ == "__main__":
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
