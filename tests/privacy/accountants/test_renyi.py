"""The filter's closed form against dp_accounting, and its conversion."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.accountants import renyi
from privacy.errors import UnsupportedEvent
from privacy.events import Poisson


def theirs(rate: float, z: float, order: int) -> float:
    accountant = RdpAccountant([order])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)))
    return float(accountant.rdp[0])


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.floats(1e-3, 1.0), st.floats(0.3, 20.0), st.integers(2, 64))
def test_the_closed_form_is_dp_accountings(rate: float, z: float, order: int) -> None:
    ours = renyi.subsampled_gaussian_rdp(rate, z, order)
    assert ours == pytest.approx(theirs(rate, z, order), rel=1e-6, abs=1e-12)
    assert ours >= theirs(rate, z, order) * (1 - 1e-9) - 1e-12


def test_nothing_cancels_at_tiny_rates() -> None:
    """At order 2, log A is log(1 + q^2 (exp(1/z^2) - 1)) exactly, far below what a sum near 1 can resolve."""
    for rate in (1e-5, 1e-7, 1e-9):
        exact = math.log1p(rate**2 * math.expm1(1 / 20.0**2))
        assert renyi.subsampled_gaussian_rdp(rate, 20.0, 2) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("rate", "z"), [(1e-4, 30.0), (1e-6, 5.0), (1e-3, 100.0)])
def test_divergences_of_the_accountant_never_fall_below_the_closed_form(rate: float, z: float) -> None:
    """dp_accounting's log A cancels here; a divergence rounded to 0 or below would convert to epsilon 0."""
    found = renyi._divergences(Poisson(rate, 10**6), z, "add_remove", tuple(DEFAULT_RDP_ORDERS))
    assert np.all(found > 0)
    for order, value in zip(DEFAULT_RDP_ORDERS, found, strict=True):
        if order >= 2 and float(order).is_integer():
            assert value >= renyi.subsampled_gaussian_rdp(rate, z, int(order))


def test_the_closed_form_is_rounded_up() -> None:
    """At order 2 it is log(1 + q^2 (exp(1/z^2) - 1)), here to fifty digits."""
    with mpmath.workdps(50):
        for rate, z in itertools.product((0.01, 0.05, 0.3, 0.7), (0.5, 1.0, 1.7, 4.0)):
            exact = mpmath.log(1 + mpmath.mpf(rate) ** 2 * mpmath.expm1(1 / mpmath.mpf(z) ** 2))
            found = mpmath.mpf(renyi.subsampled_gaussian_rdp(rate, z, 2))
            assert exact < found < exact * (1 + mpmath.mpf("3e-12"))


def test_everyone_sampled_is_the_plain_gaussian() -> None:
    assert renyi.subsampled_gaussian_rdp(1.0, 2.0, 7) == pytest.approx(7 / 8, rel=1e-10)
    assert renyi.subsampled_gaussian_rdp(0.5, 0.0, 7) == math.inf


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.integers(2, 200), st.floats(0.05, 20.0), st.sampled_from([1e-9, 1e-5, 1e-3]))
def test_the_conversion_is_dp_accountings_and_inverts(order: int, rho: float, delta: float) -> None:
    eps = renyi.epsilon_of(rho, order, delta)
    assert eps == pytest.approx(max(0.0, float(compute_epsilon([order], [rho], delta)[0])), abs=1e-12)
    if eps > 0:
        assert renyi.rho_budget(eps, order, delta) == pytest.approx(rho, abs=1e-12)


def test_nothing_spent_is_epsilon_zero() -> None:
    assert renyi.epsilon_of(0.0, 5, 1e-5) == 0.0


def test_rho_of_halves_the_multiplier_under_replacement() -> None:
    assert renyi.rho_of(Poisson(1.0, 10), 2.0, 5) == pytest.approx(5 / 8, rel=1e-8)
    assert renyi.rho_of(Poisson(1.0, 10), 2.0, 5, "replace_one") == pytest.approx(5 / 2, rel=1e-8)
    assert renyi.rho_of(Poisson(1.0, 10), 0.0, 5, "replace_one") == math.inf


@pytest.mark.parametrize(
    ("adjacency", "reason"), [("replace_one", "no bound for"), ("zero_out", "cohorts of everyone")]
)
def test_rho_of_refuses_what_has_no_bound(adjacency: str, reason: str) -> None:
    with pytest.raises(UnsupportedEvent, match=reason):
        renyi.rho_of(Poisson(0.1, 100), 2.0, 5, adjacency)


def test_excluded_orders_are_silent_and_other_warnings_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="absl"):
        renyi.epsilon([(Poisson(0.01, 1000), 0.31, 10)], 1e-5, "add_remove")
        assert not caplog.records
        compute_epsilon([2.0], [-1.0], 1e-5)
    assert "Negative Renyi divergence" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 2), "rate must be in"),
        ((0.5, -1.0, 2), "noise_multiplier must be >= 0"),
        ((0.5, 1.0, 1), "order must be an integer >= 2"),
        ((0.5, 1.0, 2.5), "order must be an integer >= 2"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[float, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        renyi.subsampled_gaussian_rdp(*arguments)


def test_there_is_no_conversion_at_order_one() -> None:
    with pytest.raises(ValueError, match="order must be an integer >= 2"):
        renyi.conversion_cost(1, 1e-5)


def test_one_release_is_charged_by_its_adjacency() -> None:
    everybody = Poisson(1.0, 1000)
    assert renyi.rho_of(everybody, 1.0, 6) == pytest.approx(3.0)  # order / (2 z^2)
    assert renyi.rho_of(everybody, 1.0, 6, "zero_out") == pytest.approx(3.0)
    assert renyi.rho_of(everybody, 1.0, 6, "replace_one") == pytest.approx(12.0)
    assert renyi.rho_of(everybody, 0.0, 6) == math.inf
    with pytest.raises(ValueError, match="adjacency must be"):
        renyi.rho_of(everybody, 1.0, 6, "swap")
    with pytest.raises(UnsupportedEvent, match="cohorts of everyone only"):
        renyi.rho_of(Poisson(0.5, 1000), 1.0, 6, "zero_out")
