"""Resuming an interrupted run: what must be the same as at its start, and where it stood.

``origin.json`` is written before the ledger and tells what the run was started with. The rules, each with the reason it
is not left to the user:

- the settings that decide what is released are those of the start: the ledger's commitment was computed from them;
- the ledger's chain is whole and holds the line the checkpoint saw: a shorter one would spend the same budget twice;
- the secret that draws cohorts is there: a fresh one would give whoever can break a run off a choice between cohorts;
- the code is that of the start, unless the caller says that a change is meant. The ledger's rules hold either way;
- nobody else holds the ledger, and the run has not ended.

Each time a run is resumed adds a line to ``resumed.jsonl``, for the report.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privacy import durable
from privacy.commitment import Commitment
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, flatten, load, parse
from server.config.schema import RunConfig
from server.run_folder.checkpoint import checkpoint_folder, ledger_head
from server.run_folder.errors import CannotResume
from server.run_folder.names import (
    CONFIG_FILE,
    DATA_FILE,
    LEDGER_FILE,
    ORIGIN_FILE,
    PHASES_FILE,
    RESULTS_FILE,
    RESUMES_FILE,
    SAMPLING_SECRET,
    SITES_FILE,
)
from server.run_folder.progress import owned
from server.run_folder.provenance import code_version, differences
from server.run_folder.telemetry import read_status


def check_same_run(
    config: RunConfig, data: str, commitment: Commitment, folder: Path, ledger: Ledger, other_code: bool
) -> list[str]:
    """What of the code is different, in words; CannotResume or CorruptRun if it cannot be the same run."""
    changes = check_origin(folder, config, data=data, other_code=other_code)
    check_secret(folder, config, ledger)
    if ledger.commitment != commitment:
        raise CannotResume(
            "the settings now give another commitment than the ledger's first line, so the code that calibrates the "
            "noise has changed; go back to the code the run was started with"
        )
    if ledger.charges and checkpoint_folder(folder) is None:
        raise CorruptRun(f"{folder} has spent budget but has no checkpoint; restore the folder, or start a new run")
    return changes


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

ENDED = ("completed", "stopped-budget")
_NAMED = 8


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


def check_origin(
    run_folder: Path, config: RunConfig, *, data: str | None = None, other_code: bool = False, phases: Tables = ()
) -> list[str]:
    """Hold ``config``, the data set and the code of now against the start of the run; what of the code is different.

    Raises:
        CannotResume: something else than :data:`FREE` settings is different (code only counts without ``other_code``).
        CorruptRun: origin.json is not what a run writes.
    """
    try:
        origin = json.loads((run_folder / ORIGIN_FILE).read_text(encoding="utf-8"))
        table, code = dict(origin["config"]), dict(origin["code"])
        digest = (run_folder / DATA_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CannotResume(
            f"{run_folder} lacks {ORIGIN_FILE} or {DATA_FILE}: it is of an older version, or no run folder"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CorruptRun(f"{run_folder / ORIGIN_FILE} cannot be read: {error}; restore it") from error
    changes = differences(code, code_version(config, methods_of(phases)))
    if changes and not other_code:
        raise CannotResume(
            f"the run was started with other code: {_listed(changes)}. Go back to that code, or say that the change is "
            "meant (lacquer resume --other-code): the ledger still refuses what was not committed to, and the report "
            "will name the change"
        )
    try:
        before = flatten(parse(table).to_table())
    except ConfigError as error:
        raise CannotResume(f"this code does not know the settings the run was started with: {error}") from error
    now = flatten(config.to_table())
    wrong = [
        f"{key} is {now.get(key)!r}, it was {before.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in FREE and before.get(key) != now.get(key)
    ]
    if origin.get("phases", []) != list(phases):
        wrong.append("the phases are not the same")
    if wrong:
        raise CannotResume(f"the settings are not those the run was started with: {_listed(wrong)}; put them back")
    if data is not None and data != digest:
        raise CannotResume(
            "the data set is not the one the run was started with: its source, its tokenizer or the code that prepares "
            "it has changed; put it back, or start a new run (which spends a budget of its own)"
        )
    return changes


def methods_of(phases: Tables) -> list[str]:
    """Names of the methods in a run's phases."""
    return [phase[key] for phase in phases for key in ("controller", "optimizer") if phase["kind"] == "private"]


