"""The parts of the strategy that a configuration names are made, or refused, before anything starts."""

import pytest

from server.config.load import ConfigError, parse
from server.config.methods import methods
from strategies.aggregations.factors import Ffa, Plain
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.optimizers.fedavg import FedAvg, FedAvgM


def test_the_defaults_are_dp_lac_and_plain_averaging() -> None:
    made = methods(parse({}))
    assert (made.controller, made.optimizer) == (DpLac(), FedAvg())
    assert made.aggregation == Plain()


def test_names_and_options_are_those_of_the_configuration() -> None:
    strategy = {
        "controller": "fixed",
        "controller-options": {"clip-norm": 3},
        "optimizer": "fedavgm",
        "optimizer-options": {"momentum": 0.5},
        "aggregation": "ffa",
    }
    made = methods(parse({"strategy": strategy, "evaluation": {"every": 5}}))
    assert (made.controller, made.optimizer, made.aggregation) == (Fixed(3.0), FedAvgM(momentum=0.5), Ffa())


def test_every_wrong_name_and_option_is_listed() -> None:
    strategy = {"controller": "fixt", "optimizer-options": {"momentum": 0.9}, "aggregation": "sum"}
    with pytest.raises(ConfigError) as error:
        methods(parse({"strategy": strategy}))
    lines = str(error.value).splitlines()
    assert [line.split(" ")[0].rstrip(":") for line in lines] == [
        "strategy.controller",
        "strategy.optimizer-options.momentum",
        "strategy.aggregation",
    ]


def test_a_controller_that_reads_the_validation_loss_gets_it_every_round() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.every = 2: .*every round"):
        methods(parse({"evaluation": {"every": 2}}))


def test_a_class_that_does_not_do_what_its_role_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.controller = .* no reads_validation"):
        methods(parse({"strategy": {"controller": "strategies.optimizers.fedavg:FedAvg"}}))
    with pytest.raises(ConfigError, match=r"strategy\.optimizer = .* no .*step"):
        methods(parse({"strategy": {"optimizer": "strategies.controllers.fixed:Fixed"}}))
