"""Runs of random settings keep their epsilon by the accountants of others: dp_accounting's and Opacus'."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from opacus.accountants import PRVAccountant

from privacy.accountants.composition import epsilon
from server.config.load import ConfigError, parse
from server.config.methods import methods
from server.config.schema import RunConfig
from server.runs.commitment import commit_clients

CONFIGURATIONS, PARTS = 200, 4
PRV_ERROR = 0.01
"""Of Opacus' epsilon, either way."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def random_config(generator: np.random.Generator) -> RunConfig:
    """Settings of a run, over the ranges that runs have."""
    clients = round(10 ** generator.uniform(2, 5.5))
    controller = str(generator.choice(["fixed", "percentile", "quantile", "dp-lac"]))
    privacy = {
        "epsilon": round(10 ** generator.uniform(-0.5, 1.2), 2),
        "delta": float(clients**-1.1 * 10 ** generator.uniform(-3, 0)),
    }
    table = {
        "clients": clients, "sampling-rate": float(10 ** generator.uniform(math.log10(5 / clients), 0)),
        "rounds": round(10 ** generator.uniform(0, 2.5)), "privacy": privacy, "strategy": {"controller": controller},
    }  # fmt: skip
    return parse(table)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_run_spends_more_than_it_says_by_other_accountants(part: int) -> None:
    generator = np.random.default_rng([20261128, part])
    held = refused = 0
    while held < CONFIGURATIONS // PARTS:
        config = random_config(generator)
        try:
            commitment = commit_clients(config, methods(config).controller).commitment
        except ConfigError:  # no noise keeps it
            refused += 1
            continue
        held += 1
        delta, steps = config.privacy.delta, commitment.floor
        stated = epsilon(steps, delta)
        told = f"{config.to_table()}: {steps}"
        assert stated <= config.privacy.epsilon, told
        theirs = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
        prv = PRVAccountant()
        for step in steps:
            sampled = PoissonSampledDpEvent(step.sampling.rate, GaussianDpEvent(step.noise_multiplier))
            theirs.compose(sampled, step.count)
            prv.history.append((step.noise_multiplier, step.sampling.rate, step.count))
        exact = theirs.get_epsilon(delta)
        assert exact <= 1.001 * config.privacy.epsilon + 1e-3, told
        assert stated >= 0.999 * exact - 1e-3, told
        assert prv.get_epsilon(delta, eps_error=PRV_ERROR) - 2 * PRV_ERROR <= stated, told
    assert refused <= held, "most of what is drawn can be run"
