"""Whether SST-2 tells private from not: the table of docs/comparisons.md, from the results of the sweep ``sst2-room``.

The sweep's file says what was asked beforehand. Differences are to the run without noise and clipping, seed by seed.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.harness.markdown import NOT_MEASURED, Columns, Row, mean_text, table
from simulations.benchmarks.papers.dp_lac import (
    ACCURACY,
    COST,
    VALIDATION,
    difference_text,
    marked,
    methods,
    provenance,
)
from simulations.report.notation import delta_text, number_text

REFERENCE = "no-noise"
NAMES = {
    "no-noise": "*non-private upper bound*",
    "public-only": "*public-only baseline*",
    "private": "LoRA in the top two layers, and the head; fixed C",
    "head-only": "the head alone; fixed C",
    "dp-lac": "DP-LAC, histogram",
    "quantile": "quantile (Andrew)",
    "automatic": "automatic (Bu)",
}


def room(results: Mapping[str, Any]) -> str:
    """One row for each method and epsilon, by accuracy."""
    groups: dict[str, list[Row]] = {}
    for row in results["cells"]:
        groups.setdefault(_key(row), []).append(row)
    if not groups:
        return NOT_MEASURED
    found = {name: {row["seed"]: row["test_accuracy"] for row in rows} for name, rows in groups.items()}
    ranked = sorted(groups, key=lambda name: -statistics.mean(found[name].values()))
    columns: Columns = {
        "what is trained": lambda row: NAMES[row["cells"][0]["variant"]],
        "ε": lambda row: _epsilon(row["cells"][0]),
        **ACCURACY,
        "macro-F1": lambda row: mean_text([100 * cell["test_macro_f1"] for cell in row["cells"]], unit=" %"),
        "against no noise": lambda row: (
            ""
            if row["is reference"] or row["difference"] is None
            else marked(difference_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: "" if row["smallest"] is None else f"{100 * row['smallest']:.1f}",
        **VALIDATION,
        **COST,
    }
    row = max(results["cells"], key=lambda row: row["rounds_done"])
    cohort, delta = number_text(row["expected_cohort"]), delta_text(row["delta"])
    caption = (
        f"{row['clients']:,} clients, {cohort} expected in a round, {row['rounds']} rounds, δ = {delta}, "
        f"{row['test_records']:,} test sentences."
    )
    return f"{caption}\n\n{table(methods(ranked, groups, found, REFERENCE), columns)}{provenance(results['cells'])}"


def _key(row: Row) -> str:
    return row["variant"] if row["grid"] == "upper-bound" else f"{row['variant']} {row['epsilon']:.2f}"


def _epsilon(row: Row) -> str:
    if row["kind"] == "public-only":
        return "none is spent"
    return "no guarantee" if row["epsilon_stated"] is None else f"{row['epsilon_stated']:.2f}"
