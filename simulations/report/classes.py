"""How a classifier does on each class of the test set: recall, precision, F1, and what it takes for what."""

from dataclasses import dataclass
from typing import Any

from client.models.confusion import f1_scores, precisions, recalls
from simulations.report.notation import percent_text
from simulations.report.read_run import Run

MOST_DRAWN = 20
"""Up to so many classes is the confusion matrix shown whole."""

MOST_CONFUSIONS = 10


@dataclass(frozen=True)
class ClassRow:
    """One class in words: its name, its records in the test set, and three shares ("" where there is none)."""

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
        confusions: (class, answer, records) of the most frequent mistakes.
    """

    macro_f1: str
    rows: list[ClassRow]
    names: list[str]
    matrix: list[tuple[str, list[tuple[int, float]]]]
    confusions: list[tuple[str, str, int]]


def classes(run: Run) -> Classes | None:
    """What results.json says of the classes; None where it says nothing, or nothing that fits."""
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
    matrix = []
    if len(names) <= MOST_DRAWN:
        matrix = [
            (str(name), [(count, count / (sum(row) or 1)) for count in row])
            for name, row in zip(names, found, strict=True)
        ]
    macro = run.result("test_macro_f1")
    return Classes(_share(macro), rows, list(map(str, names)), matrix, mistakes[:MOST_CONFUSIONS])


def _share(value: float | None) -> str:
    return "" if value is None else percent_text(value)
