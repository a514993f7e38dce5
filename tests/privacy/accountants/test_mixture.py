"""Records sampled, units protected: one unit moves the sum by Binomial(G, q) rows, and that is what is charged.

The golden numbers are of other hands: one release by quadrature of max(0, P - exp(e) Q) with ``scipy.integrate.quad``;
several by a convolution of losses that were rounded down (lower end) and up (upper end) to multiples of 2e-4.
"""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as dp_pld
from scipy.stats import binom

from privacy.accountants import composition, pld, selection
from privacy.accountants.calibration import calibrate, filter_commitment, floor_commitment
from privacy.accountants.mixture import Mixture, one_release
from privacy.commitment import Tries
from privacy.errors import UnsupportedEvent
from privacy.events import ExampleLevelPoisson, Poisson

UNITS = 1000
DELTA = 1e-5


def records(rate: float, most: int) -> ExampleLevelPoisson:
    return ExampleLevelPoisson(rate, UNITS, "group:patient", most, UNITS * most)


def cost(rate: float, most: int, multiplier: float, count: int, delta: float = DELTA) -> float:
    return composition.epsilon([(records(rate, most), multiplier, count)], delta)


EPSILONS = np.array([0.1, 0.5, 1.0, 2.0])
QUADRATURE = [
    (4, 0.1, 1.0, True, [1.2058508593e-01, 6.0956419821e-02, 2.8331029510e-02, 7.1484207991e-03]),
    (4, 0.1, 1.0, False, [8.9481145621e-02, 0.0, 0.0, 0.0]),
    (8, 0.05, 2.0, True, [4.7387363379e-02, 6.3573520817e-03, 5.8252101223e-04, 8.0275629294e-06]),
    (8, 0.05, 2.0, False, [3.0856875190e-02, 0.0, 0.0, 0.0]),
    (3, 0.5, 2.5, True, [1.9705917138e-01, 9.5829725731e-02, 3.1705621521e-02, 1.9059139336e-03]),
    (3, 0.5, 2.5, False, [1.8931416234e-01, 6.2427302774e-02, 4.3459724635e-03, 0.0]),
]


@pytest.mark.parametrize(("most", "rate", "z", "remove", "expected"), QUADRATURE)
def test_one_release_in_both_directions_is_what_quadrature_says(
    most: int, rate: float, z: float, remove: bool, expected: list[float]
) -> None:
    found = Mixture(most, rate, z).deltas(EPSILONS, remove=remove)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize(("most", "rate", "z"), [(4, 0.01, 0.5), (30, 0.05, 1.0), (50, 0.5, 3.0)])
