"""Markdown tables, and the sentence under them that says where their numbers come from.

A column is its heading and what a row has in it: a format string over the keys of the row, or a function of the row.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

Row = Mapping[str, Any]
Cell = str | Callable[[Row], str]
Columns = Mapping[str, Cell]

NOT_MEASURED = "*Not measured yet.*\n"
RATIO = "{ratio:.2f} ({lowest_ratio:.2f}-{highest_ratio:.2f})"
"""The ratio of two variants in a row of :func:`simulations.benchmarks.harness.timing.ratios`."""


def table(rows: Iterable[Row], columns: Columns, align: str = "l") -> str:
    """A Markdown table with a line per row."""
    filled = list(rows)
    return markdown(tuple(columns), zip(*(written(cell, filled) for cell in columns.values()), strict=True), align)


def written(cell: Cell, rows: Iterable[Row]) -> list[str]:
    """One column, from top to bottom."""
    return [cell.format_map(row) if isinstance(cell, str) else cell(row) for row in rows]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], align: str = "l") -> str:
    """A Markdown table of texts; `align` has "l" or "r" for each column, its last letter holds for the rest."""
    marks = ["---:" if side == "r" else "---" for side in align.ljust(len(header), align[-1])]
    return "".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |\n" for line in [header, marks, *lines])


def at(form: str, *path: str) -> Callable[[Row], str]:
    """A cell further down in the row: what lies at the end of the path, in this format."""
    return lambda row: format(reduce(getitem, path, row), form)


def provenance(results: Row) -> str:
    """Machine, versions and commit, as one sentence under a table."""
    environment = results["environment"]
    versions = environment["packages"]
    named = ("flwr", "torch", "dp-accounting", "numpy")
    packages = ", ".join(f"{name} {versions[name]}" for name in named if name in versions)
    machine = f"{environment['system']}, {environment['cores']} cores, Python {environment['python']}"
    return f"\nMeasured on {machine}, {packages}; commit `{environment['commit']}`.\n"


def provenance_of_rows(rows: Sequence[Row], cost: str = "") -> str:
    """Seeds, cost in words, machines and commits of rows that each have their own, as one sentence."""
    seeds = ", ".join(str(seed) for seed in distinct(rows, "seed"))
    commits = ", ".join(f"`{commit}`" for commit in distinct(rows, "commit"))
    return f"\nSeeds {seeds}; {cost}machine: {'; '.join(distinct(rows, 'machine'))}; commit {commits}.\n"


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a key, sorted, each once."""
    return sorted({row[key] for row in rows})


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a key, in the order in which keys come."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def mean_text(values: Sequence[float], digits: int = 1, unit: str = "") -> str:
    """Mean, with the sample standard deviation where there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}{unit}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
