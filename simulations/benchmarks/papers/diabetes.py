"""Tables of the record-level comparison on Diabetes 130, from the results of its sweep."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from simulations.benchmarks.harness.markdown import NOT_MEASURED, Columns, Row, grouped, markdown, mean_text, table
from simulations.benchmarks.papers.dp_lac import (
    BOUNDS,
    COST,
    MINUS,
    bound_range,
    marked,
    methods,
    provenance,
    setting_text,
)
from simulations.history.paired import Estimate, number_tested, paired_difference, told_apart
from simulations.report.notation import delta_text, epsilon_text, number_text

NAMES: dict[str, str] = {
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
    "ceiling": "*non-private upper bound*",
}
WHY_NAMES = {
    "still-joint": "*thresholds stay, joint noise*",
    "still-each": "*thresholds stay, noise σ Cᵢ on each adapter*",
    "rl-joint": "*the paper's agent, joint noise*",
    "rl-each": "*the paper's agent, noise σ Cᵢ on each adapter*",
    "adam-ac-20": "DP-Adam-AC, a fifth is to be clipped",
    "adam-ac-50": "DP-Adam-AC, a half is to be clipped",
    "adam-ac-90": "DP-Adam-AC, nine tenths are to be clipped",
    "adam-ac-own": "*DP-Adam-AC, the published rule: not private*",
    "geoclip": "GeoClip",
    "rl-paid": "RLDP's controller: learning on, gain per spent ε, noise that moves",
}
"""Of the sweep ``records-diabetes-why``, beside those of :data:`NAMES`."""

RLDP_NAMES = {
    "fixed": "fixed C, Adam",
    "fixed-decay": "fixed C, Adam, a step that decays",
    "per-adapter": "RLDP's clipping per adapter, thresholds that stay",
    "dynamic": "dynamic: C and noise decay, no agent",
    "rl": "RLDP, sound form: the agent moves thresholds",
    "rl-filter": "RLDP, sound form: thresholds and noise (filter mode)",
    "rl-filter-learn": "RLDP, sound form: thresholds and noise, learning on",
}
"""Of the sweep ``rldp``, beside those of :data:`NAMES`."""

ASKED = ("rl", "rl-filter", "rl-filter-learn", "dynamic")
CONTROLS = ("dc-sgd-e", "dynamic", "fixed-decay")
"""Of the sweep ``rldp``: what is asked about, and what it is held against beside a threshold that stays."""

BASELINES = ("dp-sgd", "dp-lora", "auto-s", "psac", "dc-sgd-p", "dc-sgd-e", "adaclip", "adaclip-blocks")
REFERENCE = "dp-lora"


def shown_name(variant: str) -> str:
    """A variant as readers know it."""
    return {**NAMES, **WHY_NAMES, **RLDP_NAMES}.get(variant, variant)


def noise_or_agent(results: Mapping[str, Any]) -> str:
    """RL-1 of the sweep ``records-diabetes-why``: what of RLDP's gain is its agent, and what is missing noise."""
    return comparison({"cells": [row for row in results["cells"] if row["grid"] == "rl-1"]})


def clip_rates(results: Mapping[str, Any]) -> str:
    """DP-Adam-AC at three targets, of the sweep ``records-diabetes-why``."""
    return comparison({"cells": [row for row in results["cells"] if row["grid"] == "clip-rate"]})


def ternary(results: Mapping[str, Any]) -> str:
    """DP-Adam-AC on weights of three values, of the sweep ``records-diabetes-why``."""
    return comparison({"cells": [row for row in results["cells"] if row["grid"] == "ternary"]})


def noise_levels(results: Mapping[str, Any]) -> str:
    """DP-Adam-AC at the noise levels of its paper, of the sweep ``records-diabetes-why``."""
    return comparison({"cells": [row for row in results["cells"] if row["grid"].startswith("sigma")]})


def registered(results: Mapping[str, Any]) -> str:
    """The grid ``registered`` of ``records-diabetes-why``, beside DP-LoRA of ``rl-1``, whose settings are the same."""
    own = [row for row in results["cells"] if row["grid"] == "registered"]
    same = [row for row in results["cells"] if (row["grid"], row["variant"]) == ("rl-1", REFERENCE)]
    return comparison({"cells": [*own, *({**row, "grid": "registered"} for row in same)] if own else []})


def fair_chance(results: Mapping[str, Any]) -> str:
    """RL-2, the sweep ``rldp``: many adapters, thresholds that start far off, noise that may move."""
    return comparison(results, "fixed")


def fair_chance_pairs(results: Mapping[str, Any]) -> str:
    """What RL-2 asks: the agent, and noise that decays without one, against each control, seed by seed."""
    lines = []
    for (grid, epsilon), rows in _reported(results).items():
        found = log_perplexities(rows)
        asked = [(one, other) for one in ASKED for other in CONTROLS if one != other]
        differences = [paired_difference(found.get(one, {}), found.get(other, {})) for one, other in asked]
        count, texts = number_tested(differences), {}
        for pair, difference, told in zip(asked, differences, told_apart(differences), strict=True):
            if difference is not None:
                smallest = None if told else difference.smallest(count)
                unseen = "" if smallest is None else f"; {smallest_text(smallest)} would show"
                texts[pair] = marked(change_text(difference), told) + unseen
        lines += [
            (f"{grid}, ε {number_text(epsilon)}", shown_name(one), *(texts.get((one, other), "") for other in CONTROLS))
            for one in ASKED
        ]
    header = ("grid", "perplexity of", *(f"against {shown_name(other)}" for other in CONTROLS))
    return markdown(header, lines) if lines else NOT_MEASURED


