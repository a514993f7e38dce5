"""Tables of the record-level comparison on Diabetes 130, from results/records-diabetes.json; see ``tables.py``."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from simulations.benchmarks.harness.markdown import markdown
from simulations.benchmarks.harness.timing import Paired, paired_difference
from simulations.benchmarks.papers.dp_lac_tables import MINUS, bound_range, cpu_text, grouped, provenance
from simulations.report.notation import delta_text, epsilon_text, number_text

Row = Mapping[str, Any]

NAMES = {
    "dp-sgd": "DP-SGD",
    "dp-lora": "DP-LoRA (fixed C, Adam)",
    "auto-s": "AUTO-S",
    "psac": "PSAC",
    "dc-sgd-p": "DC-SGD-P",
    "dc-sgd-e": "DC-SGD-E",
    "adaclip": "AdaCliP",
    "adaclip-blocks": "AdaCliP, one deviation per block",
    "dp-adam-ac": "DP-Adam-AC, sound form",
    "rldp": "RLDP, sound form",
    "rldp-own-state": "*RLDP, its own state: not private*",
    "ceiling": "*no noise, no clipping: not private*",
}
BASELINES = ("dp-sgd", "dp-lora", "auto-s", "psac", "dc-sgd-p", "dc-sgd-e", "adaclip", "adaclip-blocks")
REFERENCE = "dp-lora"


def comparison(results: Mapping[str, Any]) -> str:
    """A table per grid and epsilon: perplexity on the test records, and its change against DP-LoRA seed by seed."""
    parts = []
    for rows in _reported(results).values():
        found, groups = log_perplexities(rows), grouped(rows, lambda row: row["variant"])
        private = [name for name in groups if groups[name][0]["epsilon_stated"] is not None]
        beside = sorted(groups.keys() - set(private))
        lines = []
        for name in [*sorted(private, key=lambda name: statistics.mean(found[name].values())), *beside]:
            difference = None if name == REFERENCE else paired_difference(found[name], found.get(REFERENCE, {}))
            perplexities = [row["test_perplexity"] for row in groups[name]]
            spread = f" ± {statistics.stdev(perplexities):.3f}" if len(perplexities) > 1 else ""
            lines.append(
                (
                    NAMES.get(name, name),
                    f"{statistics.mean(perplexities):.3f}{spread}",
                    "" if difference is None else change_text(difference),
                    bound_range([row["first_clip_bound"] for row in groups[name]]),
                    bound_range([row["last_clip_bound"] for row in groups[name]]),
                    cpu_text(groups[name]),
                    str(len(perplexities)),
                )
            )
        header = ("method", "perplexity", f"against {NAMES[REFERENCE]}", "first C", "last C", "CPU s a cell", "seeds")
        parts.append(f"{_caption(rows)}\n\n{markdown(header, lines)}{provenance(rows)}")
    return "\n".join(parts) if parts else "*Not measured yet.*\n"


def claims(results: Mapping[str, Any]) -> str:
    """RLDP beside the best baseline of each table: final perplexity, and steps to reach it."""
    lines = []
    for (grid, epsilon), rows in _reported(results).items():
        found = log_perplexities(rows)
        baselines = {name: found[name] for name in BASELINES if name in found}
        if "rldp" not in found or not baselines:
            continue
        best = min(baselines, key=lambda name: statistics.mean(baselines[name].values()))
        difference = paired_difference(found["rldp"], found[best])
        assert difference is not None
        shares = steps_shares(rows, "rldp", best)
        reached = [share for share in shares if share is not None]
        steps = "never"
        if reached:
            steps = f"{100 * statistics.mean(reached):.0f} %"
            steps += "" if len(reached) == len(shares) else f" on {len(reached)} of {len(shares)} seeds, else never"
        of = "" if len(baselines) == len(BASELINES) else f" (of {len(baselines)})"
        lines.append((f"{grid}, ε {number_text(epsilon)}", NAMES[best] + of, change_text(difference), steps))
    if not lines:
        return "*Not measured yet.*\n"
    header = (
        "table",
        "best baseline",
        "perplexity of RLDP against it",
        "steps RLDP needs to its final validation loss",
    )
    return markdown(header, lines)


def choices(results: Mapping[str, Any]) -> str:
    """The cells on which rates and the first threshold were chosen: perplexity on public validation records only."""
    cells = [row for row in results["cells"] if "tuning" in row["grid"]]
    if not cells:
        return "*Not measured yet.*\n"
    lines = []
    for variant, rows in sorted(grouped(cells, lambda row: row["variant"]).items()):
        best = min(row["validation_perplexity"] for row in rows)
        for row in sorted(rows, key=lambda row: (row["grid"], *row["axes"].values())):
            setting = ", ".join(f"{key.rpartition('.')[2]} {number_text(value)}" for key, value in row["axes"].items())
            mark = "**" if row["validation_perplexity"] == best and len(rows) > 1 else ""
            perplexity = f"{mark}{row['validation_perplexity']:.3f}{mark}"
            lines.append((NAMES.get(variant, variant), setting, bound_range([row["first_clip_bound"]]), perplexity))
    return markdown(("method", "setting", "C", "validation perplexity"), lines) + provenance(cells)


def log_perplexities(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Mean loss of a token of the test records, by variant and seed: ratios of perplexities are its differences."""
    return {
        name: {row["seed"]: math.log(row["test_perplexity"]) for row in group}
        for name, group in grouped(rows, lambda row: row["variant"]).items()
    }


def steps_shares(rows: Sequence[Row], name: str, reference: str) -> list[float | None]:
    """By seed, the share of all steps after which ``name`` has the final validation loss of ``reference``, or None."""
    curves = {(row["variant"], row["seed"]): row for row in rows}
    shares: list[float | None] = []
    for (variant, seed), row in sorted(curves.items()):
        if variant != name or (reference, seed) not in curves:
            continue
        goal = curves[reference, seed]["last_round_loss"]
        reached = [step for step, loss in row["curve"] if loss <= goal]
        shares.append(min(reached) / row["rounds"] if reached else None)
    return shares


def change_text(difference: Paired) -> str:
    """A difference of log perplexities as a change in percent, with its 95 % interval."""

    def percent(value: float) -> str:
        text = f"{abs(100 * math.expm1(value)):.1f}"
        return f"{MINUS if value < 0 and text != '0.0' else '+'}{text}"

    if difference.half_width is None:
        return f"{percent(difference.mean)} % (one seed)"
    low, high = (percent(difference.mean + sign * difference.half_width) for sign in (-1, 1))
    return f"{percent(difference.mean)} % [{low}, {high}]"


def _reported(results: Mapping[str, Any]) -> dict[tuple[str, float], list[Row]]:
    cells = [row for row in results["cells"] if "tuning" not in row["grid"]]
    return dict(sorted(grouped(cells, lambda row: (row["grid"], row["epsilon"])).items()))


def _caption(rows: Sequence[Row]) -> str:
    row, cohort = rows[0], number_text(rows[0]["expected_cohort"])
    stated = max((row["epsilon_stated"] for row in rows if row["epsilon_stated"] is not None), default=row["epsilon"])
    return (
        f"**{row['grid']}**, ε ≤ {epsilon_text(stated)} at δ = {delta_text(row['delta'])}, noise multiplier "
        f"{number_text(row['noise_multiplier'])}: {row['rounds']} steps of {cohort} expected records, "
        f"{row['dimension']:,} values trained, {row['test_records']:,} test tokens."
    )