def test_thresholds_lie_where_the_loss_has_the_value(most: int, rate: float, z: float) -> None:
    """From one end of the range to the other; beyond it they lie at the ends."""
    mixture = Mixture(most, rate, z)
    first, last = -40.0 * z, float(mixture.rows[-1]) + 40.0 * z
    low, high = mixture.loss(np.array([first, last]))
    losses = np.concatenate([np.linspace(low, high, 1000), high - np.geomspace(1e-9, 1.0, 50) * (high - low)])
    losses.sort()
    found = mixture.threshold(losses)
    np.testing.assert_allclose(mixture.loss(found), losses, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(mixture.threshold(np.array([low - 1.0, high + 1.0])), [first, last], rtol=1e-12)


@pytest.mark.parametrize(
    ("most", "rate", "z", "expected"), [(m, q, z, e) for m, q, z, remove, e in QUADRATURE if remove]
)
def test_the_discretised_release_is_above_that_and_close(
    most: int, rate: float, z: float, expected: list[float]
) -> None:
    found = np.array(one_release(records(rate, most), z, 1e-3).get_delta_for_epsilon(EPSILONS))
    assert (found >= np.array(expected) * (1 - 1e-9)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("most", "rate", "z", "count", "low", "high"),
    [(4, 0.1, 2.0, 3, 2.4231180, 2.4237372), (8, 0.05, 3.0, 5, 1.5608300, 1.5618453)],
)
def test_several_releases_cost_what_a_convolution_brackets(
    most: int, rate: float, z: float, count: int, low: float, high: float
) -> None:
    assert low < cost(rate, most, z, count) < high


def test_divergences_lie_within_the_allowance_for_rounding() -> None:
    for most, rate, z, remove in ((4, 0.02, 0.8, True), (16, 0.1, 2.0, True), (16, 0.1, 2.0, False)):
        epsilons = np.arange(-1.0, 5.0, 1.13)
        found = Mixture(most, rate, z).deltas(epsilons, remove=remove)
        exact = [_with_50_digits(most, rate, z, float(e), remove) for e in epsilons]
        allowed = pld.rounding_error([(records(rate, most), z, 1)]) / 11
        assert max(abs(float(e - mpmath.mpf(float(d)))) for e, d in zip(exact, found, strict=True)) < 0.5 * allowed


def _with_50_digits(most: int, rate: float, z: float, epsilon: float, remove: bool) -> mpmath.mpf:
    with mpmath.workdps(50):
        q, s, e = mpmath.mpf(rate), mpmath.mpf(z), mpmath.mpf(epsilon)
        weights = [mpmath.binomial(most, k) * q**k * (1 - q) ** (most - k) for k in range(most + 1)]
        target = e if remove else -e
        if target <= mpmath.log(weights[0]):
            return 1 - mpmath.exp(e) if remove else mpmath.mpf(0)
        low, high = -60 * s, most + 60 * s
        for _ in range(170):
            x = (low + high) / 2
            ratio = sum(w * mpmath.exp((k * x - mpmath.mpf(k * k) / 2) / s**2) for k, w in enumerate(weights))
            low, high = (x, high) if mpmath.log(ratio) < target else (low, x)

        def above(y: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc(y / (s * mpmath.sqrt(2))) / 2

        if remove:
            return sum(w * above(low - k) for k, w in enumerate(weights)) - mpmath.exp(e) * above(low)
        return above(-low) - mpmath.exp(e) * sum(w * above(k - low) for k, w in enumerate(weights))


def test_it_is_the_distribution_of_dp_accounting() -> None:
    theirs = dp_pld.from_mixture_gaussian_mechanism(
        1.5, np.arange(4), binom.pmf(np.arange(4), 3, 0.05), value_discretization_interval=1e-2
    )
    ours = one_release(records(0.05, 3), 1.5, 1e-2)
    for count in (1, 50):
        a, b = (one.self_compose(count).get_epsilon_for_delta(DELTA) for one in (ours, theirs))
        assert a == pytest.approx(b, rel=1e-7)


@pytest.mark.parametrize(
    ("rate", "z", "count"), [(0.05, 1.0944, 200), (0.01, 0.7, 1000), (0.3, 5.0, 40), (1.0, 9.0, 9)]
)
def test_one_record_a_unit_costs_what_poisson_sampling_of_units_costs(rate: float, z: float, count: int) -> None:
    plain = composition.epsilon([(Poisson(rate, UNITS, "group:patient"), z, count)], DELTA)
    assert cost(rate, 1, z, count) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(("z", "count"), [(40.0, 20), (0.7, 1)], ids=["usual", "rows further out than noise reaches"])
def test_with_everyone_drawn_a_unit_is_one_row_of_length_g(z: float, count: int) -> None:
    plain = composition.epsilon([(Poisson(1.0, UNITS, "group:patient"), z / 8, count)], DELTA)
    assert cost(1.0, 8, z, count) == pytest.approx(plain, rel=2e-3)
    assert cost(1.0, 8, z, count) >= plain * (1 - 1e-9)


@pytest.mark.parametrize(
    ("most", "rate", "z", "count"), [(2, 0.02, 1.5, 200), (4, 0.05, 3.0, 50), (16, 0.02, 9.0, 100)]
)
def test_it_costs_more_than_one_record_and_less_than_group_privacy(
    most: int, rate: float, z: float, count: int
) -> None:
    found, one = cost(rate, most, z, count), cost(rate, 1, z, count)
    assert one < found
    assert found < _group_privacy(most, rate, z, count)
    together = Poisson(1 - (1 - rate) ** most, UNITS, "group:patient")  # whoever joins brings all of its rows
    assert found < composition.epsilon([(together, z / most, count)], DELTA)
    assert cost(rate, most - 1, z, count) < found < cost(rate * 1.1, most, z, count)


def _group_privacy(most: int, rate: float, z: float, count: int) -> float:
    """(G e, (exp(G e) - 1) / (exp(e) - 1) d) from (e, d) of a record; the best d for DELTA, by bisection."""
    low, high = -200.0, math.log(DELTA)
    for _ in range(12):
        middle = (low + high) / 2
        e = cost(rate, 1, z, count, max(math.exp(middle), 1e-12))
        total = middle + math.log(math.expm1(most * e) / math.expm1(e)) if e > 0 else middle
        low, high = (middle, high) if total < math.log(DELTA) else (low, middle)
    return most * cost(rate, 1, z, count, max(math.exp(low), 1e-12))


@pytest.mark.parametrize("angle", [0.0, 1.0, math.pi / 2, 3.0])
@pytest.mark.parametrize("remove", [True, False])
def test_rows_in_any_directions_are_dominated_by_their_lengths(angle: float, remove: bool) -> None:
    """Two rows in the plane; and, with the second of them short, a unit that has less than it may have."""
    rate, z, epsilon = 0.3, 1.2, 0.4
    grid = np.linspace(-9.0, 9.0, 721)
    x, y = np.meshgrid(grid, grid)

    def density(a: float, b: float) -> np.ndarray:
        return np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * z * z)) / (2 * math.pi * z * z)

    bound = float(Mixture(2, rate, z).deltas(np.array([epsilon]), remove=remove)[0])
    for length in (1.0, 0.3):
        second = (length * math.cos(angle), length * math.sin(angle))
        both = (1.0 + second[0], second[1])
        absent, alone, joint = (1 - rate) ** 2, rate * (1 - rate), rate * rate
        p = absent * density(0, 0) + alone * (density(1, 0) + density(*second)) + joint * density(*both)
        q = density(0, 0)
        p, q = (p, q) if remove else (q, p)
        found = np.maximum(0.0, p - math.exp(epsilon) * q).sum() * (grid[1] - grid[0]) ** 2
        assert found <= bound * (1 + 1e-3)
        if angle == 0.0 and length == 1.0:
            assert found == pytest.approx(bound, rel=1e-3)


