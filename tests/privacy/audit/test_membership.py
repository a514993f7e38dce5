"""Membership inference's statistics: known laws, coverage where the claim is true, refusal where units differ."""

import math

import numpy as np
import pytest

from privacy.audit.membership import LEAST_SLOTS, SHARES, attack, exchangeability, membership_bound
from privacy.audit.one_run import epsilon_lower_one_run


def normals(seed: int, shift: float, members: int = 400, others: int = 400) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    return draws.normal(shift, 1, members), draws.normal(0, 1, others)


def test_an_attack_has_the_auc_of_its_normals_and_a_curve_from_none_to_all() -> None:
    found = attack(*normals(0, 1.0, 4000, 4000))
    assert found.auc.estimate == pytest.approx(0.7602, abs=0.02)  # Phi(1 / sqrt 2)
    assert found.auc.lower < 0.7602 < found.auc.upper
    assert found.tpr[0.01].lower < 0.0924 < found.tpr[0.01].upper  # 1 - Phi(2.326 - 1)
    rates = np.array(found.curve)
    assert (np.diff(rates, axis=0) >= 0).all()
    assert rates[-1].tolist() == [1.0, 1.0]


def test_alike_units_are_exchangeable_and_others_are_not() -> None:
    assert exchangeability(*normals(1, 0.0)).holds
    assert not exchangeability(*normals(1, 0.5)).holds
    draws = np.random.default_rng(2)
    wider = exchangeability(draws.normal(0, 2, 800), draws.normal(0, 1, 800))
    assert wider.auc.lower < 0.5 < wider.auc.upper  # the mean rank says nothing of it
    assert not wider.holds


def randomised_response(epsilon: float, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a mechanism that tells of every unit whether it is in, rightly with odds e^epsilon."""
    draws, right = np.random.default_rng(seed), 1 / (1 + math.exp(-epsilon))
    noise = draws.normal(0, 1e-3, (2, count))  # no ties
    return (draws.random(count) < right) + noise[0], (draws.random(count) >= right) + noise[1]


def test_the_bound_covers_the_truth_and_comes_near_it_with_many_units() -> None:
    truth, found = 2.0, []
    for seed in range(30):
        # One bit of each unit: epsilon 2 for one added or removed is at most 4 for one exchanged.
        bound = membership_bound({"bit": randomised_response(2 * truth, seed, 400)}, delta=0.0, alpha=0.2, seed=seed)
        assert bound is not None
        found.append(bound.epsilon_lower)
    assert sum(value > truth for value in found) <= 14  # 6 expected at most; P[Binomial(30, 0.2) > 14] < 0.1 %
    assert np.median(found) > 0.6 * truth


def test_choosing_on_one_half_is_no_peeking() -> None:
    draws = np.random.default_rng(3)
    found = [
        membership_bound(
            {str(number): (draws.normal(size=60), draws.normal(size=60)) for number in range(20)}, delta=0.0, seed=seed
        )
        for seed in range(30)
    ]
    assert sum(bound is not None and bound.epsilon_lower > 0 for bound in found) <= 6  # 2 expected at most


def test_it_chooses_the_better_attack_and_says_what_it_could_have_shown() -> None:
    members, others = normals(4, 12.0)
    useless = np.random.default_rng(5).normal(size=(2, 400))
    bound = membership_bound({"useless": (useless[0], useless[1]), "good": (members, others)}, delta=1e-5)
    assert bound is not None
    assert (bound.score, bound.slots) == ("good", 200)
    assert 0.75 * bound.ceiling < bound.epsilon_lower <= bound.ceiling
    all_right = epsilon_lower_one_run(bound.guesses, bound.guesses, 200, delta=1e-5, alpha=0.05, steps=2)
    assert bound.ceiling == all_right


def test_two_steps_halve_the_bound_and_pay_for_delta() -> None:
    one = epsilon_lower_one_run(95, 100, 200, delta=0.0, alpha=0.05)
    assert epsilon_lower_one_run(95, 100, 200, delta=0.0, alpha=0.05, steps=2) == pytest.approx(one / 2, abs=1e-6)
    assert epsilon_lower_one_run(95, 100, 200, delta=1e-3, alpha=0.05, steps=2) < one / 2
    assert epsilon_lower_one_run(100, 100, 200, delta=0.4, alpha=0.05, steps=2) == 0.0


def test_few_units_give_no_bound_and_bad_input_is_refused() -> None:
    few = 2 * LEAST_SLOTS - 1
    assert membership_bound({"loss": normals(6, 0.0, few, 400)}, delta=1e-5) is None
    assert membership_bound({"loss": normals(6, 0.0, few + 1, 400)}, delta=1e-5) is not None
    with pytest.raises(ValueError, match="same units"):
        membership_bound({"one": normals(6, 0.0), "two": normals(6, 0.0, 399)}, delta=1e-5)
    with pytest.raises(ValueError, match="finite"):
        attack([math.nan], [0.0])
    assert all(0 < first + second <= 1 for first, second in SHARES)
