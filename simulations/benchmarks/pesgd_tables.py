"""Tables of the PE-SGD comparison: losses of the five methods, the paper's order as claims, and the rates they got."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from simulations.benchmarks.paired import half_width, paired_difference
from simulations.benchmarks.privacy_tables import markdown

ORDER = ("PE-SGD", "FixSample", "PDP-SGD", "DP-SGD", "GEP")
"""The paper's, best first."""

PAPER = {"DP-SGD": 2.3731, "PDP-SGD": 2.2502, "GEP": 2.4164, "FixSample": 2.2497, "PE-SGD": 2.1990}
"""Its losses on PubMed at epsilon 1, Qwen2.5-3B (Zou et al., ICLR 2026)."""

Cells = Sequence[Mapping[str, Any]]


def losses(results: Mapping[str, Any]) -> str:
    """One line per method: test loss over seeds, what it gained on the start, and the paper's number."""
    cells, lines = results["cells"], []
    for method in ORDER:
        rows = [row for row in cells if row["method"] == method]
        if not rows:
            lines.append((method, "not measured yet", "", "", "", f"{PAPER[method]:.4f}"))
            continue
        gains = [row["start_loss"] - row["loss"] for row in rows]
        width = half_width(gains)
        lines.append(
            (
                method,
                f"{statistics.mean(row['loss'] for row in rows):.4f}",
                f"{statistics.mean(gains):.4f}" + ("" if width is None else f" ± {width:.4f}"),
                f"{rows[0]['learning_rate']:g}",
                f"{statistics.mean(row['cpu_seconds'] for row in rows):.0f} s",
                f"{PAPER[method]:.4f}",
            )
        )
    header = ("method", "test loss", "below the common start (95 %)", "learning rate", "CPU time", "paper's loss")
    return markdown(header, lines) + _provenance(results)


def claims(results: Mapping[str, Any]) -> str:
    """The paper's order, neighbour by neighbour, checked seed by seed."""
    found = {
        method: {row["seed"]: row["loss"] for row in results["cells"] if row["method"] == method} for method in ORDER
    }
    lines = []
    for better, worse in pairwise(ORDER):
        difference = paired_difference(found[better], found[worse])
        if difference is None:
            lines.append((f"{better} < {worse}", "not measured yet", ""))
            continue
        wins = sum(found[better][seed] < found[worse][seed] for seed in difference.seeds)
        width = difference.half_width
        sure = width is not None and abs(difference.mean) > width
        lines.append(
            (
                f"{better} < {worse}",
                f"{difference.mean:+.4f}"
                + ("" if width is None else f" ± {width:.4f}")
                + f", lower on {wins} of {len(difference.seeds)} seeds",
                ("yes" if difference.mean < 0 else "no") if sure else "open: within chance",
            )
        )
    return markdown(("claim", "difference of losses (95 %)", "holds"), lines)


def tuning(results: Mapping[str, Any]) -> str:
    """Validation loss of every rate tried, one line per method."""
    rates = sorted({row["learning_rate"] for row in results["cells"]})
    found = {(row["method"], row["learning_rate"]): row["loss"] for row in results["cells"]}
    lines = [
        (method, *(f"{found[method, rate]:.4f}" if (method, rate) in found else "" for rate in rates))
        for method in ORDER
    ]
    return markdown(("method", *(f"{rate:g}" for rate in rates)), lines)


def _provenance(results: Mapping[str, Any]) -> str:
    cells, settings = results["cells"], results["settings"]
    if not cells:
        return ""
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in cells}))
    base = statistics.mean(row["base_loss"] for row in cells)
    start = statistics.mean(row["start_loss"] for row in cells)
    models = ", ".join(sorted({row["model"] for row in cells}))
    return (
        f"\nSeeds {seeds}; model {models}, {cells[0]['values']:,} values trained; texts of at most "
        f"{settings['longest']} tokens, loss per token on {settings['test']} texts. The base model has "
        f"{base:.4f}; the common start, trained on the first synthetic set, {start:.4f}. ε spent: at most "
        f"{max(row['epsilon'] for row in cells):.3f} (δ = {settings['delta']:g}, noise multiplier "
        f"{cells[0]['noise_multiplier']:.3f}).\n"
    )
