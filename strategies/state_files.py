"""A state as JSON and tensors, and back: frozen dataclasses, tuples, lists, dicts, tensors, numbers and texts.

Nothing is pickled and no class is imported for its name: a dataclass comes back only if the template that the run
itself made, or the annotations of its fields, name its class. A value of any other type is refused when it is packed,
which happens before round 1.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Json = Any


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    """The JSON form of ``value``; its tensors are put into ``tensors`` under dotted names that begin with ``path``.

    Raises:
        TypeError: something in ``value`` has no form here; the message says where.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors[path] = value
            return {"tensor": path}
        case tuple() | list():
            parts = [pack(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": parts}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: pack(item, f"{path}.{key}", tensors) for key, item in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: pack(getattr(value, field.name), f"{path}.{field.name}", tensors)
            for field in dataclasses.fields(value)
            if field.init
        }
        return {"dataclass": _name(type(value)), "fields": fields}
    raise TypeError(
        f"{path} cannot be kept in a checkpoint, it is a {type(value).__name__}; use numbers, texts, tensors, tuples, "
        "lists, dicts with texts as keys, and frozen dataclasses of them"
    )


def unpack(data: Json, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> Any:
    """The value that :func:`pack` took apart.

    Args:
        tensors: by the names of ``pack``.
        classes: those that may come back, see :func:`classes_of`.

    Raises:
        ValueError, KeyError, TypeError: the data is not what ``pack`` makes of such a value.
    """
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("a list that does not say what it is")
        return data
    match data:
        case {"tensor": name, **rest} if not rest:
            return tensors[name]
        case {"tuple": parts, **rest} if not rest:
            return tuple(unpack(part, tensors, classes) for part in parts)
        case {"list": parts, **rest} if not rest:
            return [unpack(part, tensors, classes) for part in parts]
        case {"dict": parts, **rest} if not rest:
            return {key: unpack(part, tensors, classes) for key, part in parts.items()}
        case {"dataclass": name, "fields": parts, **rest} if not rest:
            if name not in classes:
                raise ValueError(f"it holds a {name}, this run has {', '.join(sorted(classes))}")
            return classes[name](**{key: unpack(part, tensors, classes) for key, part in parts.items()})
        case _:
            raise ValueError(f"a value with the keys {sorted(data)}")


def classes_of(template: Any) -> dict[str, type]:
    """Find every dataclass, by name, that a value like ``template`` can hold: those in it, and those its annotations
    name.
    """
    found: dict[str, type] = {}
    waiting = list(_classes_in(template))
    while waiting:
        kind = waiting.pop()
        if _name(kind) not in found:
            found[_name(kind)] = kind
            waiting += _annotated(kind)
    return found


def same_bits(one: Any, other: Any) -> bool:
    """Whether two packable values are equal to the last bit, NaN and signed zeros included."""
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    forms = [pack(value, "", part) for value, part in zip((one, other), tensors, strict=True)]
    return repr(forms[0]) == repr(forms[1]) and all(
        mine.dtype == tensors[1][name].dtype
        and mine.shape == tensors[1][name].shape
        and torch.equal(_bytes(mine), _bytes(tensors[1][name]))
        for name, mine in tensors[0].items()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes_in(value: Any) -> Iterator[type]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _classes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _classes_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for field in dataclasses.fields(value):
            yield from _classes_in(getattr(value, field.name))


def _annotated(kind: type) -> list[type]:
    """Dataclasses among the annotations of a dataclass; none where an annotation names what cannot be found."""
    try:
        hints = list(typing.get_type_hints(kind).values())
    except NameError:
        return []
    classes = []
    while hints:
        hint = hints.pop()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            classes.append(hint)
        hints += typing.get_args(hint)
    return classes
