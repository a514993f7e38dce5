"""From a configuration to everything one site needs, checked, before any budget is spent."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from client.data.prepare import prepare
from client.data.spec import PreparedData
from client.models.base import load_base
from client.models.files import fingerprint
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.record_level.dp_sgd import refuse_votes
from client.record_level.settings import RecordLevelSettings
from client.record_level.training import commit, setting_of
from client.record_level.units import UnitIndex
from client.worker import Job
from privacy.commitment import Commitment
from server.config.load import ConfigError
from server.config.methods import Methods, methods
from server.config.schema import RunConfig
from server.runs.assembly import Assembly, data_spec, lora_spec, reading
from server.runs.commitment import not_private_reason
from strategies.adapter.layout import AdapterLayout
from strategies.aggregations.aggregation import Adapters
from strategies.aggregations.factors import RoLora
from strategies.aggregations.fedsvd import FedSvd
from strategies.aggregations.individual import FedEx, FedGsa, Flora
from strategies.aggregations.ranks import ZeroPad
from strategies.controllers.controller import Controller, PublicSignals, RunInfo


@dataclass(frozen=True)
class RecordLevelAssembly:
    """One site ready to start: a run's assembly, whose commitment is the site's, and the site's units."""

    assembly: Assembly
    silo: RecordLevelSettings
    index: UnitIndex


def record_level_settings(config: RunConfig, steps: int) -> RecordLevelSettings:
    """The site that a configuration describes, committed for so many steps.

    Raises:
        ConfigError: settings that no site can have.
    """
    try:
        return RecordLevelSettings.of(
            config.privacy,
            config.strategy,
            config.silo,
            unit=config.unit,
            steps=steps,
            seeded=config.privacy.seeded_cohorts,
            not_private=not_private_reason(config),
            seed=config.seed,
        )
    except ValueError as error:
        raise ConfigError(f"silo: {error}") from error


def assemble_record_level(config: RunConfig) -> RecordLevelAssembly:
    """Prepare data and model, calibrate the noise for the site's units. Nothing is sampled, no budget is spent.

    Raises:
        ConfigError, ValueError: naming the setting that cannot work.
    """
    if not config.alone:
        raise ConfigError(
            f"privacy.unit = {config.privacy.unit!r}, clients = {config.clients}: one site protects its records "
            "or groups of them; set privacy.unit to 'record' or 'group', clients = 1 and sampling-rate = 1.0"
        )
    parts, silo = methods(config), record_level_settings(config, config.rounds)
    data = prepare(data_spec(config))
    index = UnitIndex.of(
        data.train, grouped=config.privacy.unit == "group", most=silo.records_per_unit, seed=config.seed
    )
    commitment, multipliers = _committed(config, silo, len(index))
    described = _described(config, parts, data)
    setting = setting_of(silo, len(index), described.layout, multipliers, commitment.order)
    assembly = Assembly(
        config=config, data=data, methods=parts, commitment=commitment, setting=setting, **vars(described)
    )
    refuse_unplannable(parts.controller, setting, f"strategy.controller = {config.strategy.controller!r}")
    return RecordLevelAssembly(assembly, silo, index)


@dataclass(frozen=True)
class Federation:
    """Sites of a cross-silo run, ready to start.

    Attributes:
        config, data, methods: of the run; the methods' aggregation is the server's.
        silo: what every site commits to.
        described: the adapter and the job.
    """

    config: RunConfig
    data: PreparedData
    methods: Methods
    silo: RecordLevelSettings
    described: "Described"


def assemble_federation(config: RunConfig) -> Federation:
    """Prepare data and model and the settings of the sites, each of which calibrates for its own units.

    Raises:
        ConfigError, ValueError: naming the setting that cannot work.
    """
    parts = methods(config)
    part = parts.aggregation.part(Adapters(config.model.rank, config.clients, config.seed), 1)
    if part.ranks is not None or isinstance(parts.aggregation, RoLora | FedSvd | ZeroPad):
        raise ConfigError(
            f"strategy.aggregation = {config.strategy.aggregation!r} changes what is trained from round to round, "
            "which sites with ledgers of their own do not follow; take plain, ffa, fedex, flora or fedgsa"
        )
    _refuse_what_silos_cannot(config, parts)
    silo = record_level_settings(config, config.rounds * config.silo.steps).but(
        served_average=0.0,
        aggregation="ffa" if part.factors == "b" else "plain",
        aggregation_options={},
    )
    data = prepare(data_spec(config))
    return Federation(config, data, parts, silo, _described(config, parts, data))


def _refuse_what_silos_cannot(config: RunConfig, parts: Methods) -> None:
    """ConfigError for settings that would be of no effect in the sites of a cross-silo run."""
    if parts.controller.reads_validation:
        raise ConfigError(
            f"strategy.controller = {config.strategy.controller!r} reads the public loss of every step, and the "
            "sites of a cross-silo run have no public data; take another"
        )
    if config.silo.span.method:
        raise ConfigError(
            f"silo.span.method = {config.silo.span.method!r} must be '' in a cross-silo run: its public texts are "
            "written in the run of one site (clients = 1)"
        )
    if config.silo.gradients != "stacked":
        raise ConfigError(
            f"silo.gradients = {config.silo.gradients!r} must be 'stacked' in a cross-silo run; for adapters it does "
            "not know set engine.sequential = true, which takes gradients one record at a time"
        )
    if config.strategy.served_average and isinstance(parts.aggregation, FedEx | FedGsa | Flora):
        raise ConfigError(
            f"strategy.served-average = {config.strategy.served_average:g} must be 0 with strategy.aggregation = "
            f"{config.strategy.aggregation!r}, which writes the factors anew: their values of different rounds do not "
            "mix"
        )


@dataclass(frozen=True)
class Described:
    """The adapter of a run, where it starts, and what nodes must know."""

    spec: LoraSpec
    layout: AdapterLayout
    start: Tensor
    job: Job


def _described(config: RunConfig, parts: Methods, data: PreparedData) -> Described:
    model, _ = load_base(config.model.name, config.model.task, data.num_labels)
    spec = lora_spec(config, model, parts.aggregation.part(Adapters(config.model.rank, config.clients, config.seed), 1))
    layout = adapter_layout(model, spec)
    job = Job(
        model=config.model.name,
        task=config.model.task,
        num_labels=data.num_labels,
        spec=spec,
        local=config.local,
        data=str(data.folder),
        seed=config.seed,
        sequential=config.engine.sequential,
        precision=config.engine.precision,
        token_budget=config.engine.token_budget,
        prefix_cache_mb=config.engine.prefix_cache_mb,
        reading=reading(config, data.label_names),
        fingerprint=fingerprint(config.model.name) if config.deployed else "",
    )
    return Described(spec, layout, initial_adapter(layout, model, config.seed), job)


def _committed(config: RunConfig, silo: RecordLevelSettings, population: int) -> tuple[Commitment, tuple[float, ...]]:
    try:
        return commit(silo, population)
    except ValueError as error:
        raise ConfigError(
            f"privacy.epsilon = {config.privacy.epsilon:g} over {silo.steps} steps of {silo.batch_size} of "
            f"{population} units: {error}"
        ) from error


def refuse_unplannable(controller: Controller[Any], setting: RunInfo, what: str) -> None:
    """ConfigError that begins with ``what`` unless the controller can plan its first release at the noise there is."""
    try:
        first = 1 if controller.initial(setting.sampling) is None else 0
        refuse_votes(controller.plan(controller.init(setting, PublicSignals(0, None)), first))
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
