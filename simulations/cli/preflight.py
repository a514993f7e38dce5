"""What can be known to fail is refused before anything starts: methods, budget, model, data.

Each check is the function that the run itself will call, so a run that passes here does not fail there for a setting.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from server.config.load import ConfigError
from server.config.schema import RunConfig
from simulations.presets.asked import Asked


def check_run(asked: Asked) -> str:
    """Check whatever was asked for, as far as that goes without training or sampling.

    Returns:
        What should be known before it starts; empty where the progress says all of it.

    Raises:
        ConfigError, ValueError: naming every setting that cannot work.
    """
    config = asked.run
    if asked.phases is not None:
        from server.runs.phases import PhasesRun

        return PhasesRun(asked.phases).promise.sentence
    if config.alone:
        check_silo(config)
    elif config.deployed:
        raise ConfigError("data.held-by = 'nodes': the records are on a federation's nodes; use `lacquer deploy`")
    else:
        check(config)
    return ""


def check(config: RunConfig) -> None:
    """Check all that can be checked without training or sampling; prepares the data set, which the run then opens.

    Raises:
        ConfigError: one line for every setting that cannot work.
    """
    problems: list[str] = []

    @contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # ConfigError is one
            problems.append(str(error))

    if config.privacy.unit != "client":
        with collected():
            check_silos(config)
    else:
        with collected():
            check_noise(config)
        with collected():
            check_data(config)
        with collected():
            check_adapter(config)
    if problems:  # two checks may stumble over the same setting
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def check_noise(config: RunConfig) -> tuple[float, ...]:
    """Check the methods and the budget; the effective noise multiplier of every round, as calibrated.

    Raises:
        ConfigError: a method that is not there, or a budget that cannot be kept.
    """
    # Imported here: torch, scipy and the data readers take seconds, and `lacquer --help` needs none of them.
    from server.config.methods import methods
    from server.runs.commitment import commit

    return commit(config, methods(config).controller)[1]


def check_data(config: RunConfig) -> None:
    """Check model and data, and prepare the data set.

    Raises:
        ValueError: naming the setting.
    """
    from client.data.prepare import prepare
    from client.models.files import locate
    from server.runs.assembly import data_spec

    if not config.model.name.startswith("random:"):  # weights that are made, not found
        locate(config.model.name)
    prepare(data_spec(config))


def check_sources(config: RunConfig) -> None:
    """Look for the files that the data are read from, and read nothing.

    Raises:
        ValueError: naming the setting whose files are not there.
    """
    from client.data.catalog.corpora import CORPORA, files
    from client.data.sources import FILE_KINDS, check_hub_id, existing_file
    from client.data.spec import NOTES

    for option, source in (("data.source", config.data.source), ("data.test-source", config.data.test_source)):
        kind = source.partition(":")[0]
        if kind in CORPORA:
            files(source, option)
        elif kind in FILE_KINDS:
            existing_file(source, option)
        elif source and source != NOTES:
            check_hub_id(source, option)


def check_adapter(config: RunConfig) -> None:
    """Check that the base model has what the adapter names, and that the aggregation fits the adapter in every round.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    from client.models.base import load_base
    from client.models.lora import adapter_layout
    from server.config.methods import methods
    from server.runs.assembly import lora_spec
    from strategies.aggregations.aggregation import Adapters
    from strategies.plugins import explained

    chosen, aggregation = config.strategy.aggregation, methods(config).aggregation
    adapters = Adapters(config.model.rank, config.clients, config.seed)
    try:
        parts = [aggregation.part(adapters, number) for number in range(1, config.rounds + 1)]
    except ValueError as error:
        options = vars(aggregation) if hasattr(aggregation, "__dict__") else ()
        raise ConfigError(explained("strategy.aggregation", chosen, options, error)) from error
    model, _ = load_base(config.model.name, config.model.task, 2)  # how many labels there are changes a size, no name
    try:
        layout = adapter_layout(model, lora_spec(config, model, parts[0]))
    except ValueError as error:
        if isinstance(error, ConfigError) or str(error).startswith("model."):  # it names its key
            raise
        layers = f", model.layers = {config.model.layers}" if config.model.layers else ""
        raise ConfigError(f"model.targets = {config.model.targets!r}{layers}: {error}") from error
    for part in set(parts):
        part.layout(layout)


def check_silos(config: RunConfig) -> None:
    """Check a cross-silo run; each site calibrates for its own records when it first takes part.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    from server.runs.record_level_assembly import assemble_federation

    check_adapter(config)
    assemble_federation(config)


def check_silo(config: RunConfig) -> tuple[float, ...]:
    """Check all of a run at one site that can be checked without sampling: data, model, methods, budget.

    Returns:
        The effective noise multiplier of every step.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    from client.models.files import locate
    from server.runs.record_level_assembly import assemble_record_level

    if not config.model.name.startswith("random:"):
        locate(config.model.name)
    check_adapter(config)
    return assemble_record_level(config).assembly.setting.noise_multipliers
