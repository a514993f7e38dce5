"""The test of DP-LAC where epsilon matters: language modelling, baselines that paid for their tuning, and the oracle.

Tables of docs/results/dp-lac.md from the sweep ``dp-lac-diabetes``, whose file says what was asked beforehand.
Differences are of log perplexities, told as changes of perplexity, seed by seed against DP-LAC with its histogram.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.harness.markdown import NOT_MEASURED, Columns, Row, markdown, mean_text, table
from simulations.benchmarks.papers.diabetes import change_text, log_perplexities, smallest_text
from simulations.benchmarks.papers.dp_lac import BOUNDS, COST, is_choosing, marked, methods, provenance, setting_text
from simulations.history.paired import paired_difference, told_apart
from simulations.report.notation import delta_text, number_text

AVERAGED, ADAM = ("full", "paid", "default"), ("adam-full", "adam-paid", "adam-equal")
PATIENTS = ("patients", "patients-paid")
"""Grids of a table: by the server's optimizer, and with clients by patient. The first of each holds DP-LAC with its
histogram, the reference."""
RANKS = {
    4: ("rank-4", "rank-4-paid"),
    8: ("full", "paid"),
    16: ("rank-16", "rank-16-paid"),
    32: ("rank-32", "rank-32-paid"),
}
"""Grids by rank: with all of epsilon, and with what tuning left of it."""
NAMES = {
    "full/dp-lac-histogram": "DP-LAC, histogram",
    "full/dp-lac-histogram-smooth": "DP-LAC `smooth`, histogram",
    "full/oracle": "*fixed, the best C of a tuning that cost nothing*",
    "full/ceiling": "*non-private upper bound*",
    "full/floor": "*public-only baseline*",
    "paid/fixed": "fixed (Abadi), tuned",
    "paid/fixed-decay": "fixed, decaying server step, tuned",
    "paid/quantile": "quantile (Andrew), tuned",
    "paid/dynamic": "dynamic (Du), tuned",
    "paid/automatic": "automatic (Bu), tuned",
    "default/fixed": "fixed (Abadi), C₀ = 8",
    "default/quantile": "quantile (Andrew), C₀ = 8",
    "default/dynamic": "dynamic (Du), C₀ = 8",
    "default/automatic": "automatic (Bu), C₀ = 8",
    "default/dp-lac": "DP-LAC, no histogram, C₀ = 8",
    "adam-full/oracle": "fixed, FedAvg's best C, all of ε",
    "adam-equal/automatic": "automatic (Bu), all of ε",
    "adam-equal/fixed-decay": "fixed, decaying server step, all of ε",
}
SPENT = {"dp-lac": "1", "fixed": "5", "quantile": "10", "dynamic": "15", "automatic": "10"}
"""Runs that the paper's protocol spends on a method before the one that is reported, where it says."""


def _name(row: Row) -> str:
    return f"{row['grid']}/{row['variant']}"


def comparison(results: Mapping[str, Any]) -> str:
    """One table: what each method reaches with the epsilon that its tuning leaves, under FedAvg."""
    return _compared(results, AVERAGED)


def comparison_under_adam(results: Mapping[str, Any]) -> str:
    """The same under server Adam."""
    return _compared(results, ADAM)


def comparison_by_patient(results: Mapping[str, Any]) -> str:
    """The same under FedAvg, every patient a client."""
    return _compared(results, PATIENTS)


def comparison_of_ranks(results: Mapping[str, Any]) -> str:
    """DP-LAC with all of epsilon against automatic clipping that paid for its tuning, rank by rank."""
    rows = [{**row, "variant": _name(row)} for row in results["cells"] if not is_choosing(row)]
    found, lines, used, differences = log_perplexities(rows), [], [], []
    for rank, (full, paid) in RANKS.items():
        names = (f"{full}/dp-lac-histogram", f"{paid}/automatic")
        cells = [[row for row in rows if row["variant"] == name] for name in names]
        difference = paired_difference(found.get(names[1], {}), found.get(names[0], {}))
        if difference is None:
            continue
        used += cells[0] + cells[1]
        texts = [mean_text([cell["test_perplexity"] for cell in group], 2) for group in cells]
        differences.append(difference)
        lines.append((str(rank), f"{cells[0][0]['dimension']:,}", *texts))
    if len(lines) < 2:
        return NOT_MEASURED
    changes = zip(lines, differences, told_apart(differences), strict=True)
    shown = [(*line, marked(change_text(difference), apart)) for line, difference, apart in changes]
    header = ("rank", "values trained", NAMES["full/dp-lac-histogram"], NAMES["paid/automatic"], "the latter's change")
    return f"{markdown(header, shown, 'rrrrl')}{provenance(used)}"


