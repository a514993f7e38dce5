"""Planning: the numbers behind `lacquer calibrate`."""

import math

import pytest

from privacy.accountants.calibration import calibrate
from privacy.accountants.scenarios import Option, Refusal, Scenario, alternatives, by_accountant, price
from privacy.events import Poisson

SETTING = Scenario(2.0, 1e-5, 1000, 0.1, 20, histogram=10.0, queries=(20.0,))


@pytest.mark.run
def test_a_price_is_a_calibration() -> None:
    now = price("now", SETTING)
    z = calibrate(2.0, 1e-5, Poisson(0.1, 1000), 20, extra=[(Poisson(1.0, 1000), 10.0, 1)], queries=(20.0,))
    assert now.noise_multiplier == z
    assert now.noise_on_mean == pytest.approx(z / 100)
    assert now.noise_over_run == pytest.approx(z / 100 / math.sqrt(20))
    assert now.break_even_dimension == pytest.approx((100 / z) ** 2)


@pytest.mark.nightly
def test_what_a_change_buys() -> None:
    now = price("now", SETTING)
    found = {option.name: option for option in alternatives(now)}
    assert list(found) == ["2 x clients", "4 x clients", "4 x clients, rate/4", "2 x rate", "rounds/2", "2 x rounds"]
    options = {name: option for name, option in found.items() if isinstance(option, Option)}
    twice = options["2 x clients"]
    assert twice.noise_multiplier == twice.setting.noise_multiplier(), "it is not calibrated anew, but could be"
    assert options["4 x clients"].noise_on_mean == pytest.approx(now.noise_on_mean / 4)
    assert options["4 x clients, rate/4"].cohort == now.cohort
    assert options["4 x clients, rate/4"].noise_multiplier < now.noise_multiplier
    assert options["2 x rate"].noise_multiplier > now.noise_multiplier
    assert options["rounds/2"].noise_multiplier < now.noise_multiplier < options["2 x rounds"].noise_multiplier


@pytest.mark.nightly
def test_impossible_changes_are_said_to_be() -> None:
    """Four times the clients make delta too large; half the rounds need no noise worth the name."""
    with pytest.warns(UserWarning, match="smaller is the custom"):
        setting = Scenario(25.0, 6e-4, 1000, 1.0, 3)
    found = {option.name: option for option in alternatives(price("now", setting))}
    assert isinstance(found["4 x clients"], Refusal)
    assert "delta must be < 1/population" in found["4 x clients"].reason
    assert isinstance(found["rounds/2"], Refusal)
    assert "protects no one" in found["rounds/2"].reason


@pytest.mark.run
def test_a_change_that_changes_nothing_is_left_out() -> None:
    assert "2 x rate" not in {option.name for option in alternatives(price("now", Scenario(2.0, 1e-5, 100, 1.0, 2)))}


def test_every_accountant_speaks() -> None:
    found = by_accountant(SETTING, 2.0, ("pld", "rdp", "gdp-approx"))
    assert all(isinstance(value, float) for value in found.values())
    replaced = Scenario(4.0, 1e-5, 1000, 0.1, 20, adjacency="replace_one")
    assert "no bound for Poisson" in str(by_accountant(replaced, 2.0, ("rdp",))["rdp"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"delta": 0.1}, "delta must be < 1/population"),
        ({"clients": 0}, "clients must be an integer"),
        ({"rate": 2.0}, "rate must be in"),
        ({"rounds": 0}, "rounds must be an integer"),
        ({"histogram": -1.0}, "histogram must be > 0"),
        ({"queries": (0.0,)}, "query must be > 0"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    usual: dict[str, object] = {"epsilon": 4.0, "delta": 1e-5, "clients": 1000, "rate": 0.1, "rounds": 20}
    with pytest.raises(ValueError, match=message):
        Scenario(**{**usual, **change})  # type: ignore[arg-type]
