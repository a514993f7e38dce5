"""Which level of sampling is less noisy: equal work, the site's own counts, noise as the accountant calibrates it."""

import numpy as np
import pytest

from privacy.accountants.calibration import calibrate
from privacy.events import ExampleLevelPoisson, Poisson
from simulations.planning.sampling_levels import compare

UNIT = "group:patient"
SIZES = np.array([1] * 100 + [2] * 100 + [6] * 100)
RUN = {"gradients": 50, "steps": 10, "epsilon": 2.0, "delta": 1e-4}


def test_both_levels_take_equally_many_gradients_and_their_own_noise() -> None:
    (found,) = compare(SIZES, UNIT, **RUN, caps=(4,))
    assert (found.cap, found.records, found.rate) == (4, 700, 50 / 700)
    assert found.user_multiplier == calibrate(2.0, 1e-4, Poisson(50 / 700, 300, UNIT), 10)
    assert found.example_multiplier == calibrate(2.0, 1e-4, ExampleLevelPoisson(50 / 700, 300, UNIT, 4, 700), 10)
    assert found.user_noise == pytest.approx(found.user_multiplier / (300 * 50 / 700))  # of units: a row has several
    assert found.example_noise == found.example_multiplier / 50
    assert found.better == ("example" if found.example_noise < found.user_noise else "user")


def test_with_one_record_a_unit_they_are_one_thing() -> None:
    (found,) = compare(SIZES, UNIT, **RUN, caps=(1,))
    assert found.records == 300
    assert found.example_noise == pytest.approx(found.user_noise, rel=2e-3)
    assert found.better == ""


@pytest.mark.run  # calibrates six times
@pytest.mark.nightly  # most of a minute
def test_caps_are_powers_of_two_up_to_the_largest_unit_that_leave_enough_records() -> None:
    assert [one.cap for one in compare(SIZES, UNIT, **RUN | {"steps": 1})] == [1, 2, 4, 6]
    assert [one.cap for one in compare(SIZES, UNIT, **RUN | {"steps": 1, "gradients": 501})] == [4, 6]
    with pytest.raises(ValueError, match="at most the 900 records there are under the largest cap, got 901"):
        compare(SIZES, UNIT, **RUN | {"gradients": 901})