def _compared(results: Mapping[str, Any], grids: tuple[str, ...]) -> str:
    rows = [{**row, "variant": _name(row)} for row in results["cells"] if not is_choosing(row) and row["grid"] in grids]
    if not rows:
        return NOT_MEASURED
    found = log_perplexities(rows)
    groups: dict[str, list[Row]] = {name: [row for row in rows if row["variant"] == name] for name in found}
    ranked = sorted(found, key=lambda name: statistics.mean(found[name].values()))
    columns: Columns = {
        "method": lambda row: _title(str(row["name"])),
        "ε it trains with": lambda row: _epsilon(row["cells"][0]),
        "perplexity": lambda row: mean_text([cell["test_perplexity"] for cell in row["cells"]], 2),
        "against DP-LAC": lambda row: (
            ""
            if row["is reference"] or row["difference"] is None
            else marked(change_text(row["difference"]), row["significant"])
        ),
        "smallest that would show": lambda row: smallest_text(row["smallest"]),
        "runs in the paper": lambda row: _spent(row["name"]),
        **BOUNDS,
        **COST,
    }
    row = rows[0]
    caption = (
        f"{row['clients']:,} clients, {number_text(row['expected_cohort'])} expected in a round, {row['rounds']} "
        f"rounds, δ = {delta_text(row['delta'])}, {row['dimension']:,} values trained, perplexity over "
        f"{row['test_records']:,} test tokens."
    )
    shown = methods(ranked, groups, found, f"{grids[0]}/dp-lac-histogram")
    return f"{caption}\n\n{table(shown, columns)}{provenance(rows)}"


def _title(name: str) -> str:
    return NAMES.get(name) or NAMES.get(_plain(name), name)


def _plain(name: str) -> str:
    """What a cell would be called in the first table."""
    return name.removeprefix("adam-").replace("patients-paid/", "paid/").replace("patients/", "full/")


def _epsilon(row: Row) -> str:
    if row["kind"] == "public-only":
        return "none is spent"
    return "no guarantee" if row["epsilon_stated"] is None else f"{row['epsilon_stated']:.2f}"


def _spent(name: str) -> str:
    grid, _, variant = _plain(name).partition("/")
    if grid == "full":
        return "1" if variant.startswith("dp-lac") else ""
    return "1" if grid in ("default", "equal") else SPENT.get(variant, "")


def choices(results: Mapping[str, Any]) -> str:
    """The cells on which the local rate and the thresholds were chosen: public validation records only."""
    rows = sorted(
        (row for row in results["cells"] if is_choosing(row)), key=lambda row: (row["grid"], *row["axes"].values())
    )
    if not rows:
        return NOT_MEASURED
    best = {
        grid: min(row["validation_perplexity"] for row in rows if row["grid"] == grid)
        for grid in {r["grid"] for r in rows}
    }
    columns: Columns = {
        "grid": "{grid}",
        "ε": lambda row: _epsilon(row),
        "setting": lambda row: setting_text(row, number_text),
        "validation perplexity": lambda row: marked(
            f"{row['validation_perplexity']:.2f}", row["validation_perplexity"] == best[row["grid"]]
        ),
    }
    return table(rows, columns) + provenance(rows)


def price_of_tuning(results: Mapping[str, Any]) -> str:
    """What two thirds of epsilon cost a fixed threshold, and what a threshold far off costs it."""
    rows = [{**row, "variant": _name(row)} for row in results["cells"] if not is_choosing(row)]
    found = log_perplexities(rows)
    lines = []
    for name, text in (("paid/fixed", "two thirds of ε paid"), ("default/fixed", "C₀ = 8, nobody tuned")):
        difference = paired_difference(found.get(name, {}), found.get("full/oracle", {}))
        lines.append({"text": text, "found": "not measured yet" if difference is None else change_text(difference)})
    return table(lines, {"a fixed C": "{text}", "perplexity against the best fixed C at all of ε": "{found}"})
