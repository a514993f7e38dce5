"""DP-Adam-AC's own rule over clients: it follows exact norms, at the update's whole noise, and only where marked."""

import numpy as np
import pytest
from scipy.stats import norm

from privacy.events import Poisson
from server.config.load import parse
from server.config.methods import methods
from server.runs.commitment import commit_clients
from strategies.controllers.percentile import Percentile
from strategies.published.client_adam_ac import ClientAdamAc
from tests.cases.population import Population, constant, lognormal, setting_of

SAMPLING = Poisson(0.1, 1000)
NAME = "strategies.published.client_adam_ac:ClientAdamAc"
SMALL = {"rounds": 3, "clients": 1000, "sampling-rate": 0.1, "strategy": {"controller": NAME}}


def test_one_round_finds_the_percentile_where_the_sound_form_has_noise(quick_ledger_for) -> None:
    found = {}
    for rule in (ClientAdamAc(clip_norm=8.0), Percentile(clip_norm=8.0, source="histogram", history=0.0)):
        population = Population(quick_ledger_for(SAMPLING, 6), norms=lognormal(1.25, 0.5))
        states = population.follow(rule, setting_of(6))
        found[type(rule)] = np.array([state.bound for state in states[1:]])
    clipped = norm.sf(np.log(found[ClientAdamAc] / 1.25) / 0.5)
    assert clipped == pytest.approx(np.full(6, 0.2), abs=0.09)  # of about 100 norms, 2 standard deviations
    assert clipped[-1] == pytest.approx(0.2, abs=0.05)  # of about 500
    assert np.ptp(np.log(found[ClientAdamAc][2:])) < np.ptp(np.log(found[Percentile][2:])) / 2


def test_the_rate_is_exact_and_the_buffer_holds_the_last_norms(quick_ledger_for) -> None:
    population = Population(quick_ledger_for(SAMPLING, 9), norms=constant(2.0))
    states = population.follow(ClientAdamAc(clip_norm=1.0, buffer=250, low_rate=0.1, high_rate=0.3), setting_of(9))
    assert [state.clip_rate for state in states[1:3]] == [1.0, pytest.approx(0.2, abs=1e-9)]
    assert states[1].bound == pytest.approx(2.0, rel=0.05)  # within one bin of the grid
    assert states[1].scale == 0.995
    held = [sum(map(sum, state.buffer)) for state in states[1:]]
    assert all(250 <= count <= 250 + 140 for count in held[3:])


def test_an_empty_cohort_changes_nothing(quick_ledger_for) -> None:
    nobody = Poisson(1e-9, 1000)
    population = Population(quick_ledger_for(nobody, 2), sampling=nobody)
    states = population.follow(ClientAdamAc(), setting_of(2, sampling=nobody))
    assert states[2] == states[0]


def test_the_update_has_all_of_the_noise_and_the_ledger_is_told_of_the_counts() -> None:
    config = parse(SMALL | {"privacy": {"non-private": True}})
    rule = methods(config).controller
    noise = commit_clients(config, rule)
    info = setting_of(3, noise.multipliers[0])
    plan = rule.plan(rule.init(info, None), info, 1)
    assert plan.noise_multiplier == noise.multipliers[0] > 0.3
    assert noise.commitment.floor[0].noise_multiplier == pytest.approx(plan.effective_noise_multiplier)
    assert plan.effective_noise_multiplier < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"reads the norms of the clients' updates; set privacy.non-private = true"),
        ({"privacy": {"non-private": True, "mode": "filter"}}, r"exact counts need privacy.mode = 'floor'"),
        ({"privacy": {"non-private": True, "unit": "record"}}, r"client level only \(privacy.unit = 'client'\)"),
    ],
)
def test_it_is_refused_where_nothing_marks_the_run(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods(parse(SMALL | change))


def test_the_papers_rules_over_records_name_the_one_over_clients() -> None:
    for module, rule in (("adam_ac", "PublishedAdamAc"), ("rldp", "PublishedRldp")):
        strategy = {"controller": f"strategies.published.{module}:{rule}"}
        with pytest.raises(ValueError, match=r"clients send none.*client_adam_ac:ClientAdamAc and RLDP's"):
            methods(parse(SMALL | {"privacy": {"non-private": True}, "strategy": strategy}))
