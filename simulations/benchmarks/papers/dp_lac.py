"""Tables of docs/results/{dp-lac,comparisons}.md, from the sweeps ``controllers``, ``lora`` and ``targets``.

Comparisons, method by method, and the settings that were chosen.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from simulations.benchmarks.harness.markdown import (
    NOT_MEASURED,
    Columns,
    Row,
    grouped,
    mean_text,
    provenance_of_rows,
    table,
)
from simulations.history.paired import Estimate, number_tested, paired_difference, told_apart
from simulations.report.notation import delta_text, duration_text, epsilon_text, number_text

Found = Mapping[str, Mapping[int, float]]

REFERENCE = "dp-lac"
LORA_REFERENCE = "ffa"
BESIDE = ("floor", "ceiling", "head-only")
NAMES = {
    "dp-lac": "DP-LAC, no histogram",
    "dp-lac-smooth": "DP-LAC `smooth`, no histogram",
    "dp-lac-histogram": "DP-LAC, histogram",
    "dp-clac": "DP-CLAC",
    "dp-clac-centred": "DP-CLAC `centred`",
    "fixed": "fixed (Abadi)",
    "quantile": "quantile (Andrew)",
    "dynamic": "dynamic (Du)",
    "automatic": "automatic (Bu)",
    "psac": "PSAC (Xia)",
    "percentile": "percentile (DP-Adam-AC, sound form)",
    "dc-sgd-p": "DC-SGD-P",
    "dc-sgd-e": "DC-SGD-E",
    "rl": "RL (RLDP, sound form)",
    "fixed-decay": "fixed, decaying server step",
    "ffa": "FFA-LoRA",
    "ffa-rank": "FFA-LoRA, top layer",
    "ffa-layers": "FFA-LoRA, rank 4",
    "plain": "both factors, averaged apart",
    "rolora": "RoLoRA",
    "fedsvd": "FedSVD",
    "dp-dylora": "DP-DyLoRA",
    "zero-pad": "ranks 1, 2, 4, zero-padded",
    "all": "preset `sst2-aligned`",
    "all-dp-lac": "DP-LAC in place of a fixed C",
    "all-lengths": "phrases of all lengths, C = 0.12",
    "without-alignment": "A random",
    "without-momentum": "no momentum, the same step",
    "without-output-dense": "no adapters on `output.dense`",
    "batch-16": "16 records a client and round",
    "warm-start-alone": "*the warm start alone, no client*",
    "geoclip": "GeoClip",
    "rl-learn": "RL, learning on",
    "rl-filter": "RL, moving the noise too (filter mode)",
    "rl-filter-learn": "RL, moving the noise, learning on with the paper's reward",
    "fixed-filter": "fixed (Abadi), filter mode",
    "adam-ac-own": "*DP-Adam-AC, its own rule: not private*",
    "fedex": "FedEx",
    "flora": "FLoRA",
    "fedgsa": "FedGSA",
    "floor": "*public-only baseline*",
    "ceiling": "*non-private upper bound*",
    "head-only": "*head only, no LoRA*",
}
MINUS = "\N{MINUS SIGN}"


def shown_name(variant: str) -> str:
    """A variant as readers know it; ``-tuned``, ``-warm`` and the axes' values stay in words behind."""
    variant, comma, axes = variant.partition(", ")
    if comma:
        return shown_name(variant) + comma + axes
    for suffix, words in (("-tuned", ", tuned"), ("-warm", ", warm start")):
        if variant.endswith(suffix):
            return shown_name(variant.removesuffix(suffix)) + words
    return NAMES.get(variant, variant)


def label(row: Row) -> str:
    """What tells the methods of a table apart: the variant, and the values of its axes but for epsilon."""
    axes = [f"{key.rpartition('.')[2]} {value}" for key, value in row["axes"].items() if key != "privacy.epsilon"]
    return ", ".join([row["variant"], *axes])


