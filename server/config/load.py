"""The typed configuration of one run: read, checked, and refused in words.

A configuration is a tree of tables (TOML) or a flat mapping with dotted keys (Flower's ``run_config``); both forms
give the same :class:`RunConfig`, whose keys are in :mod:`server.config.tables`. An unknown key, a wrong type or a value
out of its range is refused with the key, the value, the limit and the nearest known key, before anything starts.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from client.settings import Options, explain, kebab
from server.config.schema import RunConfig

OLD_NAMES = {"silo": "site"}
"""Tables of older files, which are still read, and what they are called now."""


class ConfigError(ValueError):
    """A configuration that cannot be run; the message holds one line for every wrong key."""


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into one mapping with dotted keys; empty option tables vanish."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a mapping with dotted keys into nested tables; the inverse of :func:`flatten`.

    Raises:
        ConfigError: if a key is both a value and a table.
    """
    table: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, last = dotted.split(".")
        here = table
        for parent in parents:
            here = here.setdefault(parent, {})
            if not isinstance(here, dict):
                raise ConfigError(f"{dotted}: {parent} is a value, not a table")
        if isinstance(here.get(last), dict):
            raise ConfigError(f"{dotted} = {value!r}: {last} is a table, not a value")
        here[last] = value
    return table


def known_keys() -> list[str]:
    """All dotted keys of a configuration; a table of free options is named with a trailing dot."""
    keys: list[str] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            kind = field.annotation
            key = prefix + kebab(name)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                walk(kind, key + ".")
            else:
                keys.append(key + ("." if field.annotation == Options else ""))

    walk(RunConfig, "")
    return keys


def parse(table: Mapping[str, Any]) -> RunConfig:
    """Check a nested table of settings and return the configuration that it describes.

    Raises:
        ConfigError: naming every wrong key with its value, the limit and, for unknown keys, the nearest known one.
    """
    try:
        return RunConfig.model_validate(with_new_names(table), by_alias=True, by_name=False)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def read(path: Path) -> dict[str, Any]:
    """Read the nested table of settings in a TOML file.

    Raises:
        ConfigError: the file is missing, or is not TOML.
    """
    if not path.is_file():
        raise ConfigError(f"configuration file {path} does not exist")
    try:
        return with_new_names(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and check the configuration in a TOML file, with dotted-key overrides on top.

    Raises:
        ConfigError: if the file is missing, is not TOML, or holds a wrong setting.
    """
    return parse(with_overrides(read(path), overrides or {}))


def with_overrides(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a nested table in which the settings of dotted keys take the place of its own."""
    return _with(with_new_names(table), with_new_names(unflatten(overrides)))


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Name the tables of older settings, nested or with dotted keys, as they are named now.

    Raises:
        ConfigError: a table under both names.
    """
    heads = {name.partition(".")[0] for name in settings}
    if both := [old for old, new in OLD_NAMES.items() if old in heads and new in heads]:
        raise ConfigError(f"[{both[0]}] is an older name of [{OLD_NAMES[both[0]]}], and both are given; keep one")
    parts = ((name.partition("."), value) for name, value in settings.items())
    return {f"{OLD_NAMES.get(head, head)}{dot}{rest}": value for (head, dot, rest), value in parts}


def _with(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(table)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = _with(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = [name.rstrip(".") for name in known_keys()]
        tables = {name.rpartition(".")[0] for name in known} - {""}
        elsewhere = [name for name in known if name.rpartition(".")[2] == key]  # right, but for its table
        near = elsewhere[:1] or difflib.get_close_matches(key, [*known, *sorted(tables)], n=1, cutoff=0.5)
        return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    return explain(item)