def comparison(results: Mapping[str, Any], reference: str = REFERENCE) -> str:
    """A table per grid and epsilon: perplexity on the test records, and its change against `reference` seed by seed."""
    parts = []
    columns: Columns = {
        "method": lambda row: shown_name(row["name"]),
        "perplexity": lambda row: mean_text([cell["test_perplexity"] for cell in row["cells"]], 3),
        f"against {shown_name(reference)}": lambda row: (
            ""
            if row["is reference"] or row["difference"] is None
            else marked(change_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: smallest_text(row["smallest"]),
        **BOUNDS,
        **COST,
    }
    for rows in _reported(results).values():
        found, groups = log_perplexities(rows), grouped(rows, lambda row: row["variant"])
        private = [name for name in groups if groups[name][0]["epsilon_stated"] is not None]
        ranked = sorted(private, key=lambda name: statistics.mean(found[name].values()))
        ranked += sorted(groups.keys() - set(private))
        shown = table(methods(ranked, groups, found, reference), columns)
        parts.append(f"{_caption(rows)}\n\n{shown}{provenance(rows)}")
    return "\n".join(parts) if parts else NOT_MEASURED


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
        return NOT_MEASURED
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
        return NOT_MEASURED
    variants = grouped(cells, lambda row: row["variant"])
    shown = sorted(cells, key=lambda row: (row["variant"], row["grid"], *row["axes"].values()))

    def perplexity(row: Row) -> str:
        tried = [other["validation_perplexity"] for other in variants[row["variant"]]]
        mark = "**" if row["validation_perplexity"] == min(tried) and len(tried) > 1 else ""
        return f"{mark}{row['validation_perplexity']:.3f}{mark}"

    columns: Columns = {
        "method": lambda row: shown_name(row["variant"]),
        "setting": lambda row: setting_text(row, number_text),
        "C": lambda row: bound_range([row["first_clip_bound"]]),
        "validation perplexity": perplexity,
    }
    return table(shown, columns) + provenance(cells)


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


FACTOR = math.log(3)
"""Differences of log perplexities from which on a change is a factor and no longer percents."""

LARGEST = math.log(1000)
"""The largest of those that would show to be told exactly: two or three seeds can leave any factor open."""


def change_text(difference: Estimate) -> str:
    """A difference of log perplexities as a change in percent, or a factor if it is large, with its 95 % interval."""

    def percent(value: float) -> str:
        text = f"{abs(100 * math.expm1(value)):.1f}"
        return f"{MINUS if value < 0 and text != '0.0' else '+'}{text}"

    large = difference.mean >= FACTOR
    text, unit = (factor_text, "") if large else (percent, " %")
    if difference.half is None:
        return f"{text(difference.mean)}{unit} (one seed)"
    low, high = (text(difference.mean + sign * difference.half) for sign in (-1, 1))
    return f"{text(difference.mean)}{unit} [{low}, {high}]"


def factor_text(value: float) -> str:
    """A difference of log perplexities as the factor between them, two or three digits of it."""
    factor = math.exp(value)
    return f"×{factor:,.0f}" if factor >= 100 else f"×{factor:.2g}"


def smallest_text(difference: float | None) -> str:
    """A difference of log perplexities as a change in percent or a factor, without its sign; empty for None."""
    if difference is None:
        return ""
    if difference >= FACTOR:
        return factor_text(difference) if difference < LARGEST else f"over {factor_text(LARGEST)}"
    return f"{100 * math.expm1(difference):.1f} %"


def _reported(results: Mapping[str, Any]) -> dict[tuple[str, float], list[Row]]:
    cells = [row for row in results["cells"] if "tuning" not in row["grid"]]
    return dict(sorted(grouped(cells, lambda row: (row["grid"], row["epsilon"])).items()))


def _caption(rows: Sequence[Row]) -> str:
    row, cohort = rows[0], number_text(rows[0]["expected_cohort"])
    guarantee = "no noise, no guarantee"
    if private := [row for row in rows if row["epsilon_stated"] is not None]:
        stated = max(row["epsilon_stated"] for row in private)
        noises = [row["noise_multiplier"] for row in private]
        low, high = number_text(min(noises)), number_text(max(noises))
        # Filter mode and noise that decays need more at the start than noise that stays.
        noise = f"noise multiplier {low}" if low == high else f"first noise multiplier {low} to {high}"
        guarantee = f"ε ≤ {epsilon_text(stated)} at δ = {delta_text(row['delta'])}, {noise}"
    return (
        f"**{row['grid']}**, {guarantee}: {row['rounds']} steps of {cohort} expected records, "
        f"{row['dimension']:,} values trained, {row['test_records']:,} test tokens."
    )
