"""From a name and options in a configuration to an object: built-in methods and a user's own by the same road."""

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any

Option = str | int | float | bool


def build(key: str, table: Mapping[str, str], name: str, options: Mapping[str, Option]) -> Any:
    """The object that ``name`` stands for, made with ``options``.

    Args:
        key: the configuration key the name was given for; named in errors.
        table: built-in names and the ``"package.module:Object"`` each stands for.
        name: a built-in name, or ``"package.module:Object"``.
        options: keyword arguments with kebab-case names; an integer serves where a float is wanted.

    Raises:
        ValueError: unknown name or option, a value of the wrong type, or one the object itself refuses.
    """
    kind = _find(key, table, name)
    fields = {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    arguments: dict[str, Option] = {}
    for option, value in options.items():
        argument = option.replace("-", "_")
        if fields is not None and argument not in fields:
            near = difflib.get_close_matches(argument, fields, n=1)
            known = ", ".join(sorted(field.replace("_", "-") for field in fields)) or "none"
            hint = f"did you mean {near[0].replace('_', '-')}?" if near else f"its options are: {known}"
            raise ValueError(f"{key}-options.{option}: {name} has no such option; {hint}")
        arguments[argument] = value if fields is None else _typed(f"{key}-options.{option}", fields[argument], value)
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} = {name!r}: {error}") from error


def _find(key: str, table: Mapping[str, str], name: str) -> type[Any]:
    if name not in table and ":" not in name:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(table))}"
        raise ValueError(f"{key} = {name!r}: unknown; {hint} (or 'package.module:Object' for one of your own)")
    module, _, attribute = table.get(name, name).partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key} = {name!r}: cannot import it: {error}; is its folder on PYTHONPATH?") from error
    if not isinstance(found, type):
        raise ValueError(f"{key} = {name!r}: must name a class, found {type(found).__name__}")
    return found


def _typed(key: str, field: "dataclasses.Field[Any]", value: Option) -> Option:
    wanted = field.type
    if wanted is float and type(value) is int:
        return float(value)
    if isinstance(wanted, type) and type(value) is not wanted:
        raise ValueError(f"{key} must be a {wanted.__name__}, got {value!r}")
    return value
