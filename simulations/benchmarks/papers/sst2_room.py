"""SST-2 with SmolLM2: whether it tells private from not, and DP-LAC from what paid, and how far a head goes.

The tables of the sweeps ``sst2-room`` and ``sst2-goals``, whose files say what was asked beforehand. Differences are
seed by seed.
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

NAMES = {
    "no-noise": "*non-private upper bound*",
    "public-only": "*public-only baseline*",
    "private": "LoRA in the top two layers, and the head; fixed C",
    "head-only": "the head alone; fixed C",
    "dp-lac": "DP-LAC, histogram",
    "quantile": "quantile (Andrew)",
    "automatic": "automatic (Bu)",
    "head": "the head alone, from a warm start; fixed C",
    "warm-start-alone": "*the warm start alone, no client*",
}


def room(results: Mapping[str, Any]) -> str:
    """Does accuracy fall with epsilon, and what are the head and the public records worth alone?"""
    return _compared(results, ("upper-bound", "slope"), "no-noise", "against no noise")


def paid(results: Mapping[str, Any]) -> str:
    """DP-LAC at epsilon 4 against rules that paid two thirds of it for their tuning."""
    return _compared(results, ("unpaid", "paid"), "dp-lac 4.00", "against DP-LAC")


def goals(results: Mapping[str, Any]) -> str:
    """What clients add to a warm start, with the DP-LAC paper's number of clients and rounds."""
    return _compared(results, ("upper-bound", "goal"), "warm-start-alone", "against the warm start")


def _compared(results: Mapping[str, Any], grids: tuple[str, ...], reference: str, compared: str) -> str:
    """One row for each method and epsilon, by accuracy."""
    cells = [row for row in results["cells"] if row["grid"] in grids]
    groups: dict[str, list[Row]] = {}
    for row in cells:
        groups.setdefault(_key(row), []).append(row)
    if reference not in groups:
        return NOT_MEASURED
    found = {name: {row["seed"]: row["test_accuracy"] for row in rows} for name, rows in groups.items()}
    ranked = sorted(groups, key=lambda name: -statistics.mean(found[name].values()))
    columns: Columns = {
        "method": lambda row: NAMES[row["cells"][0]["variant"]],
        "ε": lambda row: _epsilon(row["cells"][0]),
        **ACCURACY,
        "macro-F1": lambda row: mean_text([100 * cell["test_macro_f1"] for cell in row["cells"]], unit=" %"),
        compared: lambda row: (
            ""
            if row["is reference"] or row["difference"] is None
            else marked(difference_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: "" if row["smallest"] is None else f"{100 * row['smallest']:.1f}",
        **VALIDATION,
        **COST,
    }
    row = max(cells, key=lambda row: row["rounds_done"])
    cohort, delta = number_text(row["expected_cohort"]), delta_text(row["delta"])
    caption = (
        f"{row['clients']:,} clients, {cohort} expected in a round, {row['rounds']} rounds, δ = {delta}, "
        f"{row['test_records']:,} test sentences."
    )
    return f"{caption}\n\n{table(methods(ranked, groups, found, reference), columns)}{provenance(cells)}"


def _key(row: Row) -> str:
    return row["variant"] if row["grid"] == "upper-bound" else f"{row['variant']} {row['epsilon']:.2f}"


def _epsilon(row: Row) -> str:
    if row["kind"] == "public-only":
        return "none is spent"
    return "no guarantee" if row["epsilon_stated"] is None else f"{row['epsilon_stated']:.2f}"
