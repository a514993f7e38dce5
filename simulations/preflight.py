"""Checks of a run before anything starts: methods, budget, model and data that can be known to fail are refused.

Each check is the function that the run itself will call, so a run that passes here does not fail there for a setting.
It is rehearsed then (:mod:`simulations.engines.rehearsal`), in the process that starts it; not a run that is resumed,
which has passed. Of a sweep, one cell of every kind is. The noise that is calibrated here is handed on to the run, see
:mod:`server.run_folder.handed_on`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.data.catalog.corpora import CORPORA, files
from client.data.columns.tables import KINDS
from client.data.prepare import prepare
from client.data.prepared import PreparedData
from client.data.sources import check_hub_id, existing_file
from client.data.spec import NOTES
from client.models.files import locate
from privacy.commitment import Tries
from server.config.account import check_account
from server.config.load import ConfigError, flatten
from server.config.methods import methods
from server.config.schema import RunConfig
from server.evaluation.started_from import find_start
from server.run_folder import handed_on
from server.run_folder.data_facts import DataFacts, facts_of
from server.runs.assembly import Assembly, adapter_of, data_spec, make_assembly, with_noise
from server.runs.commitment import commit_clients, commit_records
from server.runs.phases import PhasesRun
from server.runs.record_level_assembly import (
    RecordLevelAssembly,
    SitesAssembly,
    assemble_record_level,
    assemble_sites,
    record_level_settings,
)
from simulations.engines.cluster.head import cluster_nodes
from simulations.engines.cluster.nodes import allocate_workers
from simulations.engines.public_only import check_public_only
from simulations.presets.asked import Asked
from simulations.sweep.cells import Cell
from simulations.sweep.tuning import NoiseOf, TuningPlan, plan_tuning, refuse_unlike
from strategies.calibration import Calibrated


@dataclass(frozen=True)
class Checked:
    """A checked run that may start.

    Attributes:
        noise: as it was calibrated, in JSON; None where every site calibrates for itself.
        phases: those of a run in phases, as they stand in a file.
        sentence: what should be known before it starts; empty where the progress says all of it.
        facts: of the data set; None where the checks did not come to it.
        source: digest of the records it was made of.
        ready: what there is to rehearse; None where the checks did not come to it.
    """

    config: RunConfig
    noise: Any = None
    phases: Sequence[Mapping[str, Any]] = ()
    sentence: str = ""
    facts: DataFacts | None = None
    source: str = ""
    ready: Assembly | None = None

    @property
    def multipliers(self) -> tuple[float, ...]:
        """The noise multipliers of the rounds. None where every site calibrates for itself, or no noise is added."""
        return tuple(self.noise["multipliers"]) if self.noise is not None else ()

    def hand_on(self, folder: Path) -> None:
        """Hand the noise on to the process that runs in ``folder``."""
        if self.noise is not None:
            handed_on.write_noise(folder, self.config, self.noise, self.phases)


def check_run(asked: Asked) -> Checked:
    """Check whatever kind of run was asked for, then rehearse it.

    Raises:
        ConfigError, ValueError: naming every setting that cannot work, or the stage that fails.
    """
    from simulations.engines.rehearsal import rehearse_phases  # with all that trains, which no earlier refusal needs

    config = asked.run
    if asked.phases is not None:
        check_model(config)
        run = PhasesRun(asked.phases)
        check_account(config, [run.commitment] if run.planned.floor else [])
        rehearse_phases(run)
        facts = facts_of(run.plain)
        source = run.plain.meta["source"]
        return Checked(config, run.planned.to_json(), asked.phase_tables, run.guarantee.sentence, facts, source)
    if config.is_deployed and not config.is_single_site:
        raise ConfigError("data.held-by = 'nodes': the records are on a federation's nodes; use `lacquer deploy`")
    checked = check_and_rehearse(config)
    check_accounts([checked])
    return checked


def check_and_rehearse(config: RunConfig) -> Checked:
    """Check a run over clients, over the records of one site or of several, then rehearse it.

    Raises:
        ConfigError, ValueError: naming every setting that cannot work, or the stage that fails.
    """
    from simulations.engines.rehearsal import rehearse

    if config.is_single_site:
        ready = _ready_site(config)
        data = ready.data
        checked = Checked(config, _noise_of(ready).to_json(), (), "", facts_of(data), data.meta["source"], ready)
    else:
        checked = check(config)
    if checked.ready is not None:
        rehearse(checked.ready)
    return checked


def check(config: RunConfig) -> Checked:
    """Check a run over clients or sites; prepares the data set, which the run then opens.

    Raises:
        ConfigError: one line for every setting that cannot work.
    """
    problems, noise, data = list[str](), None, None
    ready: Assembly | None = None

    @contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # ConfigError is one
            problems.append(str(error))

    if config.engine.ray_address:
        with collected():
            allocate_workers(config, cluster_nodes(config.engine.ray_address))
    # At once: what needs neither data nor model to be seen.
    for look in (methods, check_sources, check_model):
        with collected():
            look(config)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    if config.several_sites:
        with collected():
            ready = check_sites(config)
    else:
        with collected():
            noise = check_noise(config)
        with collected():
            data = check_data(config)
        with collected():
            ready = check_adapter(config) if data is None else make_assembly(config, methods(config), data)
    if problems or ready is None:  # two checks may stumble over the same setting
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    if noise is not None:
        ready = with_noise(ready, noise)
    told = None if noise is None else noise.to_json()
    return Checked(config, told, facts=facts_of(ready.data), source=ready.data.meta["source"], ready=ready)


def check_noise(config: RunConfig) -> Calibrated:
    """Check the methods and the budget, and calibrate.

    Raises:
        ConfigError: a method that is not there, or a budget that cannot be kept.
    """
    return commit_clients(config, methods(config).controller)


def check_data(config: RunConfig) -> PreparedData:
    """Check model and data, and prepare the data set.

    Raises:
        ValueError: naming the setting.
    """
    check_model(config)
    return prepare(data_spec(config))


def check_model(config: RunConfig) -> None:
    """Look for the base model's files and for the adapter to go on from; ValueError if there are none that will do."""
    if not config.model.name.startswith("random:"):  # weights that are made, not found
        locate(config.model.name)
    if config.model.adapter:
        find_start(config)


