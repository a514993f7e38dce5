"""The tables of privacy/README.md, made from results/*.json by ``tables.py``."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def mean_text(shares: Sequence[float]) -> str:
    """Mean of percentages, with the sample standard deviation where there are several."""
    mean = f"{100 * statistics.mean(shares):.1f} %"
    return mean if len(shares) < 2 else f"{mean} ± {100 * statistics.stdev(shares):.1f}"


Results = Mapping[str, Any]


def flower_dp_control(results: Results) -> str:
    """Flower's wrappers beside ours: one line per check, ✓ or ✗ and what was measured."""
    lines = [(line["check"], _cell(line["flower"]), _cell(line["lacquer"])) for line in results["lines"]]
    flower = results["environment"]["packages"]["flwr"]
    return markdown(("check", f"Flower {flower}", "Lacquer"), lines) + provenance(results)


def _cell(measured: Mapping[str, Any]) -> str:
    return f"{'✓' if measured['holds'] else '✗'} {measured['text']}"


def mechanism_audit(results: Results) -> str:
    """Two-world audits of the release path and of broken copies of it."""
    lines = [
        (
            line["path"],
            f"{line['claimed_mu']:.3g}",
            f"{line['mu_estimate']:.3g}",
            f"{line['mu_lower']:.2f}",
            f"{line['epsilon_claimed']:.2f}",
            f"{line['epsilon_lower_gdp']:.2f} ({line['epsilon_lower_clopper_pearson']:.2f})",
            "PASS" if line["passed"] else "FAIL",
        )
        for line in results["lines"]
    ]
    header = ("path", "claimed μ", "estimate", "μ ≥", "claimed ε", "ε ≥ Gaussian (any mechanism)", "verdict")
    return markdown(header, lines) + provenance(results)


def audit_power(results: Results) -> str:
    """Median lower bounds by true epsilon and by what the audit may cost."""
    runs, canaries = (list(results["lines"][0][kind]) for kind in ("two_world", "one_run"))
    lines = []
    for line in results["lines"]:
        two_world = [f"{(cell := line['two_world'][n])['gdp']:.2f} ({cell['clopper_pearson']:.2f})" for n in runs]
        one_run = [f"{(cell := line['one_run'][m])['any_mechanism']:.2f} ({cell['gdp']:.2f})" for m in canaries]
        lines.append((f"{line['epsilon']:g}", *two_world, *one_run))
    header = ("true ε", *(f"two-world, R = {n}" for n in runs), *(f"one run, m = {m}" for m in canaries))
    return markdown(header, lines) + provenance(results)


def noise_throughput(results: Results) -> str:
    """What one release costs by kind of noise, on one core."""
    lines = [
        (
            line["noise"],
            f"{line['dim']:,}",
            f"{1000 * line['seconds']:.1f} ms",
            f"{line['normals_per_second'] / 1e6:.1f} million",
        )
        for line in results["noise"]
    ]
    return markdown(("noise", "coordinates", "one release", "draws per second"), lines) + provenance(results)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in lines)


def provenance(results: Results) -> str:
    """Versions, machine and commit, as one sentence under a table."""
    environment = results["environment"]
    named = ("flwr", "torch", "dp-accounting", "numpy")
    packages = ", ".join(f"{name} {environment['packages'][name]}" for name in named)
    machine = f"{environment['system']}, {environment['cores']} cores, Python {environment['python']}"
    return f"\nMeasured on {machine}, {packages}; commit `{environment['commit']}`.\n"
