"""The tables of docs/results/pe-sgd.md about whole trainings: each method at its own rate, and all at common ones."""

from collections.abc import Hashable, Mapping
from itertools import pairwise
from statistics import mean
from typing import TypeVar

from simulations.benchmarks.harness.markdown import (
    NOT_MEASURED,
    Row,
    distinct,
    grouped,
    markdown,
    provenance_of_rows,
)
from simulations.history.paired import Estimate, number_tested, paired_difference, told_apart

Key = TypeVar("Key", bound=Hashable)

ORDER = ("PE-SGD", "FixSample", "PDP-SGD", "DP-SGD", "GEP")
"""The paper's, best first."""

PAPER = {"DP-SGD": 2.3731, "PDP-SGD": 2.2502, "GEP": 2.4164, "FixSample": 2.2497, "PE-SGD": 2.1990}
"""Its losses on PubMed at epsilon 1, Qwen2.5-3B (Zou et al., ICLR 2026)."""


def losses(results: Row) -> str:
    """One line per method: test loss over seeds, what it gained on the start, and the paper's number."""
    groups, lines = grouped(results["cells"], lambda row: row["method"]), []
    for method in ORDER:
        rows = groups.get(method, [])
        if not rows:
            lines.append((method, "not measured yet", "", "", "", f"{PAPER[method]:.4f}"))
            continue
        gains = [row["start_loss"] - row["loss"] for row in rows]
        lines.append(
            (
                method,
                f"{mean(row['loss'] for row in rows):.4f}",
                f"{mean(gains):.4f}{_width_text(Estimate.of(gains).half)}",
                f"{rows[0]['learning_rate']:g}",
                f"{mean(row['cpu_seconds'] for row in rows):.0f} s",
                f"{PAPER[method]:.4f}",
            )
        )
    header = ("method", "test loss", "below the common start (95 %)", "learning rate", "CPU time", "paper's loss")
    return markdown(header, lines) + _provenance(results)


def claims(results: Row) -> str:
    """The paper's order, neighbour by neighbour, and PE-SGD against DP-SGD, paired by seed."""
    groups, lines = grouped(results["cells"], lambda row: row["method"]), []
    found = {method: {row["seed"]: row["loss"] for row in groups.get(method, [])} for method in ORDER}
    pairs = [*pairwise(ORDER), ("PE-SGD", "DP-SGD")]
    differences = [paired_difference(found[better], found[worse]) for better, worse in pairs]
    for (better, worse), difference, told in zip(pairs, differences, told_apart(differences), strict=True):
        claim = f"{better} < {worse}"
        if difference is None:
            lines.append((claim, "not measured yet", ""))
            continue
        wins = sum(value < 0 for value in difference.values)
        how = f"{difference.mean:+.4f}{_width_text(difference.half)}, lower on {wins} of {len(difference.values)} seeds"
        smallest = difference.smallest(number_tested(differences))
        unseen = "" if smallest is None else f": {smallest:.3f} would show"
        lines.append((claim, how, ("yes" if difference.mean < 0 else "no") if told else f"not significant{unseen}"))
    return markdown(("claim", "difference of losses (95 %)", "holds"), lines)


def _width_text(width: float | None) -> str:
    return "" if width is None else f" ± {width:.4f}"


def tuning(results: Row) -> str:
    """Validation loss of every rate tried, one line per method."""
    rates = distinct(results["cells"], "learning_rate")
    found = {(row["method"], row["learning_rate"]): f"{row['loss']:.4f}" for row in results["cells"]}
    lines = [(method, *(found.get((method, rate), "") for rate in rates)) for method in ORDER]
    return markdown(("method", *(f"{rate:g}" for rate in rates)), lines)


def common(results: Row) -> str:
    """Test loss of every method at every rate, mean over the seeds; the best of a column is in bold."""
    cells = results["cells"]
    if not cells:
        return NOT_MEASURED
    rates, seeds = distinct(cells, "learning_rate"), distinct(cells, "seed")
    groups = grouped(cells, lambda row: (row["method"], row["learning_rate"]))
    found = {key: mean(row["loss"] for row in rows) for key, rows in groups.items() if len(rows) == len(seeds)}
    best = {rate: min((found[key] for key in found if key[1] == rate), default=None) for rate in rates}

    def shown(method: str, rate: float) -> str:
        if (method, rate) not in found:
            return "not measured"
        known = [row["accuracy"] for row in groups[method, rate] if "accuracy" in row]
        text = f"{found[method, rate]:.4f}" + (f" ({100 * mean(known):.1f} %)" if known else "")
        return f"**{text}**" if found[method, rate] == best[rate] else text

    lines = [(method, *(shown(method, rate) for rate in rates)) for method in ORDER]
    start, accuracy = (mean(row[key] for row in cells if key in row) for key in ("start_loss", "start_accuracy"))
    return (
        markdown(("test loss (next-token accuracy)", *(f"rate {rate:g}" for rate in rates)), lines, "lr")
        + f"\nThe common start has {start:.4f} ({100 * accuracy:.1f} %). Bold: lowest loss at that rate. "
        "Cells without an accuracy are those of the table of own rates, which noted none.\n"
        + provenance_of_rows([row for row in cells if "machine" in row])
    )


def common_claims(results: Row) -> str:
    """The paper's order at one rate for all, neighbour by neighbour, paired by seed; bold is significant."""
    groups = grouped(results["cells"], lambda row: (row["method"], row["learning_rate"]))
    rates = distinct(results["cells"], "learning_rate")
    found = {key: {row["seed"]: row["loss"] for row in rows} for key, rows in groups.items()}
    differences = {
        (f"{better} < {worse}", rate): paired_difference(found.get((better, rate), {}), found.get((worse, rate), {}))
        for better, worse in pairwise(ORDER)
        for rate in rates
    }
    texts = difference_texts(differences)
    lines = [
        (claim, *(texts[claim, rate] for rate in rates)) for claim in dict.fromkeys(claim for claim, _ in differences)
    ]
    return markdown(("difference of losses (95 %)", *(f"rate {rate:g}" for rate in rates)), lines, "lr")


def difference_texts(differences: Mapping[Key, Estimate | None]) -> dict[Key, str]:
    """Of one table: mean and interval; where it is not significant, the smallest that would show."""
    number, texts = number_tested([*differences.values()]), {}
    for (key, difference), told in zip(differences.items(), told_apart([*differences.values()]), strict=True):
        if difference is None:
            texts[key] = "not measured"
            continue
        smallest = difference.smallest(number)
        unseen = "" if told or smallest is None else f"; {smallest:.2g} would show"
        shown = f"{difference.mean:+.4f}{_width_text(difference.half)}"
        texts[key] = f"**{shown}**" if told else f"{shown}{unseen}"
    return texts


def _provenance(results: Row) -> str:
    cells, settings = results["cells"], results["settings"]
    if not cells:
        return ""
    base, start = (mean(row[key] for row in cells) for key in ("base_loss", "start_loss"))
    return (
        f"\nSeeds {', '.join(map(str, distinct(cells, 'seed')))}; model {', '.join(distinct(cells, 'model'))}, "
        f"{cells[0]['values']:,} values trained; texts of at most {settings['longest']} tokens, loss per token on "
        f"{settings['test']} texts. The base model has {base:.4f}; the common start, trained on the first synthetic "
        f"set, {start:.4f}. ε spent: at most {max(row['epsilon'] for row in cells):.3f} (δ = {settings['delta']:g}, "
        f"noise multiplier {cells[0]['noise_multiplier']:.3f}).\n"
    )