def check_sources(config: RunConfig) -> None:
    """Look for the files that the data are read from, and read nothing.

    Raises:
        ValueError: naming the setting whose files are not there.
    """
    data = config.data
    named = {"source": data.source, "validation-source": data.validation_source, "test-source": data.test_source}
    for option, source in ((f"data.{key}", place) for key, place in named.items()):
        kind = source.partition(":")[0]
        if kind in CORPORA:
            files(source, option)
        elif kind in KINDS:
            existing_file(source, option)
        elif source and source != NOTES:
            check_hub_id(source, option)


def check_adapter(config: RunConfig, labels: int = 2) -> None:
    """Check that the base model has what the adapter names, and that the aggregation fits the adapter in every round.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    adapter_of(config, methods(config), labels)  # how many labels there are changes a size, no name


def check_sites(config: RunConfig) -> SitesAssembly:
    """Check a run over sites; each site calibrates for its own records when it first takes part.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    check_model(config)
    return assemble_sites(config)


def check_site(config: RunConfig) -> Calibrated:
    """Check all of a run at one site that can be checked without sampling: data, model, methods, budget.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    return _noise_of(_ready_site(config))


def _ready_site(config: RunConfig) -> RecordLevelAssembly:
    methods(config)
    check_sources(config)
    check_model(config)
    return assemble_record_level(config)


def _noise_of(ready: RecordLevelAssembly) -> Calibrated:
    return Calibrated(ready.commitment, ready.setting.noise_multipliers)


def check_cells(cells: list[Cell]) -> dict[str, Checked]:
    """Refuse all cells if one of them cannot run; returns what is known of each, by its key.

    Cells that differ in seeds, and in numbers of other tables than [model] and [data], are rehearsed once.

    Raises:
        ConfigError: every distinct problem, with the first cell that has it.
    """
    checked: dict[str, Checked] = {}
    adapters: set[str] = set()  # loading a model for every cell would take longer than the rest
    calibrated: dict[str, tuple[Any, str]] = {}  # seeds and data do not change the noise, and some take seconds

    def check_cell(cell: Cell) -> None:
        config = cell.config
        sites = cell.kind == "run" and config.several_sites
        noise = repr((config.privacy, config.strategy, config.rounds, config.clients, config.sampling_rate))
        if cell.kind == "site":  # its noise depends on how many units there are, and on what is trained
            noise = repr((noise, config.site, config.data, config.model))
        if cell.kind == "public-only":
            check_public_only(config)
            check_data(config)
            check_adapter_once(config)
            checked[cell.key] = Checked(config)  # no client takes part, so nobody's records cost anything
        elif sites:  # every site calibrates for its own records
            checked[cell.key] = Checked(config, source=check_sites(config).data.meta["source"])
        elif cell.kind == "site":
            if noise not in calibrated:
                ready = _ready_site(config)
                calibrated[noise] = _noise_of(ready).to_json(), ready.data.meta["source"]
            checked[cell.key] = Checked(config, calibrated[noise][0], source=calibrated[noise][1])
        else:
            if noise not in calibrated:
                calibrated[noise] = check_noise(config).to_json(), ""
            checked[cell.key] = Checked(config, calibrated[noise][0], source=check_data(config).meta["source"])
            check_adapter_once(config)

    def check_adapter_once(config: RunConfig) -> None:
        adapter = repr((config.model, config.strategy, config.rounds, config.clients))
        if adapter not in adapters:
            adapters.add(adapter)
            check_adapter(config)

    rehearsed: set[str] = set()

    def rehearse_once(cell: Cell) -> None:
        shape = _shape(cell)
        if cell.kind != "public-only" and shape not in rehearsed:  # which spends nothing
            rehearsed.add(shape)
            check_and_rehearse(cell.config)

    # Files that are not there are told of before anything is calibrated, which takes minutes.
    for check_one in (lambda cell: check_sources(cell.config), check_cell, rehearse_once):
        problems: dict[str, str] = {}
        for cell in cells:
            try:
                check_one(cell)
            except ValueError as error:  # ConfigError is one
                problems.setdefault(str(error), cell.key)
        if problems:
            raise ConfigError("\n".join(f"{key}: {problem}" for problem, key in problems.items()))
    return checked


def check_accounts(checked: Sequence[Checked]) -> None:
    """Refuse cells that the accounts of their data do not pay for, all together.

    Raises:
        ConfigError: what is left of an account, what they ask for, what would fit.
    """
    for account in {one.config.privacy.account for one in checked} - {""}:
        cells = [one for one in checked if one.config.privacy.account == account and one.noise is not None]
        check_account(cells[0].config, [Calibrated.from_json(one.noise).commitment for one in cells])


def _shape(cell: Cell) -> str:
    """What decides which code a cell runs, and on what."""
    told = {
        key: value
        for key, value in flatten(cell.config.to_table()).items()
        if key not in ("name", "output") and (isinstance(value, str | bool) or key.startswith(("model.", "data.")))
    }
    return repr((cell.kind, told))


def check_candidates(cells: list[Cell], tries: Tries) -> tuple[TuningPlan, dict[str, Checked], NoiseOf]:
    """Check all that can be refused of a private sweep before anything is drawn or spent.

    Returns:
        What it commits to; the noise of every cell as a run by itself at the same target; what calibrates a cell for
        any other target.

    Raises:
        ConfigError: a cell that cannot run, that is no candidate beside the others, or a target that no noise keeps.
    """
    refuse_unlike(cells)
    single = check_cells(cells)
    noise_of = _calibrating(cells)
    plan = plan_tuning(cells, tries, noise_of)
    for cell in cells:  # with that much noise, too, a controller must be able to work; over clients it was looked at
        if cell.kind == "site":
            check_site(_at(cell.config, plan.alone))
    return plan, single, noise_of


def _calibrating(cells: Sequence[Cell]) -> NoiseOf:
    """Make what calibrates cells that have passed their checks, for any epsilon; equal noise is searched once."""
    sites = [cell.config for cell in cells if cell.kind == "site"]  # of one data set, so of as many units
    units = len(assemble_record_level(sites[0]).index) if sites else 0
    known: dict[str, Calibrated] = {}

    def noise_of(cell: Cell, epsilon: float) -> Calibrated:
        config = _at(cell.config, epsilon)
        key = repr((cell.kind, config.privacy, config.strategy, config.rounds, config.sampling_rate, config.site))
        if key not in known:
            if cell.kind == "site":
                known[key] = commit_records(config, record_level_settings(config, config.rounds), units)
            else:
                known[key] = check_noise(config)
        return known[key]

    return noise_of


def _at(config: RunConfig, epsilon: float) -> RunConfig:
    """A copy of a run's settings for another target."""
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"epsilon": epsilon})})
