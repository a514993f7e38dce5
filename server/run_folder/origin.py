"""The start of a run as it was noted in ``origin.json``, and what of it is different now."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from privacy import durable
from privacy.errors import CorruptRun
from server.config.load import ConfigError, flatten, parse
from server.config.schema import RunConfig
from server.run_folder.errors import CannotResume
from server.run_folder.names import DATA_FILE, ORIGIN_FILE, SAMPLING_SECRET
from server.run_folder.provenance import code_version, differences
from server.run_folder.seal import STARTED, write_seal

_NAMED = 8

FREE = (
    "output",
    "data.cache",
    "engine.kind",
    "engine.workers",
    "engine.round-timeout",
    "engine.prefix-cache-mb",
    "engine.device",
    "engine.checkpoint-blocks",
    "engine.ray-address",
    "evaluation.rouge-records",
    "evaluation.rouge-tokens",
    "evaluation.examples",
)
"""Settings that may differ when a run is resumed: they change where and how fast it trains and what is measured at its
end, and not what it releases."""

Tables = Sequence[Mapping[str, Any]]


def write_origin(run_folder: Path, config: RunConfig, data: str, phases: Tables = ()) -> None:
    """Note what a run starts with: settings, prepared data set (the name of its folder is a digest), code.

    ``phases`` are those of a run in phases, see :meth:`server.runs.phase_config.PhasesConfig.phase_tables`.

    Raises:
        ConfigError: the folder has another run's secret, with which this run would draw the same cohorts.
    """
    if (run_folder / SAMPLING_SECRET).exists():
        raise ConfigError(
            f"{run_folder} holds the {SAMPLING_SECRET} of another run: two runs that draw the same cohorts spend more "
            "than their budgets add up to; start in an empty folder"
        )
    code = code_version(config, methods_of(phases))
    origin = {"format": 2, "config": config.to_table(), "code": code, "phases": list(phases)}
    durable.write(run_folder / DATA_FILE, data + "\n", mode=0o600)
    durable.write(run_folder / ORIGIN_FILE, json.dumps(origin, indent=1) + "\n")
    write_seal(run_folder, STARTED)


def check_origin(
    run_folder: Path, config: RunConfig, *, data: str | None = None, other_code: bool = False, phases: Tables = ()
) -> list[str]:
    """Compare settings, data set and code of now with those that the run was started with.

    Args:
        data: name of the prepared data set; None does not compare it.
        other_code: accept that the code has changed.
        phases: tables of a run in phases.

    Returns:
        what of the code is different, in words.

    Raises:
        CannotResume: something else than :data:`FREE` settings is different, or the code without ``other_code``.
        CorruptRun: origin.json is not what a run writes.
    """
    for name in (ORIGIN_FILE, DATA_FILE):
        if not (run_folder / name).is_file():
            raise CannotResume(
                f"{run_folder / name} is missing, which tells whether it goes on as the same run; restore it"
            )
    origin = _read_origin(run_folder / ORIGIN_FILE)
    changes = differences(origin["code"], code_version(config, methods_of(phases)))
    if changes and not other_code:
        raise CannotResume(
            f"the run was started with other code: {_listed(changes)}. Go back to that code, or say that the change is "
            "meant (lacquer resume --other-code): the ledger still refuses what was not committed to, and the report "
            "will name the change"
        )
    if wrong := _changed_settings(origin, config, phases):
        raise CannotResume(f"the settings are not those the run was started with: {_listed(wrong)}; put them back")
    if data is not None and data != (run_folder / DATA_FILE).read_text(encoding="utf-8").strip():
        raise CannotResume(
            "the data set is not the one the run was started with: its source, its tokenizer or the code that prepares "
            "it has changed; put it back"
        )
    return changes


def changed_settings(run_folder: Path, config: RunConfig, phases: Tables = ()) -> str:
    """Settings that are not as the run in a folder was started, in words; "" if it is the same run.

    Raises:
        CannotResume, CorruptRun: origin.json cannot be read.
    """
    return _listed(_changed_settings(_read_origin(run_folder / ORIGIN_FILE), config, phases))


def check_settings(run_folder: Path, config: RunConfig, file: Path) -> None:
    """Compare the settings in ``file`` with those that the run was started with, where it has noted them.

    Raises:
        CorruptRun: a setting is different that decides what is released, or origin.json cannot be read.
    """
    if not (run_folder / ORIGIN_FILE).is_file():
        return
    try:
        origin = _read_origin(run_folder / ORIGIN_FILE)
    except CannotResume as error:
        raise CorruptRun(f"{error}; restore it, or use the version that made the run") from error
    if wrong := _changed_settings(origin, config, origin.get("phases", [])):
        raise CorruptRun(f"{file} is not as the run was started: {_listed(wrong)} by {ORIGIN_FILE}; restore it")


def _read_origin(path: Path) -> dict[str, Any]:
    try:
        origin = json.loads(path.read_text(encoding="utf-8"))
        return {**origin, "config": flatten(parse(origin["config"]).to_table()), "code": dict(origin["code"])}
    except ConfigError as error:
        said = "; ".join(str(error).splitlines())
        raise CannotResume(f"{path}: this code does not know the settings the run was started with: {said}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CorruptRun(f"{path} cannot be read: {error}; restore it") from error


def _changed_settings(origin: Mapping[str, Any], config: RunConfig, phases: Tables) -> list[str]:
    before, now = origin["config"], flatten(config.to_table())
    changed = [
        f"{key} is {now.get(key)!r}, it was {before.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in FREE and before.get(key) != now.get(key)
    ]
    return changed if origin.get("phases", []) == list(phases) else [*changed, "the phases are not the same"]


def methods_of(phases: Tables) -> list[str]:
    """The names of the methods in a run's private phases."""
    return [phase[key] for phase in phases for key in ("controller", "optimizer") if phase["kind"] == "private"]


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return "; ".join(items[:_NAMED]) + more
