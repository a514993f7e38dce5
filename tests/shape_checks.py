"""The type checker of jaxtyping's import hook: annotated shapes are checked by beartype while tests run.

Only annotations that hold an array shape: the others are mypy's, and tests pass doubles where classes are named.
"""

import typing
from collections.abc import Callable

from beartype import beartype
from jaxtyping import AbstractArray


def check(function: Callable[..., object]) -> Callable[..., object]:
    """``function`` with its annotated shapes checked at every call."""
    shaped = {name: kind for name, kind in getattr(function, "__annotations__", {}).items() if _holds_shape(kind)}
    if not shaped:
        return function
    function.__annotations__ = shaped
    return beartype(function)


def _holds_shape(kind: object) -> bool:
    if isinstance(kind, type) and issubclass(kind, AbstractArray):
        return True
    return any(_holds_shape(part) for part in typing.get_args(kind))
