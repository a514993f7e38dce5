"""Whether settings for which `lacquer plan` predicts more signal did come out better: committed results, in order.

Run: `python -m simulations.benchmarks planning.validation`. It trains nothing; it reads the results of the sweeps
``planner``, ``controllers``, ``lora``, ``targets`` and ``records-diabetes`` and writes results/planner.json.

Only settings of one data set, model and preset are compared. The correlation is Spearman's, of the predicted S with
test accuracy, or with minus test perplexity. Its p-value is that of permuting what was measured, one-sided; the
interval is a percentile bootstrap over settings, left out where there are fewer than eight. Groups together: the mean
of their correlations, weighted by settings less one, its p-value by permutations inside the groups.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer
from scipy.stats import rankdata

from privacy.randomness.rng import simulation_generator
from simulations.benchmarks.harness.markdown import Columns, Row, grouped, provenance, table
from simulations.benchmarks.harness.results import RESULTS, say, write
from simulations.planning.signal import default_agreement, signal_to_noise
from simulations.report.notation import number_text

DRAWS = 10_000
FEWEST_FOR_INTERVAL = 8


@dataclass(frozen=True)
class Group:
    """Settings that may be compared.

    Attributes:
        file: of results; a cell belongs to the group where ``wanted`` says so.
        records: of an update.
    """

    name: str
    file: str
    wanted: Callable[[Row], bool]
    records: int
    language: bool = False


def _threshold_of_sst2(cell: Row) -> bool:
    return cell["grid"] in ("budgets-sst2", "tuned-sst2") and cell["variant"] in ("fixed-tuned", "head-only")


def _diabetes(variant: str) -> Callable[[Row], bool]:
    return lambda cell: cell["grid"] in ("other-epsilons", "epsilon-2") and cell["variant"] == variant


def _sst2(variant: str | None = None, rank: bool = False) -> Callable[[Row], bool]:
    """Cells of the sweep ``planner``: of a variant, and with the preset's rank alone unless ``rank``."""
    return lambda cell: (
        cell["grid"].startswith("sst2")
        and variant in (None, cell["variant"])
        and (rank or "model.rank" not in cell["axes"])
    )


GROUPS = (
    Group("SST-2, ε, clients, rate, rounds: head alone", "planner-sweep", _sst2("head"), 10),
    Group("SST-2, ε, clients, rate, rounds: rank 4", "planner-sweep", _sst2("lora"), 10),
    Group("SST-2, ε: comparisons, rank 4 and head alone", "controllers", _threshold_of_sst2, 10),
    Group("SST-2, rank and layers: comparisons", "lora", lambda cell: cell["grid"] in ("rank", "layers"), 10),
    Group("SST-2, ε and targets: `sst2-aligned`", "targets", lambda cell: cell["grid"] == "targets-sst2", 64),
    Group("Diabetes 130, ε: fixed threshold", "records-diabetes", _diabetes("dp-lora"), 1, language=True),
    Group("Diabetes 130, ε: RLDP, sound form", "records-diabetes", _diabetes("rldp"), 1, language=True),
    Group("Diabetes 130, ε: percentile", "records-diabetes", _diabetes("dp-adam-ac"), 1, language=True),
    Group(
        "Diabetes 130, ε and batch, 40 steps, rank 8",
        "planner-sweep",
        lambda cell: cell["grid"] in ("diabetes", "diabetes-batch"),
        1,
        language=True,
    ),
)
"""Disjoint; together they are the verdict."""

WIDER = (
    Group("SST-2, all twenty: head alone and ranks together", "planner-sweep", _sst2(rank=True), 10),
    Group(
        "Diabetes 130, all seven: ranks 1 to 32, 20 and 40 steps",
        "planner-sweep",
        lambda cell: cell["grid"].startswith("diabetes"),
        1,
        language=True,
    ),
)
"""Where the numbers of values, or training itself, differ too: what S alone does not tell."""


def main() -> None:
    """Write simulations/benchmarks/results/planner.json from the committed results."""
    groups = [judged(group) for group in (*GROUPS, *WIDER)]
    alike = together(GROUPS)
    everything = together([group for group in GROUPS if group.file != "planner-sweep"] + list(WIDER))
    write("planner", {"groups": groups, "alike": alike, "everything": everything, "beside_a_head": beside_a_head()})
    say(json.dumps(alike), json.dumps(everything))


def rows_of(group: Group) -> list[dict[str, Any]]:
    """One row per setting, the mean over its seeds."""
    cells = json.loads((RESULTS / f"{group.file}.json").read_text(encoding="utf-8"))["cells"]
    chosen = [cell for cell in cells if group.wanted(cell) and not cell["not_private"] and cell["noise_multiplier"]]
    task = "causal-lm" if group.language else "classification"
    found = []
    for runs in grouped(chosen, lambda cell: cell["cell"].rpartition("/")[0]).values():
        first = runs[0]
        agreement = default_agreement(task, group.records).value
        noise = (first["noise_multiplier"],) * first["rounds"]
        measured = [-run["test_perplexity"] if group.language else run["test_accuracy"] for run in runs]
        found.append(
            {
                "setting": first["cell"].rpartition("/")[0],
                "signal": signal_to_noise(noise, first["expected_cohort"], first["dimension"], agreement),
                "measured": statistics.mean(measured),
                "seeds": len(runs),
            }
        )
    return sorted(found, key=lambda row: float(row["signal"]))


