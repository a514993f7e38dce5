"""The parts of an assembly for runs over records: the site's settings, its units and its own commitment."""

from dataclasses import dataclass
from pathlib import Path

from client.data.prepare import prepare
from client.record_level.dp_sgd import refuse_votes
from client.record_level.settings import RecordLevelSettings
from client.record_level.training import info_of
from client.record_level.units import UnitIndex
from server.config.load import ConfigError
from server.config.methods import Methods, methods
from server.config.schema import RunConfig
from server.runs.assembly import Assembly, CommittedAssembly, data_spec, make_assembly
from server.runs.commitment import commit_records, not_private_reason, refuse_unplannable
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters
from strategies.aggregations.factors import RoLora
from strategies.aggregations.fedsvd import FedSvd
from strategies.aggregations.individual import FedEx, FedGsa, Flora
from strategies.aggregations.ranks import ZeroPad


@dataclass(frozen=True)
class RecordLevelAssembly(CommittedAssembly):
    """A run over the records of one site, ready to start.

    Attributes:
        site: what decides the site's private training.
        index: the site's protected units and their records.
    """

    site: RecordLevelSettings
    index: UnitIndex


def record_level_settings(config: RunConfig, steps: int) -> RecordLevelSettings:
    """The settings of the sites that a configuration describes, committed for so many private steps.

    Raises:
        ConfigError: settings that no site can have.
    """
    try:
        return RecordLevelSettings.of(
            config.privacy,
            config.strategy,
            config.site,
            unit=config.unit,
            steps=steps,
            seeded=config.privacy.seeded_cohorts,
            not_private=not_private_reason(config),
            seed=config.seed,
        )
    except ValueError as error:
        raise ConfigError(f"site: {error}") from error


def assemble_record_level(config: RunConfig, folder: Path | None = None) -> RecordLevelAssembly:
    """Prepare data and model, calibrate the noise for the site's units. Nothing is sampled, no budget is spent.

    Args:
        folder: of the run; what was calibrated for it is taken from there.

    Raises:
        ConfigError, ValueError: naming the setting that cannot work.
    """
    if not config.is_single_site:
        raise ConfigError(
            f"privacy.unit = {config.privacy.unit!r}, clients = {config.clients}: one site protects its records "
            "or groups of them; set privacy.unit to 'record' or 'group', clients = 1 and sampling-rate = 1.0"
        )
    parts, site = methods(config), record_level_settings(config, config.rounds)
    data = prepare(data_spec(config))
    index = UnitIndex.of(
        data.train, grouped=config.privacy.unit == "group", most=site.records_per_unit, seed=config.seed
    )
    if 2 * config.audit.canaries > len(index):
        raise ConfigError(
            f"audit.canaries = {config.audit.canaries} must be at most half of the {len(index)} units: canaries take "
            "the places of units; lower audit.canaries"
        )
    noise = commit_records(config, site, len(index), folder, records=index.kept)
    run = make_assembly(config, parts, data, folder)
    order = noise.commitment.order
    info = info_of(site, len(index), run.layout, noise.multipliers, order, records=index.kept)
    what = f"strategy.controller = {config.strategy.controller!r}"
    refuse_unplannable(parts.controller, info, what, refuse_votes)
    return RecordLevelAssembly(**vars(run), commitment=noise.commitment, setting=info, site=site, index=index)


@dataclass(frozen=True)
class SitesAssembly(Assembly):
    """Sites of a run over sites, ready to start.

    Attributes:
        methods: the server's is the aggregation.
        site: what every site commits to, and calibrates for its own units.
        part: what of the adapter they train, in every round.
    """

    site: RecordLevelSettings
    part: TrainedSubset


def assemble_sites(config: RunConfig, folder: Path | None = None) -> SitesAssembly:
    """Prepare data and model and the settings of the sites, each of which calibrates for its own units.

    Args:
        folder: of the run, see :func:`server.runs.assembly.make_assembly`.

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
    _refuse_what_sites_cannot(config, parts)
    site = record_level_settings(config, config.rounds * config.site.steps).replace(
        served_average=0.0,
        aggregation="ffa" if part.factors == "b" else "plain",
        aggregation_options={},
    )
    if config.site.span.method:  # the server takes the steps
        site = site.replace(optimizer="fedavg", optimizer_options={})
    run = make_assembly(config, parts, prepare(data_spec(config)), folder)
    return SitesAssembly(**vars(run), site=site, part=part)


def _refuse_what_sites_cannot(config: RunConfig, parts: Methods) -> None:
    """Refuse settings that would be of no effect in the sites of a run over sites.

    Raises:
        ConfigError: naming the setting.
    """
    if parts.controller.reads_validation:
        raise ConfigError(
            f"strategy.controller = {config.strategy.controller!r} reads the public loss of every step, and the "
            "sites of a run over sites have no public data; take another"
        )
    options = config.strategy.aggregation_options
    if options and not parts.aggregation.individual:
        raise ConfigError(
            f"strategy.aggregation-options = {options!r} must be empty in a run over sites with strategy.aggregation = "
            f"{config.strategy.aggregation!r}: sites train without them"
        )
    if config.site.span.method and isinstance(parts.aggregation, FedEx | FedGsa | Flora):
        raise ConfigError(
            f"strategy.aggregation = {config.strategy.aggregation!r} must be 'plain' or 'ffa' with site.span.method = "
            "'coefficients': the server takes the steps, and sites have no adapter of their own"
        )
    if config.strategy.served_average and isinstance(parts.aggregation, FedEx | FedGsa | Flora):
        raise ConfigError(
            f"strategy.served-average = {config.strategy.served_average:g} must be 0 with strategy.aggregation = "
            f"{config.strategy.aggregation!r}, which writes the factors anew: their values of different rounds do not "
            "mix"
        )
