"""A recipe's file: the tables of a run, and ``[[phases]]``.

[privacy]            # unit = "record" or "group"; epsilon and delta of all private phases together
[model]  [data]      # as in any run; data.detector is the policy of phases that name none

[[phases]]
kind = "ordinary"    # or "private"
name = "redacted"
text = "redacted"    # or "original", "weighted"
...                  # the attributes of server.recipe.Ordinary or Private, in kebab-case
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config import ConfigError, RunConfig, flatten, parse, unflatten
from server.recipe import Phase, Recipe
from strategies.plugins import build

KINDS = {"ordinary": "server.recipe:Ordinary", "private": "server.recipe:Private"}

_ONE_SILO = {"clients": 1, "sampling-rate": 1.0}


@dataclass(frozen=True)
class RecipeConfig:
    """A recipe with the data and the model it is for."""

    run: RunConfig
    recipe: Recipe


def load_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> RecipeConfig:
    """Read a recipe's file, with dotted keys of the run's tables on top.

    Raises:
        ConfigError: naming what is wrong and what to do.
    """
    if not path.is_file():
        raise ConfigError(f"recipe file {path} does not exist")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return parse_recipe(table, overrides)


def parse_recipe(table: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RecipeConfig:
    """The same from a nested table."""
    phases = table.get("phases")
    if not isinstance(phases, list) or not phases or not all(isinstance(phase, Mapping) for phase in phases):
        raise ConfigError("a recipe needs [[phases]], tables with kind = 'ordinary' or 'private'; there are none")
    base = {key: value for key, value in table.items() if key != "phases"}
    flat = {"privacy.unit": "record", **flatten(base), **_ONE_SILO, **(overrides or {})}
    run = parse(unflatten(flat))
    if not run.alone:
        raise ConfigError(
            f"privacy.unit = {run.privacy.unit!r}, clients = {run.clients}: a recipe trains one silo, whose records "
            "are protected; set privacy.unit to 'record' or 'group' and clients = 1"
        )
    if run.data.sensitive != "none":
        raise ConfigError("data.sensitive must be left out of a recipe; every phase says what text it reads")
    made = tuple(_phase(number, phase) for number, phase in enumerate(phases, start=1))
    try:
        recipe = Recipe(
            phases=made,
            epsilon=run.privacy.epsilon,
            delta=run.privacy.delta,
            unit=run.unit,
            detector=run.data.detector,
            seed=run.seed,
            records_per_unit=run.silo.records_per_unit,
            combine=run.silo.combine,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RecipeConfig(run, recipe)


def _phase(number: int, table: Mapping[str, Any]) -> Phase:
    options = {key: value for key, value in table.items() if key != "kind"}
    options.setdefault("name", f"phase {number}")
    nested = {key for key in options if key in ("controller-options", "optimizer-options")}
    for key in nested:
        if not isinstance(options[key], Mapping):
            raise ConfigError(f"phases[{number}].{key} must be a table of options")
    try:
        phase: Phase = build(f"phases[{number}].kind", KINDS, str(table.get("kind", "")), options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return phase
