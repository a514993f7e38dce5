"""The file of a sweep: named variants, grids of them over axes and seeds, and the cells these make.

    name = "controllers"
    [settings]                        # laid over every base: dotted keys or tables
    rounds = 100
    [variants.fixed]                  # what makes a variant, laid over that
    strategy.controller = "fixed"
    [variants.floor]
    kind = "public-only"              # no client takes part, see simulations/engines/public_only.py
    [[grids]]
    name = "default"
    base = "compare-sst2"             # a preset, or a TOML file beside the sweep's file
    variants = ["fixed", "floor"]
    seeds = [0, 1, 2]
    settings = { local.epochs = 2 }   # laid over the variants
    axes = { "privacy.epsilon" = [2.0, 8.0] }

A grid's cells are its variants times the values of its axes times its seeds, seed by seed, so that a sweep that is cut
short has compared everything on fewer seeds. What is laid over later wins; an option table is laid over key by key.
"""

import difflib
import hashlib
import itertools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from server.config.load import OLD_NAMES, ConfigError, flatten, parse, read, unflatten, with_new_names
from server.config.schema import RunConfig
from simulations.presets.asked import Asked, count_clients
from simulations.presets.load import absolute_paths, find
from simulations.report.notation import number_text

CELL_FILE, USAGE_FILE = "cell.json", "usage.json"
CELL_MODULE = "simulations.sweep.child"
"""In the run folder of a cell: which cell it is, and what it took."""

SWEEPS = Path(__file__).resolve().parents[1] / "presets" / "sweeps"
Kind = Literal["run", "public-only", "site"]
Scalar = str | int | float | bool

Dotted = Annotated[dict[str, Scalar], BeforeValidator(lambda table: flatten(table))]
Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class _Grid(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name: Name
    base: str
    variants: list[str] = Field(min_length=1)
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    settings: Dotted = {}
    axes: Annotated[dict[str, list[Scalar]], BeforeValidator(lambda table: flatten(table))] = {}


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name: Name
    settings: Dotted = {}
    variants: dict[Name, Dotted]
    grids: list[_Grid] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """A cell of a sweep: one run.

    Attributes:
        key: its name in the sweep and its folder, ``grid/variant/axis=value/seed=n``.
        grid, variant, axes: where it stands; axes as ``(dotted key, value)``.
        kind: a federated run, one at record level (as set), or training on the server's public records alone.
        config: resolved, with absolute paths; its ``output`` is the caller's to set.
        digest: of everything that decides its outcome, see :func:`digest`.
    """

    key: str
    grid: str
    variant: str
    axes: tuple[tuple[str, Scalar], ...]
    kind: Kind
    config: RunConfig
    digest: str = field(repr=False)


def sweep_files() -> dict[str, Path]:
    """The sweeps that come with Lacquer, by name."""
    return {file.stem: file for file in sorted(SWEEPS.glob("*.toml"))}


def read_cells(path: Path, data: Path) -> tuple[str, list[Cell]]:
    """Read name and cells of a sweep; relative data files are looked for in `data`.

    Raises:
        ConfigError: naming what is wrong with the file or with a cell's settings.
    """
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ConfigError("\n".join(f"{path.name}: {line}" for line in wrong)) from None
    cells = [cell for grid in file.grids for cell in _cells(file, grid, path, data)]
    keys = [cell.key for cell in cells]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"{path.name}: these cells occur twice, rename a grid: {', '.join(twice)}")
    return file.name, cells


