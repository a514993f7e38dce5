"""Canary units: coins and rows, the attacker's score, and what made-up releases of known law show of them."""

import math

import numpy as np
import pytest
import torch

from privacy.audit.in_run import (
    LENGTH,
    CanaryUnits,
    Observation,
    audit_canaries,
    log_likelihood_ratios,
)

CANARIES = CanaryUnits(1000, 400, bytes(range(32)), 5)
Z, RATE, ROUNDS = 1.0, 0.2, 30


def observations(
    seed: int, noise: float = 1.0, rate: float = RATE, times: float = 1.0, repeated: bool = False
) -> list[Observation]:
    """Releases that are charged for noise multiplier Z and rate RATE, and are made as the arguments say."""
    draws, count = np.random.default_rng(seed), CANARIES.count
    found, kept = [], draws.normal(0, noise, count)
    for round in range(1, ROUNDS + 1):
        drawn = (draws.random(count) < rate) & CANARIES.included
        fresh = kept if repeated else draws.normal(0, noise, count)
        scores = fresh + times * drawn / Z
        found.append(Observation(round, RATE, Z, 10_000, (1.0,) * count, tuple(map(float, scores))))
    return found


def test_coins_are_fair_follow_from_the_secret_and_decide_who_brings_a_row() -> None:
    coins = CANARIES.included
    assert 150 < coins.sum() < 250
    assert (coins == CanaryUnits(7, 400, bytes(range(32)), 9).included).all()
    assert (coins != CanaryUnits(1000, 400, bytes(32), 5).included).any()
    honest, canaries = CANARIES.split(np.array([3, 999, 1000, 1001, 1002, 1399, 1400]))
    assert honest.tolist() == [True, True, False, False, False, False, True]
    assert canaries.tolist() == [number for number in (0, 1, 2, 399) if coins[number]]


def test_rows_are_long_of_one_direction_each_and_the_same_for_every_worker() -> None:
    rows = CANARIES.rows([0, 7], 5000)
    assert torch.allclose(rows.norm(dim=1), torch.tensor(LENGTH), rtol=1e-5)
    assert abs(float(rows[0] @ rows[1])) / LENGTH**2 < 0.1
    assert torch.equal(rows[1], CANARIES.rows([7], 5000)[0])
    assert CANARIES.rows([], 12).shape == (0, 12)


def test_the_score_is_the_log_likelihood_ratio_of_the_mixture() -> None:
    seen = [
        Observation(1, 0.3, 2.0, 100, (1.0, 0.5), (1.2, -0.7)),
        Observation(2, 1.0, 1.0, 100, (1.0, 1.0), (0.4, 2.0)),
    ]
    found = log_likelihood_ratios(seen)

    def density(x: float, mu: float) -> float:
        return math.exp(-((x - mu) ** 2) / 2)

    for canary, mu in ((0, (0.5, 1.0)), (1, (0.25, 1.0))):
        ratio = 1.0
        for one, shift in zip(seen, mu, strict=True):
            x = one.scores[canary]
            ratio *= (1 - one.rate) + one.rate * density(x, shift) / density(x, 0.0)
        assert found[canary] == pytest.approx(math.log(ratio))


def test_right_releases_are_taken_for_what_they_are() -> None:
    for seed in range(10):
        found = audit_canaries(CANARIES, observations(seed), delta=1e-5)
        assert found.wrong == []
        assert found.noise.lower < 1 < found.noise.upper
        assert found.presence.lower < 1 < found.presence.upper
        assert found.presence.upper - found.presence.lower < 1.2
        assert found.epsilon_lower < 7.93  # what these releases cost, by the accountant


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ({"noise": 0.95}, "noise in the releases"),
        ({"rate": 1.0}, "one unit moves"),
        ({"times": 3.0}, "one unit moves"),
        ({"repeated": True}, "share noise"),
    ],
)
def test_wrong_releases_are_named(bug: dict[str, float], said: str) -> None:
    found = audit_canaries(CANARIES, observations(1, **bug), delta=1e-5)  # type: ignore[arg-type]
    assert any(said in text for text in found.wrong)


def test_the_last_model_gives_an_estimate_that_notices_a_tenth_of_the_noise() -> None:
    right, wrong = (audit_canaries(CANARIES, observations(3, noise=noise), delta=1e-5).one_shot for noise in (1.0, 0.1))
    assert right is not None
    assert wrong is not None
    assert right.epsilon_equal_spread < 12 < 50 < wrong.epsilon_equal_spread
    few = CanaryUnits(0, 2, bytes(range(1, 33)), 5)
    assert sum(few.included) == 1
    seen = [Observation(1, 0.5, 1.0, 10, (1.0, 1.0), (0.3, -0.1))]
    assert audit_canaries(few, seen, delta=1e-5).one_shot is None


def test_every_canary_of_every_release_is_judged() -> None:
    seen = observations(7)
    found = audit_canaries(CANARIES, seen, delta=1e-5)
    assert found.included == tuple(map(bool, CANARIES.included))
    assert found.scores == tuple(map(float, log_likelihood_ratios(seen)))
    assert found.guesses <= len(found.scores) == CANARIES.count
    without_last = audit_canaries(CANARIES, seen[:-1], delta=1e-5)
    assert all(a != b for a, b in zip(found.scores, without_last.scores, strict=True))
    assert found.noise != without_last.noise


def test_without_noise_nearly_all_coins_are_guessed() -> None:
    found = audit_canaries(CANARIES, observations(2, noise=0.01), delta=1e-5)
    assert found.correct > 0.95 * found.guesses
    assert 0.6 * found.ceiling < found.epsilon_lower <= found.ceiling


def test_what_cannot_be_a_game_is_refused() -> None:
    one = CanaryUnits(10, 1, bytes(32), 0)
    with pytest.raises(ValueError, match="the same coin"):
        audit_canaries(one, [Observation(1, 0.5, 1.0, 10, (1.0,), (0.0,))], delta=1e-5)
    with pytest.raises(ValueError, match="observations"):
        log_likelihood_ratios([])
    with pytest.raises(ValueError, match="32 bytes"):
        CanaryUnits(10, 1, b"short", 0)
