"""Runs with noise that is correlated over rounds, whole: their epsilon, who took part, what a kill leaves, refusals."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from privacy.accountants.factorisation import optimise, priced
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.randomness.correlated import CorrelatedNoise
from privacy.randomness.sampling import CohortSampler
from server.config.load import ConfigError, parse
from server.run_folder.names import LEDGER_FILE, SAMPLING_SECRET
from server.run_folder.telemetry import read_metrics
from server.runs.commitment import correlated
from simulations.cli.app import app
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


def test_a_run_costs_what_calibrate_says_and_nobody_takes_part_out_of_turn(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[np.ndarray] = []
    draw = CohortSampler.draw

    def watched(sampler: CohortSampler, *given: Any, **more: Any) -> Any:
        asked.append((cohort := draw(sampler, *given, **more)).ids)
        return cohort

    monkeypatch.setattr(CohortSampler, "draw", watched)
    (tmp_path / "run").mkdir()
    run_inprocess(parse(table(tmp_path / "cache")), tmp_path / "run")
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    arguments = f"calibrate --epsilon {EPSILON} --delta {DELTA} --clients {CLIENTS} --rate {RATE} --rounds {ROUNDS}"
    said = CliRunner().invoke(app, [*arguments.split(), "--correlated", "--json"])
    assert said.exit_code == 0, said.output
    promised = next(one for one in json.loads(said.output)["tried"] if one["bands"] == BANDS)
    assert statement["epsilon"] == pytest.approx(promised["epsilon"], abs=1.01e-4)  # rounded up
    assert statement["epsilon"] == statement["epsilon_spent"] <= EPSILON
    assert set(statement["noise_multipliers"]) == {promised["noise_multiplier"]}
    assert statement["correlation"]["coefficients"] == list(optimise(BANDS, ROUNDS))
    group = CohortSampler.load(tmp_path / "run" / SAMPLING_SECRET).group_of(CLIENTS, BANDS)
    assert len(asked) == ROUNDS
    assert all((group[ids] == turn % BANDS).all() for turn, ids in enumerate(asked))
    with Ledger.open(tmp_path / "run" / LEDGER_FILE, read_only=True) as ledger:
        assert [(event.sampling.turn, event.correlation.since) for event in ledger.events] == [
            (turn, 0) for turn in range(ROUNDS)
        ]
    norms = [record.noise_norm for record in read_metrics(tmp_path / "run") if record.phase == "round"]
    assert norms[0] < norms[1], "what a round takes off of the noise before it is noise of its own"


class Killed(BaseException):
    """What kill -9 would do."""


def test_a_run_that_is_killed_between_charge_and_noise_goes_on_with_the_next_turn(
    tmp_path: Path, monkeypatch: Any
) -> None:
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
        run_inprocess(parse(table(tmp_path / "cache")), folder)
    monkeypatch.setattr(CorrelatedNoise, "draw", draw)
    run_inprocess(parse(table(tmp_path / "cache")), folder, keys={"resume": str(folder)})
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        events = ledger.events
        assert [event.sampling.turn for event in events] == list(range(ROUNDS))
        assert [event.round for event in events] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
        assert [event.correlation.since for event in events] == [0] * 5 + [5] * 4
        assert [charge.released_at is None for charge in ledger.charges] == [turn == 4 for turn in range(ROUNDS)]
        assert ledger.spent() == pytest.approx(ledger.guaranteed())
        assert ledger.guaranteed() <= EPSILON
    results = json.loads((folder / "results.json").read_text())
    assert results["rounds_done"] == ROUNDS - 1, "a lost round is not made up for"


def test_nought_bands_take_the_number_with_the_least_noise() -> None:
    sampling, correlation = correlated(parse(table(bands=0)))
    assert correlation is not None
    best = min((1, 2, 4, 5), key=lambda bands: priced(bands, EPSILON, DELTA, CLIENTS, RATE, ROUNDS).error)
    assert correlation.bands == best
    assert sampling.expected_units == pytest.approx(RATE * CLIENTS)


def test_a_run_for_which_independent_noise_is_better_is_an_ordinary_one() -> None:
    assert correlated(parse(table(bands=0, epsilon=1.0))) == (Poisson(RATE, CLIENTS), None)


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
    ],
)
def test_so_is_a_guarantee_it_does_not_go_with(privacy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(table(**privacy))


def test_cohorts_of_a_run_do_not_meet_within_the_bands(tmp_path: Path) -> None:
    """By the secret in its folder alone: who is in a cohort is in none of the next three."""
    config = parse(table())
    sampling, _ = correlated(config)
    sampler = CohortSampler.fresh()
    cohorts = [set(sampler.draw(type(sampling)(**{**vars(sampling), "turn": t}), t + 1).ids) for t in range(ROUNDS)]
    assert all(not one & other for one, other in pairwise(cohorts))
    assert all(not one & other for one, other in zip(cohorts, cohorts[3:], strict=False))
