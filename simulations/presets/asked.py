"""The run that a person asked for: a configuration, or one with phases, whichever the file describes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client.settings import cache_folder
from privacy import durable
from server.config.load import ConfigError, load, parse, read, with_overrides
from server.config.schema import RunConfig
from server.run_folder.errors import CannotResume
from server.run_folder.names import CONFIG_FILE, PHASES_FILE
from simulations.presets.load import absolute_paths, find, parse_setting

if TYPE_CHECKING:
    from server.runs.phase_plan import PhasesConfig


@dataclass(frozen=True)
class Asked:
    """A run to be started or resumed.

    Attributes:
        run: the settings that every kind of run has.
        phases: those of a run in phases, else None.
    """

    run: RunConfig
    phases: "PhasesConfig | None" = None

    @property
    def shown(self) -> RunConfig:
        """The settings for a display, with the rounds that are planned."""
        if self.phases is None:
            return self.run
        steps = sum(phase.steps for phase in self.phases.private_phases)
        return self.run.model_copy(update={"rounds": max(steps, 1)})

    @property
    def phase_tables(self) -> list[dict[str, Any]]:
        """The phases as they stand in a file; none for other runs."""
        return [] if self.phases is None else self.phases.phase_tables()

    def write(self, folder: Path) -> None:
        """Write the phases into the run's folder; the other settings are written by whoever starts the run."""
        if self.phases is not None:
            (folder / PHASES_FILE).write_text(self.phases.to_toml(), encoding="utf-8")


def ask(
    name: str,
    settings: Sequence[str],
    overrides: Mapping[str, Any],
    here: Path,
    data: Path,
    *,
    chosen_engine: bool = True,
) -> Asked:
    """Read the run that a preset or file describes, with ``settings`` ("key=value") and ``overrides`` on top.

    Args:
        name: of a preset, or a path.
        overrides: of single keys, such as the engine.
        here: folder where the output goes, if its path is relative.
        data: folder in which all other relative paths begin.
        chosen_engine: ``overrides`` are where it trains, of which a run over the records of one site has no choice.

    Raises:
        ConfigError: naming every wrong key.
    """
    table, data = read(find(name)), data.expanduser().resolve()
    chosen = {**dict(parse_setting(setting) for setting in settings), **overrides}
    engine = overrides if chosen_engine else {}
    if "phases" not in table:
        return _checked(Asked(absolute_paths(parse(with_overrides(table, chosen)), data, here)), engine)
    from server.runs.phase_config import parse_phases  # with torch, which `lacquer --help` does not need

    config = parse_phases(table, chosen)
    run = absolute_paths(config.run, data, here)
    return _checked(Asked(run, replace(config, run=run)), engine)


def ask_again(folder: Path, overrides: Mapping[str, Any]) -> Asked:
    """Read the run in a folder, with ``overrides`` of where it trains.

    Raises:
        CannotResume, CorruptRun: it is no run folder, or a file of it is damaged or gone.
    """
    from server.run_folder.verify import verify_run  # with torch

    if verify_run(folder).config is None:
        raise CannotResume(f"{folder} is no run folder: it has no {CONFIG_FILE}; give what `lacquer run` named")
    if not (folder / PHASES_FILE).is_file():
        return _checked(Asked(load(folder / CONFIG_FILE, dict(overrides))), overrides)
    from server.runs.phase_config import load_phases

    config = load_phases(folder / PHASES_FILE)
    return _checked(Asked(config.run, config), overrides)


def _checked(asked: Asked, overrides: Mapping[str, Any]) -> Asked:
    if overrides and asked.run.is_single_site:
        raise ConfigError(
            f"{', '.join(overrides)}: a run over the records of one site trains in a process of its own; leave out "
            "--engine and --workers"
        )
    return count_clients(asked)


def count_clients(asked: Asked) -> Asked:
    """Count the clients of a run where the data say how many there are; else return it as it is.

    Raises:
        OSError: there is no folder for prepared data, and none can be made; minutes of checks would find it last.
    """
    cache = Path(asked.run.data.cache or cache_folder())
    if not cache.exists():
        durable.check_writable(cache)
    if asked.run.clients:
        return asked
    from client.data.prepare import prepare  # with transformers, as below
    from server.runs.assembly import data_spec

    clients = prepare(data_spec(asked.run)).num_clients
    return replace(asked, run=asked.run.replace(clients=clients))
