"""The strategy's parts that a configuration names; light to import, so `lacquer run` checks them before it starts."""

from dataclasses import dataclass

from server.config import ConfigError, RunConfig
from strategies import AGGREGATIONS, CONTROLLERS, OPTIMIZERS
from strategies.aggregation.aggregation import Aggregation
from strategies.controller import Controller
from strategies.optimizer import Optimizer
from strategies.plugins import build


@dataclass(frozen=True)
class Methods:
    """The strategy's parts, named by the configuration."""

    controller: Controller[object]
    optimizer: Optimizer
    aggregation: Aggregation


def methods(config: RunConfig) -> Methods:
    """Controller, optimizer and aggregation; ConfigError names a wrong name or option."""
    chosen = config.strategy
    try:
        return Methods(
            build("strategy.controller", CONTROLLERS, chosen.controller, chosen.controller_options),
            build("strategy.optimizer", OPTIMIZERS, chosen.optimizer, chosen.optimizer_options),
            build("strategy.aggregation", AGGREGATIONS, chosen.aggregation, chosen.aggregation_options),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
