"""`python -m simulations.benchmarks.flower_dp_control`: Flower's own DP wrappers under the checks that ours pass.

A negative control: it shows that the checks can fail, and why this project brings its own mechanism. Every cell of the
table is measured on unchanged library code; the results go to results/flower-dp-control.json, and
`python -m simulations.benchmarks.tables` puts them into privacy/README.md. Takes about two minutes on two cores.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from privacy.ledger import Ledger
from server.environment import describe_environment
from simulations.benchmarks import flower_checks as mechanics
from simulations.benchmarks import flower_guarantee_checks as guarantee
from simulations.benchmarks.flower_checks import Pair
from simulations.benchmarks.flower_wrappers import silence
from simulations.benchmarks.release_paths import scratch_ledger
from simulations.benchmarks.tables import RESULTS

# The line of the table -> its check.
CHECKS: dict[str, Callable[[Ledger], Pair]] = {
    "the move one client causes by a NaN among 1e6s": mechanics.nan_update,
    "... by an infinity": mechanics.infinite_update,
    "... by zeros": mechanics.zero_update,
    "... in integer arrays": mechanics.integer_arrays,
    "... by reporting 1000 examples, the others 10": mechanics.example_weights,
    "... by not clipping, where clients clip": mechanics.unclipped_client,
    "noise std / (zC/20), fixed clipping": mechanics.noise_scale,
    "noise std / (z C_t/20), adaptive clipping, C falling": mechanics.adaptive_noise_scale,
    "adaptive C after 60 rounds from 0.1 and from 10, all norms 1": mechanics.adaptive_direction,
    "noise of two releases, every generator seeded alike": mechanics.replayed_noise,
    "two cohorts, every generator seeded alike": mechanics.replayed_cohort,
    "noise std / move of one client at z = 1, 10 of 20 reply": guarantee.absent_clients,
    "a round in which one client replies with an error": guarantee.failed_client,
    "released mean loss − exact one, one client reports 1e6": guarantee.metrics,
    "accounting of adaptive clipping": guarantee.adaptive_accounting,
    "ε of 200 rounds, 100 of 1000 clients, z = 1.7618": guarantee.epsilon_of_a_run,
    "ε of 200 rounds without replacement, replace-one, z = 2 (sound: 20.7)": guarantee.fixed_size_accounting,
    "ε of one message of LocalDpMod asked for 10": guarantee.local_dp,
}


def measure() -> dict[str, Pair]:
    """Every line of the table: what is asked, and what both sides did."""
    with scratch_ledger() as ledger:
        checks = {name: check(ledger) for name, check in CHECKS.items()}
        return checks | {name: guarantee.audit_of(name, ledger) for name in guarantee.AUDITS}


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
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
