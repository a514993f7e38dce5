"""Every setting with its type, default, limits and meaning: for people, and as a JSON schema for editors.

The types and limits are those that pydantic checks; the meanings are the docstrings of the tables.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from client.settings import kebab
from server.config.schema import RunConfig

_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_LIMITS = (
    ("minimum", ">= {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "<= {}"),
    ("exclusiveMaximum", "< {}"),
)
_REFERENCE = re.compile(r":\w+:`~?([^`]*)`")


@dataclass(frozen=True)
class Setting:
    """One key of a configuration.

    Attributes:
        key: dotted.
        type: as people call it: text, number, integer, true or false, options.
        limits: range, or the values there are; "" for none.
        meaning: a sentence or more.
    """

    key: str
    type: str
    default: Any
    limits: str
    meaning: str

    @property
    def line(self) -> str:
        """The first sentence of the setting's meaning, without its full stop."""
        return re.split(r"(?<=[.;])\s", self.meaning, maxsplit=1)[0].rstrip(".;")


def settings() -> list[Setting]:
    """Every setting of a run, in the order of a configuration file."""
    schema = json_schema()
    return list(_settings(schema, schema["$defs"], ""))


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, each key described by its meaning."""
    schema = RunConfig.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "A run of Lacquer"
    for model in _models(RunConfig):
        table = schema if model is RunConfig else schema["$defs"][model.__name__]
        table["description"] = (inspect.getdoc(model) or "").partition("\n")[0]
        known = meanings(model)
        for name in model.model_fields:
            if name in known:
                table["properties"][kebab(name)]["description"] = known[name][0].upper() + known[name][1:]
    return schema


def meanings(model: type) -> dict[str, str]:
    """The meaning of each field of a settings table or method, from its docstring and those of its base classes."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        lines = (inspect.cleandoc(kind.__doc__) if kind.__doc__ else "").splitlines()
        start = lines.index("Attributes:") + 1 if "Attributes:" in lines else len(lines)
        names: list[str] = []
        for line in lines[start:]:
            if entry := _ENTRY.match(line):
                names = entry[1].split(", ")
                found |= dict.fromkeys(names, entry[2])
            elif line.startswith("        "):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            elif line.strip():
                break
    return {name: _plain(text) for name, text in found.items()}


def _plain(text: str) -> str:
    return _REFERENCE.sub(lambda match: match[1], text).replace("``", "").replace("`", "")


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _models(kind)


def _settings(table: dict[str, Any], known: dict[str, Any], prefix: str) -> Iterator[Setting]:
    for key, value in table["properties"].items():
        if "$ref" in value:
            yield from _settings(known[value["$ref"].rpartition("/")[2]], known, f"{prefix}{key}.")
        else:
            kind, limits = _type(value), _limits(value)
            yield Setting(prefix + key, kind, value.get("default"), limits, value.get("description", ""))


def _type(value: dict[str, Any]) -> str:
    names = {"string": "text", "boolean": "true or false", "object": "options"}
    kind = value.get("type", "string")
    return names.get(kind, str(kind))


def _limits(value: dict[str, Any]) -> str:
    if "enum" in value:
        return " | ".join(str(item) or '""' for item in value["enum"])
    if "const" in value:
        return str(value["const"])
    return ", ".join(form.format(f"{value[name]:g}") for name, form in _LIMITS if name in value)
