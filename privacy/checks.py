"""One-line validators of arguments and settings.

Every message names the argument, the limit, the value given and, when known, the remedy.

Values are passed by keyword so that the message can name them: ``positive(noise_multiplier=z)``. All raise ValueError.
Never pass a private value (a norm, a loss, a count of units): messages end up in logs.
"""

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from numbers import Integral, Real


def _fail(name: str, requirement: str, value: object, remedy: str) -> None:
    raise ValueError(f"{name} must be {requirement}, got {value!r}" + (f"; {remedy}" if remedy else ""))


def _number(value: object) -> float:
    """The value as a float; NaN for anything that is not a real number, so that every comparison below refuses it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    return float(value)


def finite(*, remedy: str = "", **values: float) -> None:
    """Every value is a finite real number."""
    for name, value in values.items():
        if not math.isfinite(_number(value)):
            _fail(name, "a finite number", value, remedy)


def positive(*, remedy: str = "", **values: float) -> None:
    """Every value is finite and > 0."""
    for name, value in values.items():
        if not 0 < _number(value) < math.inf:
            _fail(name, "> 0 and finite", value, remedy)


def non_negative(*, remedy: str = "", **values: float) -> None:
    """Every value is finite and >= 0."""
    for name, value in values.items():
        if not 0 <= _number(value) < math.inf:
            _fail(name, ">= 0 and finite", value, remedy)


def probability(*, remedy: str = "", **values: float) -> None:
    """Every value lies in (0, 1]: something that must be able to happen."""
    for name, value in values.items():
        if not 0 < _number(value) <= 1:
            _fail(name, "in (0, 1]", value, remedy)


def fraction(*, remedy: str = "", **values: float) -> None:
    """Every value lies in [0, 1]."""
    for name, value in values.items():
        if not 0 <= _number(value) <= 1:
            _fail(name, "in [0, 1]", value, remedy)


def within(low: float, high: float, /, *, remedy: str = "", **values: float) -> None:
    """Every value lies in [low, high]."""
    for name, value in values.items():
        if not low <= _number(value) <= high:
            _fail(name, f"in [{low!r}, {high!r}]", value, remedy)


def integer_at_least(minimum: int, /, *, remedy: str = "", **values: object) -> None:
    """Every value is an integer (not a bool, not a float that happens to be whole) and >= minimum."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
            _fail(name, f"an integer >= {minimum}", value, remedy)


def one_of(allowed: Collection[object], /, *, remedy: str = "", **values: object) -> None:
    """Every value is one of the allowed ones."""
    for name, value in values.items():
        if value not in allowed:
            _fail(name, f"one of {', '.join(repr(item) for item in allowed)}", value, remedy)


def not_empty(*, remedy: str = "", **values: Collection[object]) -> None:
    """Every collection has at least one element."""
    for name, value in values.items():
        if len(value) == 0:
            _fail(name, "non-empty", value, remedy)


def strictly_increasing(*, remedy: str = "", **values: Sequence[float]) -> None:
    """Every sequence is non-empty, finite and strictly increasing."""
    for name, value in values.items():
        numbers = [_number(item) for item in value]
        ordered = all(low < high for low, high in pairwise(numbers))
        if not numbers or not ordered or not all(map(math.isfinite, numbers)):
            _fail(name, "non-empty, finite and strictly increasing", value, remedy)


def same_length(*, remedy: str = "", **values: Sequence[object]) -> None:
    """All sequences have one length."""
    lengths = {name: len(value) for name, value in values.items()}
    if len(set(lengths.values())) > 1:
        _fail(" and ".join(lengths), "of the same length", tuple(lengths.values()), remedy)
