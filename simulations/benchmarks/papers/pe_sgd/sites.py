"""PE-SGD over sites that send coefficients: the tables of docs/results/pe-sgd.md from the sweep ``pesgd-sites``.

Differences are of mean losses of a token, told as changes of perplexity, seed by seed against DP-SGD.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from server.config.load import load
from simulations.benchmarks.harness.markdown import NOT_MEASURED, Columns, Row, grouped, markdown, mean_text, table
from simulations.benchmarks.papers.diabetes import change_text, log_perplexities, smallest_text
from simulations.benchmarks.papers.dp_lac import COST, is_choosing, marked, methods, provenance
from simulations.presets.load import find
from simulations.report.notation import number_text

NAMES = {"pe-sgd": "PE-SGD", "fixsample": "FixSample", "dp-sgd": "DP-SGD"}
SHORTER = "sites-evolving-shorter"
RATE = "strategy.optimizer-options.learning-rate"


def comparison(results: Mapping[str, Any]) -> str:
    """Each method at its own rate, and PE-SGD at a shorter one."""
    rows = [{**row, "variant": _name(row)} for row in results["cells"] if not is_choosing(row)]
    if not rows:
        return NOT_MEASURED
    found, groups = log_perplexities(rows), grouped(rows, lambda row: row["variant"])
    ranked = sorted(found, key=lambda name: statistics.mean(found[name].values()))
    columns: Columns = {
        "method": lambda row: str(row["name"]),
        "numbers a site sends a round": lambda row: f"{_sent(row['cells'][0]):,}",
        "perplexity": lambda row: mean_text([cell["test_perplexity"] for cell in row["cells"]]),
        "against DP-SGD": lambda row: (
            "" if row["difference"] is None else marked(change_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: smallest_text(row["smallest"]),
        **COST,
    }
    first = rows[0]
    start = statistics.mean(row["start_validation_perplexity"] for row in rows)
    caption = (
        f"{first['clients']} sites, {first['rounds']} rounds, ε = {number_text(first['epsilon'])} at each; the "
        f"base model's validation perplexity is {start:.1f}."
    )
    return f"{caption}\n\n{table(methods(ranked, groups, found, NAMES['dp-sgd']), columns)}{provenance(rows)}"


def choices(results: Mapping[str, Any]) -> str:
    """Public validation perplexity by rate, on another seed."""
    rows = [row for row in results["cells"] if is_choosing(row)]
    if not rows:
        return NOT_MEASURED
    rates = sorted({row["axes"][RATE] for row in rows})
    lines = []
    for name, group in grouped(sorted(rows, key=lambda row: NAMES[row["variant"]]), lambda row: row["variant"]).items():
        by_rate = {row["axes"][RATE]: row["validation_perplexity"] for row in group}
        cells = [by_rate.get(rate) for rate in rates]
        best = min(by_rate.values())
        lines.append((NAMES[name], *("" if cell is None else marked(f"{cell:.1f}", cell == best) for cell in cells)))
    header = ("validation perplexity", *(f"rate {number_text(rate)}" for rate in rates))
    return f"{markdown(header, lines, 'lr')}{provenance(rows)}"


def _name(row: Row) -> str:
    return f"{NAMES[row['variant']]}, shorter" if row["grid"] == SHORTER else NAMES[row["variant"]]


def _sent(row: Row) -> int:
    return int(row["dimension"]) if row["variant"] == NAMES["dp-sgd"] else load(find("sites-pubmed")).site.span.samples
