"""The tables of a report as text ready to be shown: guarantee, phases, ledger, classes, settings, environment."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from client.models.confusion import f1_scores, precisions, recalls
from privacy.ledger.ledger import Charge
from server.config.load import flatten
from server.config.schema import RunConfig
from simulations.report.notation import delta_text, duration_text, epsilon_text, number_text, percent_text
from simulations.report.read_run import Run

MOST_DRAWN = 20
"""Up to so many classes is the confusion matrix shown whole."""

MOST_CONFUSIONS = 10

_ADJACENCIES = {
    "add_remove": "data sets that differ by one unit more or less",
    "replace_one": "one unit replaced",
    "zero_out": "all that one unit contributes replaced by zero; that it takes part is seen",
}


def facts_rows(guarantee: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the terms of a guarantee (privacy.json) as label and text."""
    labels = {
        "epsilon": "ε guaranteed",
        "epsilon_spent": "ε of the releases made",
        "delta": "δ",
        "unit": "Protected unit",
        "population": "Population",
        "adjacency": "Neighbours",
        "sampling": "Sampling",
        "rounds": "Releases",
        "noise_multipliers": "Noise multiplier",
        "mechanism": "Mechanism",
        "accountant": "Accountant",
        "cross_checks": "ε by other accountants",
        "trust_model": "Trust",
    }
    return [(label, _fact(key, guarantee[key])) for key, label in labels.items() if guarantee.get(key)]


def _fact(key: str, value: Any) -> str:
    match value:
        case Mapping():
            return "; ".join(f"{name}: {_fact(key, item)}" for name, item in value.items())
        case list():
            lowest, highest = number_text(min(value)), number_text(max(value))
            return lowest if lowest == highest else f"{lowest} to {highest}"
        case float() if "epsilon" in key or key == "cross_checks":
            return epsilon_text(value)
        case float() if key == "delta":
            return delta_text(value)
        case int() | float():
            return number_text(value)
        case _:
            return _ADJACENCIES.get(value, str(value))


def ledger_table(charges: tuple[Charge, ...]) -> dict[str, Any]:
    """Draw the charges with equal neighbours together, as rows of a table."""
    rows = []
    for _, group in groupby(charges, key=lambda c: (c.event.label, c.event.sampling, c.event.components)):
        same = list(group)
        event, first, last = same[0].event, same[0].event.round, same[-1].event.round
        rows.append(
            {
                "label": event.label,
                "rounds": f"{first}" if first == last else f"{first}\u2013{last}",
                "count": len(same),
                "sampling": _sampling_text(event.sampling.to_json()),
                "components": ", ".join(f"{part.name} ({part.dim:,})" for part in event.components),
                "noise_multiplier": number_text(same[0].noise_multiplier),
            }
        )
    lost = sum(charge.released_at is None for charge in charges)
    text = "Its hash chain is intact and every charge follows its rules."
    if lost:
        text += f" {lost} charged {'release was' if lost == 1 else 'releases were'} never made; the budget is spent."
    return {"rows": rows, "text": text, "summary": f"{len(charges)} {'charge' if len(charges) == 1 else 'charges'}"}


def _sampling_text(sampling: Mapping[str, Any]) -> str:
    population = f"{sampling['population']:,} {sampling['unit']}s"
    if (members := sampling.get("members")) is not None:
        population = f"{members:,} {'held-out' if sampling['held_out'] else 'trained'} of {population}"
    if (most := sampling.get("records_per_unit")) is not None:
        population = f"{sampling['records']:,} records, at most {most} of each of {population}"
    return f"all {population}" if sampling["rate"] == 1 else f"Poisson {sampling['rate']:g} of {population}"


_MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("validation_loss", "Loss", number_text),
    ("validation_perplexity", "Perplexity", number_text),
    ("validation_accuracy", "Accuracy", percent_text),
    ("clip_bound", "C", number_text),
    ("noise_multiplier", "z", number_text),
    ("epsilon_spent", "ε spent", epsilon_text),
    ("update_norm", "Released norm", number_text),
    ("noise_norm", "Noise norm", number_text),
    ("seconds", "Seconds", number_text),
)


def round_table(run: Run) -> dict[str, Any] | None:
    """Tabulate the numbers of every round that any round has, the start first; None without rounds."""
    records = [*([run.start] if run.start else []), *run.rounds]
    if not run.rounds:
        return None
    measured = [column for column in _MEASURED if any(getattr(record, column[0]) is not None for record in run.rounds)]
    rows = []
    for record in records:
        of_start = record.phase == "start"
        values = [
            None if of_start and not name.startswith("validation_") else getattr(record, name)
            for name, _, _ in measured
        ]
        cells = ["" if value is None else form(value) for value, (_, _, form) in zip(values, measured, strict=True)]
        rows.append(("start" if of_start else str(record.round), cells))
    return {"heads": [label for _, label, _ in measured], "rows": rows}


