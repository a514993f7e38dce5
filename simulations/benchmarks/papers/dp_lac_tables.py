"""The tables of docs/comparisons.md, made from results/controllers.json and results/lora.json by ``tables.py``."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from simulations.benchmarks.harness.markdown import markdown
from simulations.benchmarks.harness.timing import Paired, paired_difference
from simulations.report.notation import delta_text, duration_text, epsilon_text, number_text

Row = Mapping[str, Any]
Groups = dict[str, list[Row]]

REFERENCE = "dp-lac"
LORA_REFERENCE = "ffa"
BESIDE = ("floor", "ceiling", "head-only")
NAMES = {
    "dp-lac": "DP-LAC, no histogram",
    "dp-lac-smooth": "DP-LAC `smooth`, no histogram",
    "dp-lac-histogram": "DP-LAC, histogram",
    "dp-lac-histogram-smooth": "DP-LAC `smooth`, histogram",
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
    "ffa": "FFA-LoRA, rank 4, top layer",
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
    "floor": "*floor: public records alone*",
    "ceiling": "*ceiling: no noise, no clipping*",
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


def lora(results: Mapping[str, Any]) -> str:
    """Aggregations and dimensions in one table, against FFA-LoRA of rank 4 on the top layer."""
    cells = results["cells"]
    found = accuracies(cells)
    groups = grouped(cells, label)
    lines = []
    for name in sorted(groups, key=lambda name: -statistics.mean(found[name].values())):
        difference = None if name == LORA_REFERENCE else paired_difference(found[name], found.get(LORA_REFERENCE, {}))
        lines.append(
            (
                shown_name(name),
                _mean([100 * value for value in found[name].values()], "%"),
                "" if name == LORA_REFERENCE else difference_text(difference),
                _mean([100 * row["validation_accuracy"] for row in groups[name]], "%"),
                number_text(groups[name][0]["dimension"]),
                cpu_text(groups[name]),
                str(len(groups[name])),
            )
        )
    against = f"difference to {shown_name(LORA_REFERENCE)}"
    header = ("what is trained", "test accuracy", against, "validation", "values trained", "CPU s a cell", "seeds")
    return markdown(header, lines) + provenance(cells)


def comparisons(results: Mapping[str, Any]) -> str:
    """Every grid of the sweep but the choosing ones: one table for each grid and privacy level."""
    parts = []
    for (grid, epsilon), rows in sorted(_by_table(results["cells"]).items()):
        private = [row for row in rows if row["epsilon_stated"] is not None]
        stated = max((row["epsilon_stated"] for row in private), default=epsilon)
        delta = rows[0]["delta"]
        caption = f"**{grid}**, ε ≤ {epsilon_text(stated)} at δ = {delta_text(delta)}: {_scale(rows)}."
        parts.append(f"{caption}\n\n{_table(rows)}{provenance(rows)}")
    return "\n".join(parts) if parts else "*Not measured yet.*\n"


def choices(results: Mapping[str, Any]) -> str:
    """The grids on which settings were chosen: public validation accuracy only."""
    rows = [row for row in results["cells"] if is_choosing(row)]
    if not rows:
        return "*Not measured yet.*\n"
    lines = []
    for (grid, variant), group in sorted(grouped(rows, lambda row: (row["grid"], row["variant"])).items()):
        best = max(group, key=lambda row: row["validation_accuracy"])
        for row in sorted(group, key=lambda row: list(row["axes"].values())):
            setting = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row["axes"].items())
            mark = "**" if row is best else ""
            accuracy = f"{mark}{_percent(row['validation_accuracy'])}{mark}"
            bound = _bound(row["last_clip_bound"])
            lines.append((grid, shown_name(variant), setting, accuracy, f"{row['validation_loss']:.3f}", bound))
    header = ("grid", "method", "setting", "validation accuracy", "validation loss", "last C")
    return markdown(header, lines) + provenance(rows)


def is_choosing(row: Row) -> bool:
    """Whether a cell served to choose settings: its grid's name says so, and no test number of it is shown."""
    return "tuning" in row["grid"] or "fixed-grid" in row["grid"]


def accuracies(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Test accuracy by method (see :func:`label`) and seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(label(row), {})[row["seed"]] = row["test_accuracy"]
    return found


def tables_of(cells: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
    """The reporting cells by grid and epsilon."""
    return _by_table(cells)


def _table(rows: Sequence[Row]) -> str:
    found = accuracies(rows)
    reference = found.get(_reference(found), {})
    groups = grouped(rows, label)
    beside = [variant for variant in groups if variant.removesuffix("-warm") in BESIDE]
    ranked = sorted(groups.keys() - set(beside), key=lambda name: (-statistics.mean(found[name].values()), name))
    lines = []
    for variant in [*ranked, *sorted(beside, key=lambda name: BESIDE.index(name.removesuffix("-warm")))]:
        group = groups[variant]
        difference = None if variant == _reference(found) else paired_difference(found[variant], reference)
        lines.append(
            (
                shown_name(variant),
                _mean([100 * value for value in found[variant].values()], "%"),
                "" if variant == _reference(found) else difference_text(difference),
                _mean([100 * row["validation_accuracy"] for row in group], "%"),
                bound_range([row["first_clip_bound"] for row in group]),
                bound_range([row["last_clip_bound"] for row in group]),
                cpu_text(group),
                str(len(group)),
            )
        )
    against = f"difference to {shown_name(_reference(found))}"
    header = ("method", "test accuracy", against, "validation", "first C", "last C", "CPU s a cell", "seeds")
    return markdown(header, lines)


def _reference(found: Mapping[str, Any]) -> str:
    """DP-LAC in the form the paper has it in the regime: with its histogram, except where all start at the same C0."""
    for name in (REFERENCE, f"{REFERENCE}-histogram", "all"):
        if name in found:
            return name
    return next(iter(found))


def difference_text(difference: Paired | None) -> str:
    """Percentage points with their 95 % interval; the interval is in words missing with one seed."""
    if difference is None:
        return "no shared seed"
    mean = _signed(100 * difference.mean)
    if difference.half_width is None:
        return f"{mean} (one seed)"
    low, high = (100 * (difference.mean + sign * difference.half_width) for sign in (-1, 1))
    return f"{mean} [{_signed(low)}, {_signed(high)}]"


def _signed(value: float) -> str:
    text = f"{abs(value):.1f}"
    return f"{MINUS if value < 0 and text != '0.0' else '+'}{text}"


def _mean(values: Sequence[float], unit: str = "") -> str:
    text = f"{statistics.mean(values):.1f}{unit and ' ' + unit}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


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
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    commits = ", ".join(f"`{commit}`" for commit in sorted({row["commit"] for row in rows}))
    total = duration_text(sum(row["cpu_seconds"] or 0.0 for row in rows))
    count = f"{len(rows)} cell{'s' if len(rows) > 1 else ''}"
    return f"\nSeeds {seeds}; {count}, {total} of one core; machine: {machines}; commit {commits}.\n"


def _by_table(cells: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    return grouped([row for row in cells if not is_choosing(row)], lambda row: (row["grid"], row["epsilon"]))


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a key, in the order in which keys come."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
