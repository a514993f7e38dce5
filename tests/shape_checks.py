"""The type checker of jaxtyping's import hook: annotated shapes are checked by beartype while tests run.

Only annotations that hold an array shape: the others are mypy's, and tests pass doubles where classes are named. The
hook decorates every function and checks its arguments twice at every call, which took two fifths of the time of the
tests; :func:`sparing` leaves alone what has no shape to check, and checks the rest once for the same shapes: an answer
depends on nothing else.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from beartype import beartype
from jaxtyping import AbstractArray, config


def sparing(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """jaxtyping's decorator, for the hook to use, as it is for functions and dataclasses that name shapes."""

    def decorator(typechecker: object) -> Callable[[Any], Any]:
        def decorate(thing: Any) -> Any:
            if inspect.isfunction(thing):
                checked = check(thing)
                return thing if checked is thing else _switched(thing, jaxtyped(checked, typechecker=None), jaxtyped)
            plain = inspect.isclass(thing) and not any(_named(kind) for kind in _annotations(thing))
            return thing if plain else jaxtyped(thing, typechecker=typechecker)

        return decorate

    return decorator


def _switched(
    plain: Callable[..., Any], checked: Callable[..., Any], jaxtyped: Callable[..., Any]
) -> Callable[..., Any]:
    parameters = inspect.signature(plain).parameters.values()
    shaped = [(at, each.name) for at, each in enumerate(parameters) if each.name in plain.__annotations__]
    fixed = all(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)
    fixed = fixed and "..." not in repr(
        plain.__annotations__
    )  # of many values beartype looks at one, another each time
    returns = "return" in plain.__annotations__
    passed: dict[object, set[object]] = {}  # shapes of arguments, and of what came back for them

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return plain(*args, **kwargs)
        given = tuple(_shape(args[at] if at < len(args) else kwargs.get(name)) for at, name in shaped)
        if not fixed or UNKNOWN in given:
            return checked(*args, **kwargs)
        known = passed.get(given)
        result = checked(*args, **kwargs) if known is None else plain(*args, **kwargs)
        returned = _shape(result) if returns else None
        if known is not None and returned not in known:
            _check_result(plain, jaxtyped, result, args, kwargs)
        if returned is not UNKNOWN:
            passed.setdefault(given, set()).add(returned)
        return result

    return function


def _check_result(function: Any, jaxtyped: Any, result: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As if ``function`` had been called once more and come to the same."""

    @functools.wraps(function)
    def same(*_: Any, **__: Any) -> object:
        return result

    jaxtyped(beartype(same), typechecker=None)(*args, **kwargs)


UNKNOWN = object()
"""What is checked at every call."""


def _shape(value: object) -> object:
    """All of ``value`` that a shape in an annotation is compared with."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), value.dtype, tuple(value.shape)
    if type(value) is tuple:
        parts = tuple(_shape(part) for part in value)
        return UNKNOWN if UNKNOWN in parts else parts
    return None if value is None else UNKNOWN


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
