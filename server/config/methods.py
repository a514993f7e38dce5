"""The strategy's parts that a configuration names; light to import, so `lacquer run` checks them before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.config.load import ConfigError
from server.config.schema import RunConfig
from strategies import AGGREGATIONS, CONTROLLERS, OPTIMIZERS
from strategies.aggregations.aggregation import Aggregation
from strategies.controllers.controller import Controller
from strategies.optimizers.optimizer import Optimizer
from strategies.plugins import Option, build
from strategies.published.raw_rows import ExactCounts, RawRule, UnsoundRule


@dataclass(frozen=True)
class Methods:
    """The controller, the optimizer and the aggregation of a run, built from their names in its configuration."""

    controller: Controller[object]
    optimizer: Optimizer
    aggregation: Aggregation

    @property
    def steered_by_validation(self) -> bool:
        """Whether the controller reads the public validation loss, so that it steers what is released."""
        return bool(self.controller.reads_validation)


def methods(config: RunConfig) -> Methods:
    """Build the controller, the optimizer and the aggregation that a configuration names.

    Raises:
        ConfigError: naming every unknown name, wrong option, and method that does not fit the run.
    """
    chosen, wrong = config.strategy, []

    def part(role: type, table: Mapping[str, str], name: str, options: Mapping[str, Option]) -> Any:
        key = f"strategy.{role.__name__.lower()}"
        try:
            made = build(key, table, name, options)
        except ValueError as error:
            wrong.append(str(error))
            return None
        missing = [member for member in vars(role) if not member.startswith("_") and not hasattr(made, member)]
        if missing:
            wrong.append(f"{key} = {name!r}: is no {role.__name__}, it has no {', '.join(missing)}")
            return None
        return made

    controller = part(Controller, CONTROLLERS, chosen.controller, chosen.controller_options)
    optimizer = part(Optimizer, OPTIMIZERS, chosen.optimizer, chosen.optimizer_options)
    aggregation = part(Aggregation, AGGREGATIONS, chosen.aggregation, chosen.aggregation_options)
    if aggregation is not None and aggregation.individual and config.is_single_site:
        wrong.append(
            f"strategy.aggregation = {chosen.aggregation!r}: combines several sites, and this is one; take plain or ffa"
        )
    elif aggregation is not None and aggregation.individual and config.privacy.unit == "client":
        of_sums = ", ".join(name for name in AGGREGATIONS if not build("", AGGREGATIONS, name, {}).individual)
        wrong.append(
            f"strategy.aggregation = {chosen.aggregation!r}: needs every client's own factors, but client-level "
            "privacy releases nothing but the noisy sum over clients. It is sound only where each client adds "
            "record-level noise before it sends its factors (privacy.unit = 'record' or 'group'); for client-level "
            f"privacy take one of {of_sums}"
        )
    if isinstance(controller, UnsoundRule) and (unfit := _why_unfit(controller, config)):
        wrong.append(f"strategy.controller = {chosen.controller!r}: {unfit}")
    every = config.evaluation.every
    if controller is not None and controller.reads_validation and every > 1:
        wrong.append(f"evaluation.every = {every}: {chosen.controller} reads the validation loss of every round; set 1")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return Methods(controller, optimizer, aggregation)


def _why_unfit(rule: UnsoundRule, config: RunConfig) -> str | None:
    """Why a run cannot have a rule without a guarantee."""
    over_clients, privacy = config.privacy.unit == "client", config.privacy
    if isinstance(rule, RawRule) and over_clients:
        return (
            "reads raw gradients of records, and clients send none; it runs at record level only (privacy.unit = "
            "'record' or 'group'). For clients, DP-Adam-AC's rule is strategies.published.client_adam_ac:ClientAdamAc "
            "and RLDP's sound form is rl"
        )
    if not isinstance(rule, ExactCounts):
        return None
    if not over_clients:
        return "counts norms of clients; it runs at client level only (privacy.unit = 'client')"
    if not privacy.non_private:
        return rule.refusal()
    if (privacy.mode, privacy.noise_correlation) != ("floor", "none"):
        return "exact counts need privacy.mode = 'floor' and privacy.noise-correlation = 'none'"
    return None
