"""What can be known to fail is refused before anything starts: methods, budget, model, data.

Each check is the function that the run itself will call, so a run that passes here does not fail there for a setting.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from server.config import ConfigError, RunConfig


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
    if problems:
        raise ConfigError("\n".join(problems))


def check_noise(config: RunConfig) -> tuple[float, ...]:
    """Check the methods and the budget; the effective noise multiplier of every round, as calibrated.

    Raises:
        ConfigError: a method that is not there, or a budget that cannot be kept.
    """
    # Imported here: torch, scipy and the data readers take seconds, and `lacquer --help` needs none of them.
    from server.budget import commit
    from server.methods import methods

    return commit(config, methods(config).controller)[1]


def check_data(config: RunConfig) -> None:
    """Check model and data, and prepare the data set.

    Raises:
        ValueError: naming the setting.
    """
    from client.data import prepare
    from client.model_files import locate
    from server.data_spec import data_spec

    if not config.model.name.startswith("random:"):  # weights that are made, not found
        locate(config.model.name)
    prepare(data_spec(config))


def check_silos(config: RunConfig) -> None:
    """Check a federation of silos; each calibrates for its own records when it first takes part.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    from server.silo_assembly import assemble_federation

    assemble_federation(config)


def check_silo(config: RunConfig) -> tuple[float, ...]:
    """Check all of one silo that can be checked without sampling: data, model, methods, budget.

    Returns:
        The effective noise multiplier of every step.

    Raises:
        ConfigError, ValueError: naming the setting.
    """
    from client.model_files import locate
    from server.silo_assembly import assemble_silo

    if not config.model.name.startswith("random:"):
        locate(config.model.name)
    return assemble_silo(config).assembly.setting.noise_multipliers