def _cells(file: _File, grid: _Grid, path: Path, data: Path) -> Iterator[Cell]:
    beside = path.parent / grid.base
    base_path = beside if beside.is_file() else find(grid.base)
    try:
        base = flatten(read(base_path))
    except ConfigError as error:
        raise ConfigError(f"{path.name}: base {error}") from None
    problems: list[str] = []
    values = [[(key, value) for value in options] for key, options in grid.axes.items()]
    for seed, axes, variant in itertools.product(grid.seeds, itertools.product(*values), grid.variants):
        if variant not in file.variants:
            near = difflib.get_close_matches(variant, file.variants, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path.name}: grid {grid.name} names the variant {variant!r}, which is not there{hint}")
        own = dict(file.variants[variant])
        if (kind := own.pop("kind", "run")) not in get_args(Kind):
            raise ConfigError(f"{path.name}: variants.{variant}.kind = {kind!r}: must be one of {get_args(Kind)}")
        key = "/".join([grid.name, variant, *(axis_text(*axis) for axis in axes), f"seed={seed}"])
        given = map(with_new_names, (file.settings, own, grid.settings, dict(axes)))
        layers = {**base, **reduce(or_, given), "seed": seed}
        layers |= {"name": f"{file.name}-{grid.name}-{variant}", "engine.kind": "inprocess", "engine.workers": 1}
        try:
            config = absolute_paths(parse(unflatten(layers)), data)
        except ConfigError as error:
            problems += [line for line in f"{grid.name}/{variant}: {error}".splitlines() if line not in problems]
            continue
        if kind == "run" and config.is_single_site:
            kind = "site"
        yield Cell(key, grid.name, variant, axes, cast(Kind, kind), config, digest(config, cast(Kind, kind)))
    if problems:
        raise ConfigError("\n".join(f"{path.name}: {line}" for line in problems))


def axis_text(key: str, value: Scalar) -> str:
    """The text of an axis: ``privacy.epsilon``, 2.0 as "epsilon=2"."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{key.rpartition('.')[2]}={number_text(value) if number else value}"  # type: ignore[arg-type]


def digest(config: RunConfig, kind: Kind) -> str:
    """The SHA-256, shortened, of what decides a cell's outcome in distribution.

    Names and places are left out (of a data file and an adapter the last two parts stay, of a model's folder the last),
    so that it is the same on every machine; so are settings at their default, so that it stays the same when a new
    setting joins.
    """
    flat = flatten(config.to_table())
    for key in ("name", "output", "data.cache", "engine.workers", "engine.kind", "privacy.account"):
        flat.pop(key)
    for key in ("data.source", "data.validation-source", "data.test-source"):
        kind_of_file, colon, place = str(flat[key]).partition(":")
        flat[key] = kind_of_file + colon + "/".join(Path(place).parts[-2:])
    for key, parts in (("model.name", 1), ("model.adapter", 2)):
        path = Path(str(flat[key]))
        flat[key] = "/".join(path.parts[-parts:]) if path.is_absolute() else str(flat[key])
    default = flatten(RunConfig().to_table())
    own = {_old_name(key): value for key, value in flat.items() if value != default.get(key)}
    text = repr(sorted({**own, "kind": _old_name(kind)}.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _old_name(key: str) -> str:
    """A key as it was first called, so that cells of earlier versions count as done and nothing is paid for twice."""
    head, dot, rest = key.partition(".")
    return next((old for old, new in OLD_NAMES.items() if new == head), head) + dot + rest


def count_cell(cell: Cell) -> Cell:
    """A cell with its clients counted, where its data say how many (``clients = 0``); its digest stays."""
    return replace(cell, config=count_clients(Asked(cell.config)).run)


def choose_cells(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The cells whose key a pattern matches, as in a shell; a pattern also matches the beginning of a key.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    if not patterns:
        return list(cells)
    matched = {pattern: [c for c in cells if fnmatchcase(c.key, pattern) or fnmatchcase(c.key, f"{pattern}/*")]
               for pattern in patterns}  # fmt: skip
    for pattern, found in matched.items():
        if not found:
            raise ConfigError(f"--only {pattern}: matches no cell; keys look like {cells[0].key} (see --dry-run)")
    wanted = {cell.key for found in matched.values() for cell in found}
    return [cell for cell in cells if cell.key in wanted]
