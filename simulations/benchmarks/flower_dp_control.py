"""`python -m simulations.benchmarks.flower_dp_control`: Flower's own DP wrappers under the checks that ours pass.

A negative control: it shows that the checks can fail, and why this project brings its own mechanism. Every cell of the
table is measured on unchanged library code; the results go to results/flower-dp-control.json, and
`python -m simulations.benchmarks.tables` puts them into privacy/README.md. Takes about two minutes on two cores.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from privacy.ledger import Ledger
from server.environment import describe_environment
from simulations.benchmarks import flower_checks as mechanics
from simulations.benchmarks import flower_guarantee_checks as guarantee
from simulations.benchmarks.flower_checks import Pair
from simulations.benchmarks.flower_wrappers import silence
from simulations.benchmarks.release_paths import scratch_ledger
from simulations.benchmarks.tables import RESULTS

CHECKS: tuple[Callable[[Ledger], Pair], ...] = (
    mechanics.nan_update,
    mechanics.infinite_update,
    mechanics.zero_update,
    mechanics.integer_arrays,
    mechanics.example_weights,
    mechanics.unclipped_client,
    mechanics.noise_scale,
    mechanics.adaptive_noise_scale,
    mechanics.adaptive_direction,
    mechanics.replayed_noise,
    mechanics.replayed_cohort,
    guarantee.absent_clients,
    guarantee.failed_client,
    guarantee.metrics,
    guarantee.adaptive_accounting,
    guarantee.epsilon_of_a_run,
    guarantee.fixed_size_accounting,
    guarantee.local_dp,
)


def measure() -> dict[str, Pair]:
    """Every line of the table: what is asked, and what both sides did."""
    with scratch_ledger() as ledger:
        lines = {(check.__doc__ or check.__name__): check(ledger) for check in CHECKS}
        return lines | guarantee.audits(ledger)


def main() -> None:
    """Measure and write the results."""
    silence()
    lines = measure()
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "lines": [{"check": name, **asdict(pair)} for name, pair in lines.items()],
    }
    (RESULTS / "flower-dp-control.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console = Console(width=200)
    for name, pair in lines.items():
        console.print(f"{name}\n   Flower: {pair.flower}\n   ours:   {pair.lacquer}", highlight=False)


if __name__ == "__main__":
    main()