def judged(group: Group) -> dict[str, Any]:
    """A group's settings, and how far their order is the predicted one."""
    rows = rows_of(group)
    signals, measured = [row["signal"] for row in rows], [row["measured"] for row in rows]
    found = {"group": group.name, "language": group.language, "rows": rows, "runs": sum(row["seeds"] for row in rows)}
    found |= {"correlation": spearman(signals, measured), "p": permuted([(signals, measured)])}
    interval = bootstrapped(signals, measured) if len(rows) >= FEWEST_FOR_INTERVAL else None
    return {**found, "interval": interval}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank."""
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])


def weighted(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The groups' correlations, each weighted by its settings less one."""
    weights = [len(first) - 1 for first, _ in groups]
    values = [spearman(first, second) for first, second in groups]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def permuted(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """One-sided p-value of :func:`weighted` under permutations inside the groups."""
    rng, seen = simulation_generator(0, "planner", "permutations"), weighted(groups)
    above = sum(
        weighted([(first, rng.permutation(np.asarray(second)).tolist()) for first, second in groups]) >= seen - 1e-12
        for _ in range(DRAWS)
    )
    return (above + 1) / (DRAWS + 1)


def bootstrapped(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of the correlation over settings."""
    rng, one, two = simulation_generator(0, "planner", "bootstrap"), np.asarray(first), np.asarray(second)
    drawn = (rng.integers(0, len(one), len(one)) for _ in range(DRAWS))
    values = [spearman(one[i], two[i]) for i in drawn if len(set(i.tolist())) > 1]  # type: ignore[arg-type]
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def together(groups: Sequence[Group]) -> dict[str, Any]:
    """The verdict over disjoint groups."""
    every = [rows_of(group) for group in groups]
    pairs = [([row["signal"] for row in rows], [row["measured"] for row in rows]) for rows in every]
    return {
        "settings": sum(len(rows) for rows in every),
        "runs": sum(row["seeds"] for rows in every for row in rows),
        "correlation": weighted(pairs),
        "p": permuted(pairs),
    }


def beside_a_head() -> dict[str, Any]:
    """Accuracy of rank 4 less that of the head alone, at the same epsilon, clients, rate and rounds."""
    lora = {row["setting"].replace("lora", "head"): row for row in rows_of(GROUPS[1])}
    pairs = [(row, lora[row["setting"]]) for row in rows_of(GROUPS[0]) if row["setting"] in lora]
    differences = [adapters["measured"] - head["measured"] for head, adapters in pairs]
    return {
        "pairs": len(pairs),
        "signal": [min(adapters["signal"] for _, adapters in pairs), max(adapters["signal"] for _, adapters in pairs)],
        "mean": statistics.mean(differences),
        "error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }


def correlations(results: Row) -> str:
    """The table of docs/results/planning.md: one line a group, the verdict last."""
    columns: Columns = {
        "settings compared": "{group}",
        "settings (runs)": lambda row: f"{len(row['rows'])} ({row['runs']})",
        "predicted S": lambda row: _span([one["signal"] for one in row["rows"]], "{:.2f}"),
        "measured": _measured,
        "Spearman": lambda row: f"{row['correlation']:.2f}",
        "95 % interval": lambda row: "" if row["interval"] is None else "{:.2f} to {:.2f}".format(*row["interval"]),
        "p": lambda row: _p(row["p"]),
    }
    pairs, (low, high) = results["beside_a_head"], results["beside_a_head"]["signal"]
    verdict = (
        f"\nThe first {len(GROUPS)} lines together: {_verdict(results['alike'])}. With the last {len(WIDER)} lines in "
        f"the place of what they contain: {_verdict(results['everything'])}. Rank 4 less the head alone, "
        f"{pairs['pairs']} pairs, S of rank 4 {low:.2f} to {high:.2f}: {100 * pairs['mean']:+.1f} ± "
        f"{100 * pairs['error']:.1f} points of test accuracy (mean and its standard error).\n"
    )
    return table(results["groups"], columns, "lr") + verdict + provenance(results)


def _verdict(pooled: Row) -> str:
    return (
        f"{pooled['settings']} settings of {pooled['runs']} runs, Spearman {pooled['correlation']:.2f}, permutation p "
        f"{_p(pooled['p'])}"
    )


def _measured(row: Row) -> str:
    values = [one["measured"] for one in row["rows"]]
    if row["language"]:
        return _span([-value for value in reversed(values)], "{:.2f}") + " perplexity"
    return _span([100 * value for value in values], "{:.1f}") + " %"


def _span(values: Sequence[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else number_text(round(value, 3))


if __name__ == "__main__":
    typer.run(main)
