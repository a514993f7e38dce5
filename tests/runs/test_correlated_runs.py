"""Runs with noise that is correlated over rounds, whole: their epsilon, who took part, what a kill leaves, refusals."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest

from privacy.accountants import buffered
from privacy.accountants.factorisation import optimise, price_strategy
from privacy.events import CyclicPoisson, Poisson
from privacy.ledger.ledger import Ledger
from privacy.randomness.correlated import CorrelatedNoise
from privacy.randomness.sampling import CohortSampler
from server.config.load import ConfigError, parse
from server.run_folder.names import LEDGER_FILE, SAMPLING_SECRET
from server.run_folder.telemetry import read_metrics
from server.runs.commitment import choose_correlation
from simulations.cli.calibrate.correlated import plain_prices
from simulations.engines.inprocess import run_inprocess

CLIENTS, RATE, ROUNDS, BANDS, EPSILON, DELTA = 40, 0.2, 9, 4, 6.0, 1e-3


def table(cache: Path | str = "", **privacy: Any) -> dict[str, Any]:
    return {
        "rounds": ROUNDS,
        "clients": CLIENTS,
        "sampling-rate": RATE,
        "privacy": {"epsilon": EPSILON, "delta": DELTA, "noise-correlation": "banded", "bands": BANDS, **privacy},
        "strategy": {"controller": "fixed", "aggregation": "ffa"},
        "model": {"name": "random:bert", "rank": 2, "max-length": 16},
        "data": {"validation-records": 10, "test-records": 10, "records-per-client": 3, "cache": str(cache)},
        "engine": {"kind": "inprocess", "workers": 2},
    }


BUFFERED = {"noise-correlation": "blt", "bands": 0, "buffers": 2}


@pytest.mark.nightly
def test_a_run_costs_what_calibrate_says_and_nobody_takes_part_out_of_turn(tmp_path: Path, monkeypatch: Any) -> None:
    statement, promised = audited_run(table(tmp_path / "cache"), tmp_path / "run", BANDS, monkeypatch)
    assert statement["correlation"]["coefficients"] == list(optimise(BANDS, ROUNDS))
    assert promised["bands"] == BANDS


def test_so_does_one_of_buffers_as_one_gaussian(tmp_path: Path, monkeypatch: Any) -> None:
    statement, promised = audited_run(table(tmp_path / "cache", **BUFFERED), tmp_path / "run", 5, monkeypatch)
    strategy = buffered.optimise(2, ROUNDS, 5)
    assert statement["correlation"] == strategy.to_json()
    assert promised["buffers"] == 2
    mu = strategy.sensitivity(ROUNDS, 5) / promised["noise_multiplier"]
    assert statement["epsilon"] == pytest.approx(dp_accounting.get_epsilon_gaussian(1.0 / mu, DELTA), rel=1e-3)


def audited_run(config: dict[str, Any], folder: Path, groups: int, monkeypatch: Any) -> tuple[Any, Any]:
    """privacy.json of a run that kept its turns, and the line of `lacquer plan --correlated` that foretold it."""
    asked: list[np.ndarray] = []
    draw = CohortSampler.draw

    def watched(sampler: CohortSampler, *given: Any, **more: Any) -> Any:
        asked.append((cohort := draw(sampler, *given, **more)).ids)
        return cohort

    monkeypatch.setattr(CohortSampler, "draw", watched)
    folder.mkdir()
    run_inprocess(parse(config), folder)
    statement = json.loads((folder / "privacy.json").read_text())
    said = plain_prices(EPSILON, DELTA, CLIENTS, RATE, ROUNDS)
    name = "buffers" if "buffers" in config["privacy"] else "bands"
    lines = (line for of in ("tried", "buffered") for line in said[of])
    promised = next(one for one in lines if one.get(name) == config["privacy"][name])
    assert statement["epsilon"] == pytest.approx(promised["epsilon"], abs=1.01e-4)  # rounded up
    assert statement["epsilon"] == statement["epsilon_spent"] <= EPSILON
    assert set(statement["noise_multipliers"]) == {promised["noise_multiplier"]}
    group = CohortSampler.load(folder / SAMPLING_SECRET).group_of(CLIENTS, groups)
    assert len(asked) == ROUNDS
    assert all((group[ids] == turn % groups).all() for turn, ids in enumerate(asked))
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        assert [(event.sampling.turn, event.correlation.since) for event in ledger.events] == [
            (turn, 0) for turn in range(ROUNDS)
        ]
    norms = [record.noise_norm for record in read_metrics(folder) if record.phase == "round"]
    assert norms[0] < norms[1], "what a round takes off of the noise before it is noise of its own"
    return statement, promised


class Killed(BaseException):
    """What kill -9 would do."""


@pytest.mark.parametrize("noise", [{}, BUFFERED])
def test_a_run_that_is_killed_between_charge_and_noise_goes_on_with_the_next_turn(
    noise: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    config = parse(table(tmp_path / "cache", **noise))
    folder, draw, left = tmp_path / "run", CorrelatedNoise.draw, 4

    def dying(noise: CorrelatedNoise, blocks: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return draw(noise, blocks)

    monkeypatch.setattr(CorrelatedNoise, "draw", dying)
    folder.mkdir()
    with pytest.raises(Killed):
        run_inprocess(config, folder)
    monkeypatch.setattr(CorrelatedNoise, "draw", draw)
    run_inprocess(config, folder, keys={"resume": str(folder)})
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        events = ledger.events
        assert [event.sampling.turn for event in events] == list(range(ROUNDS))
        assert [event.round for event in events] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
        assert [event.correlation.since for event in events] == [0] * 5 + [5] * 4
        assert [charge.released_at is None for charge in ledger.charges] == [turn == 4 for turn in range(ROUNDS)]
        assert ledger.epsilon_spent() == pytest.approx(ledger.epsilon_guaranteed())
        assert ledger.epsilon_guaranteed() <= EPSILON
    results = json.loads((folder / "results.json").read_text())
    assert results["rounds_done"] == ROUNDS - 1, "a lost round is not made up for"


@pytest.mark.nightly
def test_nought_bands_take_the_number_with_the_least_noise() -> None:
    sampling, correlation = choose_correlation(parse(table(bands=0)))
    assert correlation is not None
    best = min((1, 2, 4, 5), key=lambda bands: price_strategy(bands, EPSILON, DELTA, CLIENTS, RATE, ROUNDS).error)
    assert correlation.bands == best
    assert sampling.expected_units == pytest.approx(RATE * CLIENTS)


@pytest.mark.nightly
def test_nought_buffers_take_the_fewest_that_do() -> None:
    config = parse(table(**BUFFERED | {"buffers": 0, "epsilon": 8.0, "delta": 1e-2}))
    assert choose_correlation(config) == (CyclicPoisson(1.0, CLIENTS, groups=5), buffered.optimise(1, ROUNDS, 5))


@pytest.mark.parametrize("noise", [{}, BUFFERED | {"buffers": 0}])
@pytest.mark.nightly
def test_a_run_for_which_independent_noise_is_better_is_an_ordinary_one(noise: dict[str, Any]) -> None:
    assert choose_correlation(parse(table(**{"bands": 0, "epsilon": 1.0, **noise}))) == (Poisson(RATE, CLIENTS), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": {"controller": "quantile"}}, "strategy.controller = 'quantile' must be 'fixed'"),
        ({"strategy": {"controller": "fixed", "aggregation": "rolora"}}, "must train the same values"),
        ({"strategy": {"controller": "fixed", "aggregation": "fedsvd"}}, "must train the same values"),
        ({"strategy": {"controller": "fixed", "optimizer": "fedadam"}}, "do not add releases up"),
        ({"strategy": {"controller": "mine:Own"}}, "strategy.controller = 'mine:Own' must be 'fixed'"),
        ({"rounds": 3}, "privacy.bands = 4 must be at most 3"),
        ({"sampling-rate": 0.3}, "privacy.bands = 4 must be at most 3"),
        (
            {"privacy": table(**BUFFERED)["privacy"], "strategy": {"controller": "quantile"}},
            "must be 'fixed' with privacy.noise-correlation = 'blt'",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({**table(), **change})


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"mode": "filter"}, "privacy.mode = 'filter' must be 'floor'"),
        ({"noise": "discrete"}, "privacy.noise = 'discrete' must be 'gaussian'"),
        ({"noise": "insecure-zero", "non-private": True}, "must be 'gaussian'"),
        ({"trust": "secagg"}, "privacy.trust = 'secagg' must be 'server'"),
        ({"unit": "record"}, "privacy.unit = 'record' must be 'client'"),
        ({"noise-correlation": "none"}, "privacy.bands = 4 needs privacy.noise-correlation = 'banded'"),
        ({"noise-correlation": "blt"}, "privacy.bands = 4 needs privacy.noise-correlation = 'banded', got 'blt'"),
        ({"buffers": 2}, "privacy.buffers = 2 needs privacy.noise-correlation = 'blt', got 'banded'"),
        (BUFFERED | {"buffers": 9}, "less than or equal to 8"),
        (BUFFERED | {"mode": "filter"}, "'floor' with privacy.noise-correlation = 'blt'"),
        (BUFFERED | {"noise": "discrete"}, "'gaussian' with privacy.noise-correlation = 'blt'"),
        (BUFFERED | {"trust": "secagg"}, "'server' with privacy.noise-correlation = 'blt'"),
        (BUFFERED | {"unit": "record"}, "'client' with privacy.noise-correlation = 'blt'"),
    ],
)
def test_so_is_a_guarantee_it_does_not_go_with(privacy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(table(**privacy))


def test_cohorts_of_a_run_do_not_meet_within_the_bands(tmp_path: Path) -> None:
    """By the secret in its folder alone: who is in a cohort is in none of the next three."""
    config = parse(table())
    sampling, _ = choose_correlation(config)
    sampler = CohortSampler.create()
    cohorts = [set(sampler.draw(type(sampling)(**{**vars(sampling), "turn": t}), t + 1).ids) for t in range(ROUNDS)]
    assert all(not one & other for one, other in pairwise(cohorts))
    assert all(not one & other for one, other in zip(cohorts, cohorts[3:], strict=False))
