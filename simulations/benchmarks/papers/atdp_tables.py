"""The tables of docs/atdp.md: what each chain of phases is worth, and what it guarantees."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from simulations.report.notation import duration_text, epsilon_text, number_text

Row = Mapping[str, Any]

ORDER = (
    "base model",
    "no DP",
    "no DP + ATDP",
    "redacted",
    "redacted + ATDP",
    "JFT",
    "JFT + ATDP",
    "DP-SGD",
    "DP-SGD + ATDP",
)

SETS = {"missed": "Detector that misses the secrets", "found": "Detector that finds the secrets"}

NULL = 1.4427
"""Mean exposure in bits of a secret that was never seen: its rank is uniform, and the mean of -log2 u is 1/ln 2."""


def comparison(results: Mapping[str, Any]) -> str:
    """One table for every preset, kind of canary and detector: means over seeds."""
    keys = ("preset", "kind", "detector")
    rows = sorted(results["rows"], key=lambda row: tuple(row[key] for key in keys))
    parts = []
    for (preset, kind, detector), group in groupby(rows, key=lambda row: tuple(row[key] for key in keys)):
        parts.append(_one(list(group), f"**{SETS[detector]}** ({kind}, preset `{preset}`)"))
    return "\n".join(parts)


def _one(rows: Sequence[Row], title: str) -> str:
    lines = [
        f"{title}\n",
        "| | perplexity | exposure, bits | 95 % | training | guarantee |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name in ORDER:
        runs = [row for row in rows if row["row"] == name]
        if runs:
            low, high = _mean(runs, "exposure_low"), _mean(runs, "exposure_high")
            lines.append(
                f"| {name} | {_spread(runs, 'perplexity')} | {_spread(runs, 'exposure')} | {low:.2f} to {high:.2f} | "
                f"{duration_text(_mean(runs, 'cpu_seconds'))} | {_guarantee(runs[0])} |"
            )
    one = rows[0]
    seeds = sorted({row["seed"] for row in rows})
    counted = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"
    lines.append(
        f"\n{counted}; {number_text(one['population'])} protected records, of which {one['canaries']} secrets are "
        f"planted in {one['copies']} each; model `{one['model']}`, {number_text(one['dimension'])} values trained; "
        f"perplexity over {number_text(one['test_tokens'])} tokens of WikiText-2 validation; exposure by this sample "
        f"is at most {one['exposure_cap']:.1f} bits, and {NULL:.2f} bits in the mean for secrets never seen; intervals "
        "are over secrets, means of the seeds' limits; training is processor time of one core.\n"
    )
    return "\n".join(lines)


def _guarantee(row: Row) -> str:
    """The guarantee of a row in plain words; every epsilon rounded up."""
    at = f"δ {row['delta']:g}"
    match row["guarantee"]:
        case "public":
            return "has read no private text"
        case "record":
            return f"record level: ε {epsilon_text(row['record_epsilon'])}, {at}"
        case "selective":
            if not row["selective_epsilon"]:
                return "record level: none (ε infinite); selective-DP ε 0 if the detector were perfect"
            return (
                f"record level: none (ε infinite); selective-DP ε {epsilon_text(row['selective_epsilon'])}, {at}, if "
                "the detector were perfect"
            )
        case _:
            return "none (ε infinite)"


def _mean(runs: Sequence[Row], name: str) -> float:
    return float(statistics.mean(run[name] for run in runs))


def _spread(runs: Sequence[Row], name: str) -> str:
    values = [run[name] for run in runs]
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2f}"