def settings_rows(config: RunConfig) -> list[dict[str, str]]:
    """List every setting with its value and default, as dictionaries of `key`, `value` and `default`."""
    defaults = flatten(RunConfig().to_table())
    values = flatten(config.to_table())
    return [
        {"key": key, "value": _setting(value), "default": _setting(defaults.get(key, ""))}
        for key, value in values.items()
    ]


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return delta_text(value) if 0 < value < 1e-3 and math.isfinite(value) else f"{value:g}"
    return str(value)


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List environment.json as label and text."""
    rows = [
        ("Machine", f"{environment['system']}, {environment['cores']} cores" if "system" in environment else None),
        ("Accelerators", ", ".join(environment.get("accelerators", [])) or None),
        ("Python", environment.get("python")),
        *environment.get("packages", {}).items(),
        ("Commit", environment.get("commit")),
    ]
    return [(label, str(value)) for label, value in rows if value]


def phase_rows(run: Run) -> list[tuple[str, str]]:
    """List what each phase does and came to. What those with noise cost, where that is no guarantee, stands first."""
    rows = []
    for phase in run.phases:
        came_to = "not ended"
        if phase.ended:
            loss = number_text(phase.ended["validation_loss"])
            came_to = f"{duration_text(phase.ended['seconds'])}, validation loss {loss}"
        kind = "with noise" if phase.steps else "without noise"
        rows.append((f"Phase {phase.name}", f"{kind}, {phase.text} texts: {came_to}"))
    guarantee = run.guarantee or {}
    if guarantee.get("kind") != "record" and guarantee.get("noise_epsilon"):
        alone = f"{epsilon_text(guarantee['noise_epsilon'])}; no guarantee of the run"
        rows.insert(0, ("ε of the private phases alone", alone))
    return rows


@dataclass(frozen=True)
class ClassRow:
    """A class in words: its name, its records in the test set, and three shares ("" where there is none)."""

    name: str
    records: int
    recall: str
    precision: str
    f1: str


@dataclass(frozen=True)
class Classes:
    """All classes of a test set.

    Attributes:
        rows: of every class, the worst recognised first.
        names: in the order of the matrix.
        matrix: records by class (row) and answer (column), with their share of the row; empty where it is too large.
        held_out: the same matrix as held-out units gave it with noise, in units; empty where none was asked.
        confusions: (class, answer, records) of the most frequent mistakes.
        held_out_within: half the width of the 95 % interval around each of its cells.
    """

    macro_f1: str
    rows: list[ClassRow]
    names: list[str]
    matrix: list[tuple[str, list[tuple[int, float]]]]
    held_out: list[tuple[str, list[tuple[int, float]]]]
    confusions: list[tuple[str, str, int]]
    held_out_within: float


def classes(run: Run) -> Classes | None:
    """Read the classes in results.json; None where it has none, or none that fit."""
    results: dict[str, Any] = run.results or {}
    names, found = results.get("label_names"), results.get("test_confusion")
    if not names or not isinstance(found, list) or [len(row) for row in found] != [len(names)] * len(names):
        return None
    every = zip(names, found, recalls(found), precisions(found), f1_scores(found), strict=True)
    rated = sorted(every, key=lambda each: 1.0 if each[2] is None else each[2])
    rows = [ClassRow(str(name), sum(row), *map(_share, shares)) for name, row, *shares in rated]
    mistakes = [
        (str(names[i]), str(names[j]), count)
        for i, row in enumerate(found)
        for j, count in enumerate(row)
        if i != j and count
    ]
    mistakes.sort(key=lambda mistake: -mistake[2])
    macro, called = run.result("test_macro_f1"), list(map(str, names))
    held_out, within = results.get("validation_confusion", []), run.result("validation_confusion_within") or 0.0
    matrices = (_drawn(called, found), _drawn(called, held_out))
    return Classes(_share(macro), rows, called, *matrices, mistakes[:MOST_CONFUSIONS], within)


def _drawn(names: Sequence[str], matrix: Sequence[Sequence[int]]) -> list[tuple[str, list[tuple[int, float]]]]:
    """The cells of a matrix with their share of the row; none of a matrix that is too large, or not there."""
    if len(names) > MOST_DRAWN:
        return []
    shares = [[(count, count / (sum(row) or 1)) for count in row] for row in matrix]
    return list(zip(names, shares, strict=False))


def _share(value: float | None) -> str:
    return "" if value is None else percent_text(value)
