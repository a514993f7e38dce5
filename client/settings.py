"""The base of settings tables: kebab-case keys in files, no unknown ones, values of their type and limits.

A table stands where it is used, at the lowest module that reads it; :mod:`server.config.tables` composes them. A wider
table inherits from a narrower one, so that a setting is written down once: what a node is sent of ``[data]``
(:class:`client.data.spec.Reading`) is a part of what the server's host prepares.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CountOrAuto = Annotated[int, Field(ge=0)]


def _scalar(value: object) -> object:
    if not isinstance(value, str | int | float | bool):
        raise ValueError(f"must be a text, a number or a boolean, got {value!r}")
    return value


Options = dict[str, Annotated[str | int | float | bool, PlainValidator(_scalar)]]


def kebab(name: str) -> str:
    """The key that holds the field `name`."""
    return name.replace("_", "-")


class Table(BaseModel):
    """Settings that belong together; fields by name in Python and in messages, by key in files."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=kebab, validate_by_alias=True, validate_by_name=True, strict=True
    )

    @classmethod
    def of(cls, *tables: object, **values: Any) -> Self:
        """A table of these values, and for its other fields those that `tables` (or data classes) have by that name.

        Raises:
            ValueError: naming every wrong field with its value and the limit.
        """
        known = {name: value for table in tables for name, value in vars(table).items() if name in cls.model_fields}
        try:
            return cls.model_validate({**known, **values}, by_name=True, by_alias=False)
        except ValidationError as error:
            raise ValueError("\n".join(map(explain, error.errors()))) from None

    def replace(self, **changes: Any) -> Self:
        """Make a copy with these fields changed, and check it; ValueError as :meth:`of`."""
        return type(self).of(self, **changes)

    def to_json(self) -> str:
        """Canonical JSON: equal settings give equal text."""
        return json.dumps(self.model_dump(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read settings from the text of :meth:`to_json`; ValueError for anything else, in one line."""
        try:
            return cls.model_validate_json(text, by_name=True, by_alias=False)
        except ValidationError as error:
            raise ValueError(f"{cls.__name__}: {'; '.join(map(explain, error.errors()))}") from None


def explain(item: Any) -> str:
    """One of pydantic's errors in a line: the key, its value and what is wrong with it."""
    key = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key"
        case "missing":
            return f"{key}: must be given"
        case "model_type" | "dict_type":
            return f"{key} = {item['input']!r}: must be a table of settings"
        case "value_error":
            return f"{key}: {message}" if key else message
    return f"{key} = {item['input']!r}: {message[0].lower() + message[1:]}"


def state_folder() -> Path:
    """The folder in which this machine keeps, apart from accounts of budgets, how far each had got.

    ``$XDG_STATE_HOME/lacquer``, or ``~/.local/state/lacquer``; it must outlive restarts.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "lacquer"


def cache_folder() -> Path:
    """The folder for prepared data sets and unpacked models if no setting says where."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lacquer"