def test_calibrated_noise_keeps_the_target_and_no_less_does() -> None:
    """By the accountant above; z of a record would be 0.9681, and of eight together 7.7448."""
    for most, expected in ((1, 0.9681), (8, 4.6921)):
        z = calibrate(2.0, DELTA, records(0.02, most), 200)
        assert z == pytest.approx(expected, abs=2e-4)
        assert cost(0.02, most, z, 200) <= 2.0 < cost(0.02, most, z - 2e-3, 200)


@pytest.mark.parametrize(("most", "rate", "z"), [(64, 0.02, 0.3), (256, 0.5, 1.0), (16, 1.0, 0.3), (8, 1e-6, 0.3)])
def test_noise_that_is_far_too_weak_overflows_nothing(most: int, rate: float, z: float) -> None:
    """A search of the noise passes by it; divergences stay between 0 and 1 and above those of fewer records."""
    epsilons = np.concatenate([np.linspace(-5.0, 20.0, 50), np.geomspace(21.0, 1e6, 50)])
    for remove in (True, False):
        found, fewer = (Mixture(count, rate, z).deltas(epsilons, remove=remove) for count in (most, most // 2))
        assert ((found >= fewer - 1e-15) & (found <= 1.0)).all()


def test_a_schedule_of_different_noise_is_composed() -> None:
    steps = [(records(0.02, 4), z, 10) for z in (2.0, 3.0)]
    assert cost(0.02, 4, 3.0, 20) < composition.epsilon(steps, DELTA) < cost(0.02, 4, 2.0, 20)
    commitment, z = floor_commitment(0.5, DELTA, records(0.02, 2), 4, profile=(1.0, 1.0, 2.0, 2.0))
    assert [step.count for step in commitment.floor] == [2, 2]
    assert composition.tightest_bound(commitment.floor, DELTA) == (composition.epsilon(commitment.floor, DELTA), "pld")
    assert commitment.floor[1].noise_multiplier == pytest.approx(2 * z)


def test_renyi_accounting_knows_one_row_a_unit_only() -> None:
    with pytest.raises(UnsupportedEvent, match=r"sampling of records .* 'pld'"):
        composition.epsilon([(records(0.02, 4), 2.0, 10)], DELTA, "rdp")


def test_filters_tuning_and_replacement_refuse() -> None:
    with pytest.raises(UnsupportedEvent, match="a floor instead of a filter"):
        filter_commitment(2.0, DELTA, records(0.02, 4), 10)
    with pytest.raises(UnsupportedEvent, match="no tuning"):
        selection.epsilon(Tries(2.0, 1.0), [[(records(0.02, 4), 2.0, 10)]], DELTA)
    with pytest.raises(UnsupportedEvent, match="'add_remove' only"):
        composition.epsilon([(records(0.02, 4), 2.0, 10)], DELTA, adjacency="replace_one")
    with pytest.raises(UnsupportedEvent, match="a delta of at least 1e-12"):
        calibrate(2.0, 1e-13, records(0.02, 4), 10)


def test_noise_is_calibrated_where_every_record_is_drawn() -> None:
    z = calibrate(2.0, DELTA, records(1.0, 4), 5)
    assert 1.99 < cost(1.0, 4, z, 5) <= 2.0
