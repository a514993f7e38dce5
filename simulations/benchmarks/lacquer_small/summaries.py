"""What the small language model learns of summaries, every chat protected: the table of the sweep ``summaries``.

The sweep's file says what was asked beforehand. Differences are seed by seed.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.harness.markdown import NOT_MEASURED, Columns, Row, grouped, mean_text, table
from simulations.benchmarks.papers.dp_lac import COST, difference_text, marked, methods, provenance
from simulations.report.notation import delta_text, number_text

BASE = "base-model"
NAMES = {BASE: "*the base model*", "private": "DP-LoRA (fixed C, Adam)", "no-noise": "*non-private upper bound*"}
ROUGE = {"ROUGE-1": "test_rouge1", "ROUGE-2": "test_rouge2", "ROUGE-L": "test_rougeL"}


def quality(results: Mapping[str, Any]) -> str:
    """A row for each method and epsilon: ROUGE of the first test chats, and perplexity of all."""
    cells = results["cells"]
    groups = grouped(cells, _key)
    if BASE not in groups:
        return NOT_MEASURED
    found = {name: {row["seed"]: row["test_rougeL"] for row in rows} for name, rows in groups.items()}
    ranked = sorted(groups, key=lambda name: -statistics.mean(found[name].values()))
    columns: Columns = {
        "method": lambda row: NAMES[row["cells"][0]["variant"]],
        "ε": lambda row: _epsilon(row["cells"][0]),
        **{name: _points(key) for name, key in ROUGE.items()},
        "ROUGE-L against the base model": lambda row: (
            "" if row["is reference"] else marked(difference_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: "" if row["smallest"] is None else f"{100 * row['smallest']:.1f}",
        "perplexity": lambda row: mean_text([cell["test_perplexity"] for cell in row["cells"]], 2),
        **COST,
    }
    row = max(cells, key=lambda row: row["rounds_done"])
    caption = (
        f"{row['rounds']} steps of {number_text(row['expected_cohort'])} expected chats, {row['dimension']:,} values "
        f"trained, δ = {delta_text(row['delta'])}; ROUGE F1, times 100."
    )
    return f"{caption}\n\n{table(methods(ranked, groups, found, BASE), columns)}{provenance(cells)}"


def _points(key: str) -> Any:
    return lambda row: mean_text([100 * cell[key] for cell in row["cells"]])


def _key(row: Row) -> str:
    return f"{row['variant']} {_epsilon(row)}".strip()


def _epsilon(row: Row) -> str:
    return number_text(row["epsilon"]) if row["variant"] == "private" else ""
