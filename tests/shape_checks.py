"""The type checker of jaxtyping's import hook: annotated shapes are checked by beartype while tests run.

Only annotations that hold an array shape: the others are mypy's, and tests pass doubles where classes are named. The
hook decorates every function and checks its arguments twice at every call, which took two fifths of the time of the
tests; :func:`sparing` leaves alone what has no shape to check, and checks the rest once.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray, config


def sparing(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """jaxtyping's decorator, for the hook to use, as it is for functions and dataclasses that name shapes."""

    def decorator(typechecker: object) -> Callable[[Any], Any]:
        def decorate(thing: Any) -> Any:
            if inspect.isfunction(thing):
                checked = check(thing)
                return thing if checked is thing else _switched(thing, jaxtyped(checked, typechecker=None))
            plain = inspect.isclass(thing) and not any(_named(kind) for kind in _annotations(thing))
            return thing if plain else jaxtyped(thing, typechecker=typechecker)

        return decorate

    return decorator


def _switched(plain: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (plain if config.jaxtyping_disable else checked)(*args, **kwargs)

    return function


def _annotations(thing: Any) -> list[object]:
    classes = thing.__mro__ if inspect.isclass(thing) else (thing,)
    return [kind for one in classes for kind in getattr(one, "__annotations__", {}).values()]


def _named(kind: object) -> bool:
    """Whether an annotation may hold a shape; one in quotes is looked at by its text."""
    return "[" in kind if isinstance(kind, str) else _holds_shape(kind)


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