def methods(
    names: Iterable[str], groups: Mapping[str, Sequence[Row]], found: Found, reference: str
) -> list[dict[str, Any]]:
    """A row per method: its cells, what was found by seed, and the difference to the reference on the same seeds.

    Whether it is significant, and the smallest difference that would show, are corrected for the methods of the table.
    """
    ordered = list(names)
    against_it = found.get(reference, {})
    differences = [None if name == reference else paired_difference(found[name], against_it) for name in ordered]
    count = number_tested(differences)
    return [
        {
            "name": name,
            "cells": groups[name],
            "found": list(found[name].values()),
            "is reference": name == reference,
            "difference": difference,
            "significant": told,
            "smallest": None if difference is None or told else difference.smallest(count),
        }
        for name, difference, told in zip(ordered, differences, told_apart(differences), strict=True)
    ]


ACCURACY: Columns = {"test accuracy": lambda row: mean_text([100 * value for value in row["found"]], unit=" %")}
VALIDATION: Columns = {
    "validation": lambda row: mean_text([100 * cell["validation_accuracy"] for cell in row["cells"]], unit=" %")
}
BOUNDS: Columns = {
    "first C": lambda row: bound_range([cell["first_clip_bound"] for cell in row["cells"]]),
    "last C": lambda row: bound_range([cell["last_clip_bound"] for cell in row["cells"]]),
}
COST: Columns = {"CPU s a cell": lambda row: cpu_text(row["cells"]), "seeds": lambda row: str(len(row["cells"]))}


