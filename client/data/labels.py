"""Labels as sources spell them, and the ids of their classes: what the server and every node must agree on.

The names of the classes are as the server's source spells them. A node's file, or a test file, may be of another
format: the label ``1`` of a parquet file is ``1`` or ``1.0`` in a CSV file, ``true`` may be ``True``. But ``038`` is
a code and not the number 38. Nothing here imports pyarrow, which no later message to a node shall pay.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

INTEGER = re.compile(r"\s*(-?(?:0|[1-9][0-9]{0,17}))(?:\.0*)?\s*")
"""How a text spells an integer; with leading zeros it is a code, and stays a text."""

_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")
_ABSENT = frozenset(("na", "n/a", "nan", "-nan", "null", "none", "#n/a", "<na>"))  # beside numbers; else it is a name


def missing(values: Sequence[Any]) -> int:
    """How many values are missing: none, not a number, blank, or ``NA`` and the like where all others are numbers."""
    absent = sum(map(_blank, values))
    texts = {value.strip() for value in values if isinstance(value, str) and value.strip()}
    named = {text for text in texts if text.lower() in _ABSENT}
    if not named or not all(_NUMBER.fullmatch(text) for text in texts - named):
        return absent
    return absent + sum(isinstance(value, str) and value.strip() in named for value in values)


def _blank(value: Any) -> bool:
    return value is None or bool(value != value) or (isinstance(value, str) and not value.strip())


def class_names(labels: list[Any], where: str) -> list[str]:
    """Names of the classes in the order of their ids: integers sort as numbers, strings as strings.

    `labels` is all labels of the source, held-out rows included; `where` opens the messages.

    Raises:
        ValueError: missing, negative, fractional or mixed labels, or a single class.
    """
    absent = missing(labels)
    if absent:
        raise _none(absent, len(labels), where)
    classes = sorted(set(_clean(labels, where)))
    if len(classes) < 2:
        raise ValueError(f"{where}: there are {len(classes)} different labels; classification needs at least 2")
    if _fractions(classes) and 2 * len(classes) > len(labels):
        raise ValueError(
            f"{where}: labels must be integers or strings, got {len(classes)} different fractions in "
            f"{len(labels)} rows ({classes[0]}, {classes[1]}, ...); is data.label-column the right column?"
        )
    return [str(value) for value in classes]


def class_ids(labels: list[Any], names: Sequence[str], where: str) -> NDArray[np.int64]:
    """Ids of `labels` among the classes of the training data, int64 ``[n]``.

    Raises:
        ValueError: as :func:`class_names`, or a label that is none of `names`.
    """
    ids, unknown = matched(labels, names, where)
    if unknown:
        raise ValueError(
            f"{where}: labels {unknown[:5]} never occur in the training data, whose labels are {list(names[:20])}; are "
            "both files labelled the same way?"
        )
    return ids


def matched(labels: list[Any], names: Sequence[str], where: str) -> tuple[NDArray[np.int64], list[str]]:
    """Ids of `labels` among `names`, -1 for none, and the labels that are none of them."""
    exact = {name: number for number, name in enumerate(names)}
    alike: dict[str, list[int]] = {}
    for name, number in exact.items():
        alike.setdefault(_spelled(name), []).append(number)
    texts = [str(value) for value in _clean(labels, where)]
    ids = {}
    for text in set(texts):
        near = [exact[text]] if text in exact else alike.get(_spelled(text), [])
        ids[text] = near[0] if len(near) == 1 else -1
    unknown = sorted(text for text, number in ids.items() if number < 0)
    return np.array([ids[text] for text in texts], dtype=np.int64), unknown


def _spelled(text: str) -> str:
    """What the spellings of one label have in common."""
    integer = INTEGER.fullmatch(text)
    if integer:
        return integer[1]
    return text.lower() if text.lower() in ("true", "false") else text


def _clean(labels: list[Any], where: str) -> list[Any]:
    """All integers or all strings; blanks around a string belong to the file and not to the label."""
    absent = sum(map(_blank, labels))
    if absent:
        raise _none(absent, len(labels), where)
    kinds = {type(value) for value in labels}
    if kinds <= {str}:
        return [label.strip() for label in labels]
    if kinds == {bool}:
        return [str(value).lower() for value in labels]
    if kinds <= {int, bool, float} and all(float(value).is_integer() for value in labels):
        integers = [int(value) for value in labels]
        if min(integers) < 0:
            raise ValueError(f"{where}: label {min(integers)} is negative; this looks like an unlabelled test file")
        return integers
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(
        f"{where}: labels must be integers or strings, got {names}; is data.label-column the right column?"
    )


def _fractions(classes: list[Any]) -> bool:
    return all(isinstance(value, str) and _NUMBER.fullmatch(value) for value in classes) and any(
        not float(value).is_integer() for value in classes
    )


def _none(absent: int, rows: int, where: str) -> ValueError:
    return ValueError(f"{where}: {absent} of {rows} rows have no label; remove them or fill them in")
