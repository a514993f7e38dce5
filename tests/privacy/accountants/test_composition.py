"""Epsilon by every accountant against golden numbers, exact formulas, and each other."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from privacy.accountants import composition, pld
from privacy.accountants.composition import epsilon, tightest_bound
from privacy.commitment import FloorStep
from privacy.errors import UnsupportedEvent
from privacy.events import Component, ExampleLevelPoisson, Poisson, ReleaseEvent, Step

N = 100_000

# rate, noise multiplier, rounds, delta, PLD at 1e-4, PLD at 1e-3, RDP
GOLDEN = [
    (1.0, 1.0, 1, 1e-5, 4.3772, 4.3772, 4.7285),
    (1.0, 10.0, 100, 1e-5, 4.3772, 4.3772, 4.7285),
    (0.01, 1.0, 1000, 1e-5, 1.8282, 1.8289, 2.1014),
    (0.01, 0.5, 1000, 1e-5, 13.3608, 13.3610, 15.4721),
    (256 / 60000, 1.1, 14063, 1e-5, 2.3818, 2.3906, 2.5967),
    (0.02, 0.6, 200, 1e-5, 7.2602, 7.2602, 8.6162),
    (0.05, 1.0, 200, 1e-5, 4.7659, 4.7660, 5.3679),
    (0.1, 1.0, 200, 1e-5, 9.9713, 9.9713, 11.0631),
    (0.1, 2.0, 200, 1e-5, 3.3597, 3.3598, 3.6797),
    (0.1, 0.3, 10, 1e-5, 35.6614, 35.6614, 41.1715),
    (0.001, 0.6, 100_000, 1e-6, 6.9612, 6.9861, 7.7564),
    (0.2, 2.0, 10, 1e-5, 1.6177, 1.6177, 1.8416),
    (0.05, 1.0, 200, 1e-10, 8.1010, 8.1011, 8.7393),
    (0.05, 1.0, 200, 1e-2, 2.2031, 2.2032, 2.7851),
    (0.01, 0.2, 100, 1e-5, 75.097, 75.097, 87.988),
    (0.0005, 8.0, 1_000_000, 1e-9, 0.396, 1.2408, 0.3693),
]


def check_pld(run: list[Step], delta: float, interval: float, expected: float) -> None:
    """The composition is the golden one, and our epsilon adds no more than the allowance for floating point."""
    distribution = pld.compose(composition.merge_steps(run), "add_remove", interval)
    assert pld.epsilon_of(distribution, delta) == pytest.approx(expected, abs=1e-3)
    ours = epsilon(run, delta, interval=interval)
    assert expected - 1e-3 <= ours
    assert ours <= (1.03 if run[0][2] == 1_000_000 else 1.0) * expected + 1e-3


WEAK_NOISE = 0.55
"""A loss distribution of less noise is spread over so many points that it takes a second."""


@pytest.mark.parametrize(
    ("rate", "z", "rounds", "delta", "fine", "coarse", "rdp"),
    [pytest.param(*row, marks=[pytest.mark.run] if row[1] < WEAK_NOISE else []) for row in GOLDEN],
)
def test_golden_numbers(
    rate: float,
    z: float,
    rounds: int,
    delta: float,
    fine: float,
    coarse: float,
    rdp: float,
) -> None:
    run: list[Step] = [(Poisson(rate, N), z, rounds)]
    check_pld(run, delta, 1e-3, coarse)
    assert epsilon(run, delta, "rdp") == pytest.approx(rdp, abs=1e-3)


def nightly_but(chosen: tuple[int, ...], column: int) -> list[Any]:
    """Setting and golden number of every row; all but the `chosen` rows wait for the night."""
    marks = [pytest.mark.run if row in chosen else pytest.mark.nightly for row in range(len(GOLDEN))]
    return [pytest.param(*row[:4], row[column], marks=mark) for row, mark in zip(GOLDEN, marks, strict=True)]


@pytest.mark.parametrize(("rate", "z", "rounds", "delta", "fine"), nightly_but((2, 4, 6, 8), 4))
def test_golden_numbers_at_the_finer_interval(rate: float, z: float, rounds: int, delta: float, fine: float) -> None:
    check_pld([(Poisson(rate, N), z, rounds)], delta, 1e-4, fine)


@pytest.mark.run
@pytest.mark.parametrize("row", [2, 4])
def test_refinement_comes_within_a_thousandth_of_the_finer_interval(row: int) -> None:
    rate, z, rounds, delta, fine, *_ = GOLDEN[row]
    assert epsilon([(Poisson(rate, N), z, rounds)], delta) == pytest.approx(fine, rel=1e-3)


@pytest.mark.nightly
def test_refinement_reaches_a_million_rounds() -> None:
    """With the allowance for floating point, which is four tenths of delta here: less than RDP's 0.3383."""
    assert 0.329 < epsilon([(Poisson(0.0005, N), 8.0, 1_000_000)], 1e-9) < 0.3383