def against(reference: str) -> Columns:
    """The column of differences, significant ones in bold, and of the differences that would show elsewhere."""
    return {
        f"difference to {shown_name(reference)}": lambda row: (
            "" if row["is reference"] else marked(difference_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: "" if row["smallest"] is None else f"{100 * row['smallest']:.1f}",
    }


def marked(text: str, significant: bool) -> str:
    """In bold where the difference is significant."""
    return f"**{text}**" if significant else text


def lora(results: Mapping[str, Any]) -> str:
    """Aggregations and dimensions in one table, against FFA-LoRA of rank 4 on the top layer."""
    cells = results["cells"]
    found, groups = accuracies(cells), grouped(cells, label)
    columns: Columns = {
        "what is trained": lambda row: shown_name(row["name"]),
        **ACCURACY,
        **against(LORA_REFERENCE),
        **VALIDATION,
        "values trained": lambda row: number_text(row["cells"][0]["dimension"]),
        **COST,
    }
    ranked = sorted(groups, key=lambda name: -statistics.mean(found[name].values()))
    return table(methods(ranked, groups, found, LORA_REFERENCE), columns) + provenance(cells)


def comparisons(results: Mapping[str, Any]) -> str:
    """Every grid of the sweep but the choosing ones: one table for each grid and privacy level."""
    parts = []
    for (grid, epsilon), rows in sorted(tables_of(results["cells"]).items()):
        private = [row for row in rows if row["epsilon_stated"] is not None]
        stated = max((row["epsilon_stated"] for row in private), default=epsilon)
        delta = rows[0]["delta"]
        caption = f"**{grid}**, ε ≤ {epsilon_text(stated)} at δ = {delta_text(delta)}: {_scale(rows)}."
        parts.append(f"{caption}\n\n{_comparison(rows)}{provenance(rows)}")
    return "\n".join(parts) if parts else NOT_MEASURED


def _comparison(rows: Sequence[Row]) -> str:
    """Methods by accuracy; what is no method, last."""
    found, groups = accuracies(rows), grouped(rows, label)
    reference = _reference(found)
    beside = [variant for variant in groups if variant.removesuffix("-warm") in BESIDE]
    ranked = sorted(groups.keys() - set(beside), key=lambda name: (-statistics.mean(found[name].values()), name))
    ranked += sorted(beside, key=lambda name: BESIDE.index(name.removesuffix("-warm")))
    columns: Columns = {
        "method": lambda row: shown_name(row["name"]),
        **ACCURACY,
        **against(reference),
        **VALIDATION,
        **BOUNDS,
        **COST,
    }
    return table(methods(ranked, groups, found, reference), columns)


def choices(results: Mapping[str, Any]) -> str:
    """The grids on which settings were chosen: public validation accuracy only."""
    rows = [row for row in results["cells"] if is_choosing(row)]
    if not rows:
        return NOT_MEASURED
    shown, best = [], []
    for _, group in sorted(grouped(rows, lambda row: (row["grid"], row["variant"])).items()):
        best.append(max(group, key=lambda row: row["validation_accuracy"]))
        shown += sorted(group, key=lambda row: list(row["axes"].values()))

    def accuracy(row: Row) -> str:
        mark = "**" if any(row is other for other in best) else ""
        return f"{mark}{100 * row['validation_accuracy']:.1f} %{mark}"

    columns: Columns = {
        "grid": "{grid}",
        "method": lambda row: shown_name(row["variant"]),
        "setting": setting_text,
        "validation accuracy": accuracy,
        "validation loss": "{validation_loss:.3f}",
        "last C": lambda row: bound_range([row["last_clip_bound"]]),
    }
    return table(shown, columns) + provenance(rows)


def setting_text(row: Row, value_text: Callable[[Any], str] = str) -> str:
    """The values of a cell's axes."""
    return ", ".join(f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in row["axes"].items())


def is_choosing(row: Row) -> bool:
    """Whether a cell served to choose settings: its grid's name says so, and no test number of it is shown."""
    return "tuning" in row["grid"] or "fixed-grid" in row["grid"]


def accuracies(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Test accuracy by method (see :func:`label`) and seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(label(row), {})[row["seed"]] = row["test_accuracy"]
    return found


def tables_of(cells: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """The reporting cells by grid and epsilon."""
    return grouped([row for row in cells if not is_choosing(row)], lambda row: (row["grid"], row["epsilon"]))


def _reference(found: Mapping[str, Any]) -> str:
    """DP-LAC in the form the paper has it in the regime: with its histogram, except where all start at the same C0."""
    for name in (REFERENCE, f"{REFERENCE}-histogram", "all", "ffa", "fixed"):
        if name in found:
            return name
    return next(iter(found))


def difference_text(difference: Estimate | None) -> str:
    """Percentage points with their 95 % interval; the interval is in words missing with one seed."""
    if difference is None:
        return "no shared seed"
    mean = _signed(100 * difference.mean)
    if difference.half is None:
        return f"{mean} (one seed)"
    low, high = (100 * (difference.mean + sign * difference.half) for sign in (-1, 1))
    return f"{mean} [{_signed(low)}, {_signed(high)}]"


def _signed(value: float) -> str:
    text = f"{abs(value):.1f}"
    return f"{MINUS if value < 0 and text != '0.0' else '+'}{text}"


def _bound(value: float | None) -> str:
    return "" if value is None else number_text(float(f"{value:.2g}"))


def bound_range(values: Sequence[float | None]) -> str:
    """Smallest and largest threshold, to two digits."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = _bound(min(known)), _bound(max(known))
    return low if low == high else f"{low} to {high}"


def cpu_text(rows: Sequence[Row]) -> str:
    """CPU seconds of a cell, in the mean."""
    known = [row["cpu_seconds"] for row in rows if row["cpu_seconds"] is not None]
    return f"{statistics.mean(known):.0f}" if known else ""


def _scale(rows: Sequence[Row]) -> str:
    row = max(rows, key=lambda row: row["rounds_done"])
    cohort = number_text(row["expected_cohort"])
    return (
        f"{row['clients']:,} clients, {cohort} expected in a round, {row['rounds']} rounds, "
        f"{row['dimension']:,} values trained, {row['test_records']:,} test records"
    )


def provenance(rows: Sequence[Row]) -> str:
    """Seeds, time, machines and commits of cells, as one sentence under a table."""
    total = duration_text(sum(row["cpu_seconds"] or 0.0 for row in rows))
    return provenance_of_rows(rows, f"{len(rows)} cell{'s' if len(rows) > 1 else ''}, {total} of one core; ")
