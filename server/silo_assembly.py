"""From a configuration to everything a single silo needs, checked, before any budget is spent."""

from dataclasses import dataclass

from client.data import prepare
from client.dp_sgd import refuse_votes
from client.job import Job
from client.lora import adapter_layout, initial_adapter
from client.models import load_base
from client.silo import Silo, commit, setting_of
from client.unit_index import UnitIndex
from privacy.commitment import Commitment
from server.assembly import Assembly, local_training, lora_spec
from server.budget import not_private_reason
from server.config import ConfigError, RunConfig
from server.data_spec import data_spec
from server.methods import methods
from strategies.aggregation.aggregation import Adapters
from strategies.controller import PublicSignals

TRUST = (
    "the silo itself: it holds the records, draws the batches and adds the noise; the guarantee is against everyone "
    "who sees only what the run releases (the adapter, its metrics, its ledger)"
)
NOT_COVERED = (
    "choices made by looking at other runs on the same data (hyper-parameters, seeds, the best of several models): "
    "every such run spends an epsilon of its own, and they add up",
    "the number of protected units, the texts' largest length and every setting: they are taken as public",
    "the held-out validation and test records: they are not among the protected, and their metrics are published",
    "one person behind several units: k units together are protected by a k-fold group guarantee only",
    "the base model: what it was trained on before",
    "anything computed on the data outside this ledger, such as the prepared files, logs and timing inside the silo",
)


@dataclass(frozen=True)
class SiloAssembly:
    """A single silo ready to start: a run's assembly, whose commitment is the silo's, and the silo's units."""

    assembly: Assembly
    silo: Silo
    index: UnitIndex


def silo_of(config: RunConfig, steps: int) -> Silo:
    """The silo that a configuration describes, committed for so many steps.

    Raises:
        ConfigError: settings that no silo can have.
    """
    strategy, privacy, silo = config.strategy, config.privacy, config.silo
    try:
        return Silo(
            unit=config.unit,
            steps=steps,
            batch_size=silo.batch_size,
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            mode=privacy.mode,
            noise=privacy.noise,
            seeded=privacy.seeded_cohorts,
            not_private=not_private_reason(config),
            records_per_unit=silo.records_per_unit,
            combine=silo.combine,
            controller=strategy.controller,
            controller_options=strategy.controller_options,
            optimizer=strategy.optimizer,
            optimizer_options=strategy.optimizer_options,
            aggregation=strategy.aggregation,
            aggregation_options=strategy.aggregation_options,
            served_average=strategy.served_average,
            schedule=silo.schedule,
            warm_up=silo.warm_up,
            seed=config.seed,
        )
    except ValueError as error:
        raise ConfigError(f"silo: {error}") from error


def assemble_silo(config: RunConfig) -> SiloAssembly:
    """Prepare data and model, calibrate the noise for the silo's units. Nothing is sampled, no budget is spent.

    Raises:
        ConfigError, ValueError: naming the setting that cannot work.
    """
    if not config.alone:
        raise ConfigError(
            f"privacy.unit = {config.privacy.unit!r}, clients = {config.clients}: a single silo protects its records "
            "or groups of them; set privacy.unit to 'record' or 'group', clients = 1 and sampling-rate = 1.0"
        )
    parts, silo = methods(config), silo_of(config, config.rounds)
    data = prepare(data_spec(config))
    index = UnitIndex.of(
        data.train, grouped=config.privacy.unit == "group", most=silo.records_per_unit, seed=config.seed
    )
    commitment, multipliers = _committed(config, silo, len(index))
    model, _ = load_base(config.model.name, config.model.task, data.num_labels)
    spec = lora_spec(config, model, parts.aggregation.part(Adapters(config.model.rank, 1, config.seed), 1))
    layout = adapter_layout(model, spec)
    job = Job(
        model=config.model.name,
        task=config.model.task,
        num_labels=data.num_labels,
        balance="none",
        spec=spec,
        local=local_training(config),
        data=str(data.folder),
        seed=config.seed,
        sequential=config.engine.sequential,
        precision=config.engine.precision,
        token_budget=config.engine.token_budget,
        prefix_cache_mb=config.engine.prefix_cache_mb,
    )
    setting = setting_of(silo, len(index), layout, multipliers, commitment.order)
    start = initial_adapter(layout, model, config.seed)
    assembly = Assembly(config, data, parts, spec, layout, start, job, commitment, setting)
    _plannable(assembly)
    return SiloAssembly(assembly, silo, index)


def _committed(config: RunConfig, silo: Silo, population: int) -> tuple[Commitment, tuple[float, ...]]:
    try:
        return commit(silo, population)
    except ValueError as error:
        raise ConfigError(
            f"privacy.epsilon = {config.privacy.epsilon:g} over {silo.steps} steps of {silo.batch_size} of "
            f"{population} units: {error}"
        ) from error


def _plannable(assembly: Assembly) -> None:
    """ConfigError unless the controller can plan its first release at the noise there is."""
    controller, setting = assembly.methods.controller, assembly.setting
    try:
        first = 1 if controller.initial(setting.sampling) is None else 0
        refuse_votes(controller.plan(controller.init(setting, PublicSignals(0, None)), first))
    except ValueError as error:
        raise ConfigError(f"strategy.controller = {assembly.config.strategy.controller!r}: {error}") from error
