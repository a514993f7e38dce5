"""What the comparisons cost together: the processor time of every cell whose result is committed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulations.benchmarks.harness.markdown import markdown

KINDS = {
    "DP-LAC and the other clipping rules": ("controllers", "dp-lac-diabetes", "targets", "lora", "balance", "methods"),
    "SST-2 with SmolLM2": ("sst2-room", "sst2-goals"),
    "RLDP and DP-Adam-AC, records": ("records-diabetes", "records-diabetes-why", "rldp"),
    "ATDP": ("atdp", "atdp-frontier", "atdp-tiers"),
    "PE-SGD": (
        "pesgd", "pesgd-tuning", "pesgd-rates", "pesgd-step", "pesgd-sites", "pesgd-smollm2", "pesgd-smollm2-tuning",
    ),
    "summaries": ("summaries",),
    "correlated noise, the planner": ("correlated-training", "planner-sweep"),
}  # fmt: skip


def costs(results: Path) -> str:
    """A line for each group of result files in the folder ``results``, and their sum."""
    lines, total, cells = [], 0.0, 0
    for kind, names in KINDS.items():
        seconds = [
            value
            for name in names
            if (file := results / f"{name}.json").is_file()
            for value in _seconds(json.loads(file.read_text(encoding="utf-8")))
        ]
        total, cells = total + sum(seconds), cells + len(seconds)
        lines.append((kind, f"{len(seconds)}", f"{sum(seconds) / 3600:.1f}"))
    lines.append(("**together**", f"**{cells}**", f"**{total / 3600:.1f}**"))
    return markdown(("comparison", "cells", "CPU hours"), lines, "lrr")


def _seconds(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for item in value:
            yield from _seconds(item)
    elif isinstance(value, dict):
        if isinstance(found := value.get("cpu_seconds"), int | float):
            yield float(found)
        else:
            yield from _seconds(list(value.values()))
