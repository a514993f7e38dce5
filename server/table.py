"""What the tables of a configuration are made of: kebab-case keys, no unknown ones, numbers within their limits."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

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
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=kebab, validate_by_alias=True, validate_by_name=False, strict=True
    )
