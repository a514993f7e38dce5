"""Labels in their normal form, and the ids of their classes: what the server and every node must agree on.

Nothing here imports pyarrow, which no later message to a node shall pay.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from client.data.columns.normal_form import INTEGER, normal_form

NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")
_ABSENT = frozenset(("na", "n/a", "nan", "-nan", "null", "none", "#n/a", "<na>"))  # beside numbers; else it is a name


def count_missing(names: Sequence[str]) -> int:
    """Count the names in normal form that are missing: empty, or ``NA`` and the like where all others are numbers."""
    different = set(names) - {""}
    absent = {name for name in different if name.lower() in _ABSENT}
    if not all(NUMBER.fullmatch(name) for name in different - absent):
        absent = set()
    return sum(not name or name in absent for name in names)


def class_names(labels: Sequence[object], where: str) -> list[str]:
    """Names of the classes in the order of their ids: integers sort as numbers, other names as texts.

    `labels` is all labels of the source, held-out rows included; `where` opens the messages.

    Raises:
        ValueError: missing, negative or fractional labels, or a single class.
    """
    names = [normal_form(label) for label in labels]
    if absent := count_missing(names):
        raise _none(absent, len(names), where)
    classes = sorted(set(names))
    if len(classes) < 2:
        raise ValueError(f"{where}: there are {len(classes)} different labels; classification needs at least 2")
    if all(map(INTEGER.fullmatch, classes)):
        classes.sort(key=int)
        if classes[0].startswith("-"):
            raise ValueError(
                f"{where}: label {classes[0]} is negative; this looks like an unlabelled test file. If it is a class, "
                "give it a name"
            )
    elif all(map(NUMBER.fullmatch, classes)) and 2 * len(classes) > len(names):
        raise ValueError(
            f"{where}: labels must be integers or strings, got {len(classes)} different fractions in "
            f"{len(names)} rows ({classes[0]}, {classes[1]}, ...); is data.label-column the right column?"
        )
    return classes


def class_ids(labels: Sequence[object], names: Sequence[str], where: str) -> NDArray[np.int64]:
    """Ids of `labels` among the classes of the training data, int64 ``[n]``.

    Raises:
        ValueError: as :func:`class_names`, or a label that is none of `names`.
    """
    ids, unknown = match_labels(labels, names, where)
    if unknown:
        raise ValueError(
            f"{where}: labels {unknown[:5]} never occur in the training data, whose labels are {list(names[:20])}; are "
            "both files labelled the same way?"
        )
    return ids


def match_labels(labels: Sequence[object], names: Sequence[str], where: str) -> tuple[NDArray[np.int64], list[str]]:
    """Ids of `labels` among `names`, -1 for none, and the labels that are none of them."""
    known = {normal_form(name): number for number, name in enumerate(names)}
    found = [normal_form(label) for label in labels]
    if absent := found.count(""):
        raise _none(absent, len(found), where)
    return np.array([known.get(name, -1) for name in found], dtype=np.int64), sorted(set(found) - set(known))


def _none(absent: int, rows: int, where: str) -> ValueError:
    return ValueError(f"{where}: {absent} of {rows} rows have no label; remove them or fill them in")