def exact_delta(rate: float, z: float, eps: float) -> float:
    """Hockey-stick divergence of (1-q) N(0, z^2) + q N(1, z^2) and N(0, z^2), the larger of both directions."""
    bound = (math.exp(eps) - 1.0 + rate) / rate
    cut = z * z * math.log(bound) + 0.5
    remove = (1 - rate) * norm.sf(cut, scale=z) + rate * norm.sf(cut, 1, z) - math.exp(eps) * norm.sf(cut, scale=z)
    add = 0.0
    if math.exp(-eps) > 1.0 - rate:
        cut = z * z * math.log((math.exp(-eps) - 1.0 + rate) / rate) + 0.5
        mixture = (1 - rate) * norm.cdf(cut, scale=z) + rate * norm.cdf(cut, 1, z)
        add = norm.cdf(cut, scale=z) - math.exp(eps) * mixture
    return float(max(remove, add))


@pytest.mark.run
@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.floats(0.01, 0.99), st.floats(0.6, 5.0), st.sampled_from([1e-3, 1e-5, 1e-7]))
def test_one_release_is_the_exact_hockey_stick(rate: float, z: float, delta: float) -> None:
    eps = epsilon([(Poisson(rate, N), z, 1)], delta, interval=1e-3)
    assert exact_delta(rate, z, eps) <= delta * (1 + 1e-6), "an upper bound"
    assert eps == 0.0 or exact_delta(rate, z, eps * (1 - 2e-3)) >= delta, "and a tight one"


def log_delta(mu: float, eps: float) -> float:
    """Logarithm of delta of a Gaussian mechanism of sensitivity over noise ``mu``, in closed form."""
    upper = float(norm.logcdf(-eps / mu + mu / 2))
    return upper + math.log(-math.expm1(eps + norm.logcdf(-eps / mu - mu / 2) - upper))


def exact_gaussian(mu: float, delta: float) -> float:
    return float(brentq(lambda eps: log_delta(mu, eps) - math.log(delta), 0.0, 30.0, xtol=1e-12))


@pytest.mark.parametrize(("rounds", "z"), [(100, 10.0), (1000, 30.0), (20_000, 140.0)])
@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-11, 1e-12])
def test_floating_point_does_not_take_composition_below_the_truth(rounds: int, z: float, delta: float) -> None:
    """T Gaussians composed by FFT against the closed form."""
    one = (Poisson(1.0, N), z, 1)
    composed = pld.compose([one], "add_remove", 1e-3).self_compose(rounds)
    allowance = pld.rounding_error([(*one[:2], rounds)])
    found = pld.epsilon_of(composed, delta, allowance)
    truth = exact_gaussian(math.sqrt(rounds) / z, delta)
    assert found == math.inf if allowance > delta / 2 else truth <= found < 1.1 * truth


def off_by(rounds: int, mu: float) -> float:
    """By how much composition misses delta where delta is too small for the discretisation to show, of either sign."""
    composed = pld.compose([(Poisson(1.0, N), math.sqrt(rounds) / mu, 1)], "add_remove", 1e-3).self_compose(rounds)
    cut_off = composed.get_delta_for_epsilon(100.0)  # the mass at infinity: tails left out on purpose
    deltas = [1e-14, 1e-15, 1e-16]
    found = [composed.get_delta_for_epsilon(exact_gaussian(mu, delta)) - cut_off for delta in deltas]
    return float(max(abs(each - delta) for each, delta in zip(found, deltas, strict=True)))


@pytest.mark.parametrize("rounds", [1_000, 20_000])
def test_floating_point_needs_its_allowance_and_stays_within_half_of_it(rounds: int) -> None:
    """The sign of the rounding depends on the processor; its size does not, and is above the least delta here."""
    worst = max(off_by(rounds, mu) for mu in (0.8, 1.0, 1.25, 1.5, 2.0))
    allowance = pld.rounding_error([(Poisson(1.0, N), 1.0, rounds)])
    assert max(1e-15, allowance / 500) < worst < allowance / 2