def claim(run_folder: Path) -> Ledger:
    """The ledger of a run that has not ended: verified, not older than the checkpoint, and held by nobody else.

    Raises:
        CannotResume: the run has ended, another process holds the ledger, or there is none.
        CorruptRun: the ledger was tampered with or rolled back.
    """
    refuse_ended(run_folder)
    path = run_folder / LEDGER_FILE
    if not path.is_file():
        raise CannotResume(
            f"{run_folder} has no ledger: the run was interrupted before it could spend anything; start it anew"
        )
    try:
        return Ledger.open(path, ledger_head(run_folder))
    except BlockingIOError:
        raise CannotResume(f"{run_folder} is still running: a process holds its ledger; stop that one first") from None


def refuse_ended(run_folder: Path) -> None:
    """CannotResume if the run has ended."""
    if (run_folder / RESULTS_FILE).is_file():
        raise CannotResume(f"{run_folder} has ended; there is nothing to resume")
    status = read_status(run_folder)
    if status is not None and status.state in ENDED:
        raise CannotResume(f"{run_folder} has ended ({status.state}: {status.message}); there is nothing to resume")


def check_resumable(run_folder: Path, *, other_code: bool = False, phases: Tables = ()) -> RunConfig:
    """All that can be checked before anything starts; the run's settings.

    Raises:
        CannotResume, CorruptRun, ConfigError: why it cannot be resumed.
    """
    if not (run_folder / CONFIG_FILE).is_file():
        raise CannotResume(f"{run_folder} is no run folder: it has no {CONFIG_FILE}; give what `lacquer run` named")
    config = load(run_folder / CONFIG_FILE)
    if (run_folder / PHASES_FILE).is_file():
        with owned(run_folder):
            refuse_ended(run_folder)
    elif config.cross_silo:
        with owned(run_folder):
            check_silos(run_folder)
    else:
        with claim(run_folder) as ledger:
            check_secret(run_folder, config, ledger)
    check_origin(run_folder, config, other_code=other_code, phases=phases)
    return config


def check_silos(run_folder: Path) -> None:
    """CannotResume if a cross-silo run, whose folder the caller owns, has ended or never began."""
    refuse_ended(run_folder)
    if not (run_folder / SITES_FILE).is_file():
        raise CannotResume(f"{run_folder} was interrupted before its sites were asked for anything; start it anew")


def check_secret(run_folder: Path, config: RunConfig, ledger: Ledger) -> None:
    """Refuse to draw cohorts anew for a run that has drawn some; CorruptRun. Nodes with many clients keep their own."""
    secret = run_folder / SAMPLING_SECRET
    here = not config.privacy.seeded_cohorts and not config.data.nodes
    if ledger.charges and here and not secret.is_file():
        raise CorruptRun(f"{secret} is gone: without it other cohorts would be drawn than were; restore it")


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return "; ".join(items[:_NAMED]) + more


@dataclass(frozen=True)
class Resumed:
    """One time a run was resumed.

    Attributes:
        round: the last one released before; 0 if only the initial release or nothing was, -1 if not even that.
        time: seconds since 1970.
        lost: charges so far that no released round stands for: the run was interrupted between the charge and the
            checkpoint, or the round failed. They stay spent.
        code: what of the code was different from that at the start, in words.
    """

    round: int
    time: float
    lost: int
    code: tuple[str, ...] = ()


def note_resumed(run_folder: Path, resumed: Resumed) -> None:
    """Add a line to resumed.jsonl, which is written anew: half a line could not be read at the end of the run."""
    path = run_folder / RESUMES_FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    durable.write(path, before + json.dumps(asdict(resumed)) + "\n")


def read_resumed(run_folder: Path) -> tuple[Resumed, ...]:
    """Every time a run was resumed, in order; CorruptRun if a line is none of ours."""
    path = run_folder / RESUMES_FILE
    if not path.is_file():
        return ()
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return tuple(Resumed(**{**line, "code": tuple(line["code"])}) for line in lines)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptRun(f"{path} is not what a resumed run writes: {error}") from error
