"""What a model gains by noise that is correlated over rounds, at the same epsilon and expected cohort.

Tables of docs/results/correlated-noise.md from the sweep ``correlated-noise``, whose file says what was asked
beforehand. Differences are of log perplexities, told as changes of perplexity, seed by seed against independent noise.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from scipy.stats import nct, t

from simulations.benchmarks.harness.markdown import NOT_MEASURED, Columns, Row, grouped, mean_text, table
from simulations.benchmarks.papers.diabetes import change_text, log_perplexities, smallest_text
from simulations.benchmarks.papers.dp_lac import COST, is_choosing, marked, methods, provenance, setting_text
from simulations.report.notation import delta_text, number_text

REFERENCE = "independent"

WANTED = 0.03
"""Of the perplexity: the gain that was asked for."""
NAMES = {
    "independent": "independent",
    "banded": "banded, as many bands as leave the least noise",
    "banded-4": "banded, 4 bands",
    "blt": "buffers, as many as leave the least noise",
    "independent-momentum": "independent, server momentum",
    "banded-momentum": "banded, server momentum",
}


def comparison(results: Mapping[str, Any]) -> str:
    """A table for every epsilon."""
    cells = [row for row in results["cells"] if not is_choosing(row)]
    parts = [_table(rows) for _, rows in sorted(grouped(cells, lambda row: (row["grid"], row["epsilon"])).items())]
    return "\n".join(parts) if parts else NOT_MEASURED


def _table(rows: list[Row]) -> str:
    found = log_perplexities(rows)
    groups = grouped(rows, lambda row: row["variant"])
    ranked = sorted(found, key=lambda name: statistics.mean(found[name].values()))
    columns: Columns = {
        "noise": lambda row: NAMES[row["name"]],
        "z": lambda row: f"{row['cells'][0]['noise_multiplier']:.3f}",
        "perplexity": lambda row: mean_text([cell["test_perplexity"] for cell in row["cells"]], 3),
        "against independent": lambda row: (
            ""
            if row["is reference"] or row["difference"] is None
            else marked(change_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: smallest_text(row["smallest"]),
        f"seeds for {100 * WANTED:g} %": lambda row: seeds_text(found[row["name"]], found[REFERENCE]),
        **COST,
    }
    row = rows[0]
    caption = (
        f"**ε = {row['epsilon']:g}**, δ = {delta_text(row['delta'])}: {row['clients']:,} clients, "
        f"{number_text(row['expected_cohort'])} expected in a round, {row['rounds']} rounds, C = "
        f"{number_text(row['last_clip_bound'])}, {row['dimension']:,} values trained, perplexity over "
        f"{row['test_records']:,} test tokens."
    )
    return f"{caption}\n\n{table(methods(ranked, groups, found, REFERENCE), columns)}{provenance(rows)}"


def seeds_text(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    """How many seeds a difference of :data:`WANTED` would take, by the spread of these; empty where there are few."""
    seeds = sorted(one.keys() & other.keys())
    if one is other or len(seeds) < 2:
        return ""
    return f"{seeds_needed(statistics.stdev(one[seed] - other[seed] for seed in seeds), math.log1p(WANTED)):,}"


def seeds_needed(deviation: float, difference: float, power: float = 0.8, level: float = 0.05) -> int:
    """Fewest seeds with which a paired t test, two-sided, finds ``difference`` with this power."""
    seeds = 2
    while True:
        edge, shift = float(t.isf(level / 2, seeds - 1)), difference / deviation * math.sqrt(seeds)
        if float(nct.sf(edge, seeds - 1, shift)) >= power:
            return seeds
        seeds += 1


def choices(results: Mapping[str, Any]) -> str:
    """The cells on which the threshold and the bands were chosen, by public validation records only."""
    rows = sorted(
        (row for row in results["cells"] if is_choosing(row)), key=lambda row: (row["variant"], *row["axes"].items())
    )
    columns: Columns = {
        "noise": "{variant}",
        "setting": lambda row: setting_text(row, number_text),
        "z": "{noise_multiplier:.3f}",
        "validation perplexity": "{validation_perplexity:.3f}",
    }
    return table(rows, columns) + provenance(rows) if rows else NOT_MEASURED