runs = st.lists(
    st.tuples(st.sampled_from([0.01, 0.05, 0.3, 1.0]), st.floats(0.7, 12.0), st.integers(1, 300)),
    min_size=1,
    max_size=3,
)


@pytest.mark.run
@settings(derandomize=True, max_examples=8, deadline=None)
@given(runs, st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_pld_is_never_above_rdp(run: list[tuple[float, float, int]], delta: float) -> None:
    steps = [(Poisson(rate, N), z, count) for rate, z, count in run]
    pld, rdp = epsilon(steps, delta), epsilon(steps, delta, "rdp")
    # A conversion of RDP may reach epsilon 0 where the discretised loss distribution stops just above it.
    assert pld <= rdp + 2e-3
    assert tightest_bound(steps, delta) == min((pld, "pld"), (rdp, "rdp"))


@pytest.mark.run
@settings(derandomize=True, max_examples=6, deadline=None)
@given(st.floats(0.01, 0.5), st.floats(0.8, 4.0), st.integers(1, 100))
def test_epsilon_grows_with_rate_and_rounds_and_falls_with_noise(rate: float, z: float, rounds: int) -> None:
    def at(rate: float, z: float, rounds: int) -> float:
        return epsilon([(Poisson(rate, N), z, rounds)], 1e-5, interval=1e-3)

    here = at(rate, z, rounds)
    assert at(rate * 1.1, z, rounds) >= here
    assert at(rate, z, rounds + 10) >= here
    assert at(rate, z * 1.1, rounds) <= here


def test_a_joint_release_is_one_event_and_not_two() -> None:
    """Two looks at one cohort, accounted as two subsampled events, under-report: 4.263 against the true 4.384."""
    sampling = Poisson(0.1, 1000)
    update, z = 1.85, 1.7618
    query = (z**-2 - update**-2) ** -0.5
    joint = ReleaseEvent(
        "round", 0, sampling, (Component("update", 1.0, update, 5), Component("loss", 2.0, 2.0 * query, 1))
    )
    assert joint.effective_noise_multiplier == pytest.approx(z, rel=1e-12)
    true = epsilon([joint] * 200, 1e-5, "rdp")
    split = epsilon([(sampling, update, 200), (sampling, query, 200)], 1e-5, "rdp")
    assert true == pytest.approx(4.384, abs=1e-3)
    assert split == pytest.approx(4.263, abs=1e-3)


def test_metrics_in_the_joint_event_cost_what_they_should() -> None:
    assert epsilon([(Poisson(0.1, 1000), 1 / math.hypot(1 / 1.7618, 1 / 10), 200)], 1e-5) == pytest.approx(
        4.09, abs=4e-3
    )


@pytest.mark.run
@pytest.mark.parametrize(
    ("noise", "expected"),
    [(5.0, (2.166, 4.099, 8.061)), (10.0, (2.042, 4.025, 8.015)), (20.0, (2.011, 4.006, 8.003))],
)
def test_cost_of_the_initial_histogram(noise: float, expected: tuple[float, ...]) -> None:
    for z, value in zip((3.0046, 1.7618, 1.1298), expected, strict=True):
        run = [(Poisson(1.0, 1000), noise, 1), (Poisson(0.1, 1000), z, 200)]
        assert epsilon(run, 1e-5) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(("z", "expected"), [(3.0046, 2.002), (1.7618, 4.001), (1.1298, 8.000)])
def test_cost_of_a_histogram_of_the_first_cohort(z: float, expected: float) -> None:
    assert epsilon([(Poisson(0.1, 1000), 5.0, 1), (Poisson(0.1, 1000), z, 200)], 1e-5) == pytest.approx(
        expected, abs=1e-3
    )


def test_replacing_moves_a_sum_twice_as_far() -> None:
    everyone = [(Poisson(1.0, N), 2.0, 1)]
    assert epsilon(everyone, 1e-5) == pytest.approx(1.993, abs=1e-3)
    assert epsilon(everyone, 1e-5, adjacency="replace_one") == pytest.approx(4.3772, abs=1e-3)
    assert epsilon(everyone, 1e-5, "rdp", adjacency="replace_one") == pytest.approx(4.7285, abs=1e-3)


def test_what_cannot_be_bounded_is_refused_with_a_remedy() -> None:
    run = [(Poisson(0.1, 100), 1.0, 1)]
    with pytest.raises(UnsupportedEvent, match=r"rdp .*'pld'"):
        epsilon(run, 1e-5, "rdp", adjacency="replace_one")
    by_pld = epsilon(run, 1e-5, adjacency="replace_one")
    assert tightest_bound(run, 1e-5, adjacency="replace_one") == (by_pld, "pld")


def test_bad_arguments_are_refused() -> None:
    run = [(Poisson(0.1, 100), 1.0, 1)]
    with pytest.raises(ValueError, match="accountant must be one of"):
        epsilon(run, 1e-5, "moments")
    with pytest.raises(ValueError, match="adjacency must be one of"):
        epsilon(run, 1e-5, adjacency="swap")
    with pytest.raises(ValueError, match="delta must be in"):
        epsilon(run, 0.0)
    with pytest.raises(ValueError, match="noise_multiplier must be >= 0"):
        epsilon([(Poisson(0.1, 100), -1.0, 1)], 1e-5)
    with pytest.raises(ValueError, match="count must be an integer"):
        epsilon([(Poisson(0.1, 100), 1.0, 0)], 1e-5)
    with pytest.raises(ValueError, match="one unit of one population"):
        epsilon([*run, (Poisson(0.1, 100, "record"), 1.0, 1)], 1e-5)


def test_limits_fail_safe() -> None:
    run = [(Poisson(0.1, 1000), 1.0, 10)]
    assert epsilon([], 1e-5) == 0.0
    assert epsilon([(Poisson(0.1, 1000), 0.0, 1)], 1e-5) == math.inf
    assert epsilon([(Poisson(0.1, 1000), 0.0, 1)], 1e-5, "rdp") == math.inf
    assert epsilon(run, 1e-15) == math.inf
    assert epsilon(run, 1e-15, "rdp") < math.inf
    assert epsilon(run, 0.5) == 0.0
    assert tightest_bound(run, 1e-15)[1] == "rdp"


def test_events_steps_and_floor_steps_are_the_same_run() -> None:
    sampling = Poisson(0.1, 1000)
    events = [ReleaseEvent("round", t, sampling, (Component("update", 1.0, 2.0, 5),)) for t in range(20)]
    steps = [(sampling, 2.0, 20)]
    assert epsilon(events, 1e-5) == epsilon(steps, 1e-5) == epsilon([FloorStep("round", sampling, 2.0, 20)], 1e-5)
    assert composition.merge_steps(events) == composition.merge_steps(steps)


@pytest.mark.run
def test_different_steps_compose_like_one_list() -> None:
    """A schedule of rates and multipliers, whose order does not matter."""
    steps = [(Poisson(0.05, N), 1.5, 50), (Poisson(0.1, N), 2.5, 50), (Poisson(1.0, N), 20.0, 1)]
    assert epsilon(steps, 1e-5) == pytest.approx(epsilon(steps[::-1], 1e-5), rel=1e-6)
    assert epsilon(steps, 1e-5) > max(epsilon([step], 1e-5) for step in steps)


def test_the_curve_holds_at_every_delta() -> None:
    steps = [(Poisson(0.1, 1000), 2.0, 50)]
    deltas = (1e-9, 1e-5, 1e-4)
    curve = composition.curve(steps, deltas, suits=1e-5)
    assert [delta for delta, _ in curve] == list(deltas)
    assert np.all(np.diff([value for _, value in curve]) < 0)
    for delta, value in curve:
        assert value == pytest.approx(epsilon(steps, delta), rel=2e-3)


def test_the_curve_says_nothing_at_deltas_that_floating_point_decides() -> None:
    steps = [(Poisson(0.1, 1000), 2.0, 100_000)]
    unsure = pld.rounding_error(steps)
    assert unsure == pytest.approx(100_010 * 4e-16)
    (_, low), (_, high) = composition.curve(steps, (1.9 * unsure, 2.1 * unsure), suits=1e-5)
    assert (math.isfinite(low), math.isfinite(high)) == (False, True)


def test_the_curve_of_sampled_records_is_that_of_add_and_remove() -> None:
    steps = [(ExampleLevelPoisson(0.05, 1000, "group:patient", 4, 4000), 3.0, 5)]
    assert composition.curve(steps, (1e-5,), suits=1e-5)[0][1] == pytest.approx(epsilon(steps, 1e-5), rel=1e-3)


def test_versions_name_the_library() -> None:
    assert composition.version("pld").startswith("dp_accounting 0.6")
    with pytest.raises(ValueError, match="accountant must be"):
        composition.version("moments")
