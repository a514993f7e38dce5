"""The earlier run that a queue's job goes on with: of the same name and settings, in the same ``output``."""

import re
from dataclasses import dataclass
from pathlib import Path

from server.config.load import ConfigError
from server.run_folder.errors import CannotResume
from server.run_folder.names import LAUNCH_LOCK, ORIGIN_FILE
from server.run_folder.origin import changed_settings
from server.run_folder.progress import is_owned
from server.run_folder.resume import refuse_ended
from simulations.presets.asked import Asked


@dataclass(frozen=True)
class Earlier:
    """A run that was made before.

    Attributes:
        folder: of the run.
        ended: nothing of it is left to do.
    """

    folder: Path
    ended: bool


def earlier_run(asked: Asked) -> Earlier | None:
    """The unfinished run of these settings under ``output``, else the newest that has ended; None to start one.

    Settings are those that decide what a run releases; where and how fast it trains may differ. A run that was
    interrupted before it committed to anything counts for nothing.

    Raises:
        ConfigError: several such runs are unfinished; one of this name is about to start; or one of this name is
            unfinished and has other settings, beside which budget would be spent again.
        CannotResume, CorruptRun: what such a run started with cannot be read.
    """
    name, output = asked.run.name, Path(asked.run.output)
    unfinished, ended, others = list[Path](), list[Path](), list[str]()
    for folder in sorted(output.iterdir()) if output.is_dir() else ():
        if not re.fullmatch(rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?", folder.name):
            continue
        if not (folder / ORIGIN_FILE).is_file():
            if is_owned(folder, LAUNCH_LOCK):
                raise ConfigError(f"{folder} is about to start: another process holds it; wait for it, or stop it")
            continue
        changed, done = changed_settings(folder, asked.run, asked.phase_tables), _has_ended(folder)
        if not changed:
            (ended if done else unfinished).append(folder)
        elif not done:
            others.append(f"in {folder} {changed}")
    if len(unfinished) > 1:
        raise ConfigError(
            f"{len(unfinished)} unfinished runs have these settings: {', '.join(map(str, unfinished))}; take one with "
            "`lacquer resume`, and move the others away"
        )
    if not unfinished and others:
        raise ConfigError(
            f"an unfinished run of the name {name!r} has other settings: {others[-1]}; put them back, give this run a "
            "name or an output of its own, or move that one away"
        )
    found = unfinished or ended
    return Earlier(found[-1], ended=not unfinished) if found else None


def _has_ended(folder: Path) -> bool:
    try:
        refuse_ended(folder)
    except CannotResume:
        return True
    return False
