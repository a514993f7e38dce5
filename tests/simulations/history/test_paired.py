"""Estimates over seeds: Student's interval and test, Holm's correction, and what a test could have found."""

import math

import numpy as np
import pytest
from scipy import stats

from simulations.history.paired import Estimate, number_tested, paired_difference, told_apart


def test_an_interval_is_students() -> None:
    found = Estimate.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.302653 * 1.0 / 3**0.5, rel=1e-6)
    assert found.p_value == pytest.approx(float(stats.ttest_1samp([1.0, 2.0, 3.0], 0.0).pvalue))
    alone = Estimate.of([1.0])
    assert (alone.half, alone.p_value, alone.smallest()) == (None, None, None)


def test_differences_are_paired_by_the_seeds_that_both_have() -> None:
    found = paired_difference({0: 1.0, 1: 5.0, 2: 9.0}, {1: 4.0, 0: 1.5, 7: 0.0})
    assert found is not None
    assert found.values == (-0.5, 1.0)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_values_that_are_all_the_same_are_certain() -> None:
    assert Estimate.of([0.25, 0.25]).p_value == 0.0
    assert Estimate.of([0.0, 0.0]).p_value == 1.0


def with_p(p: float) -> Estimate:
    """Two values whose test has this p: with one degree of freedom t = cot(pi p / 2)."""
    t = 1 / math.tan(math.pi * p / 2)
    return Estimate.of([t - 1.0, t + 1.0])


def test_comparisons_of_a_table_are_corrected_by_holm() -> None:
    assert with_p(0.02).p_value == pytest.approx(0.02)
    # 0.05 / 3 = 0.0167, then 0.05 / 2 = 0.025, then 0.05
    assert told_apart([with_p(0.03), with_p(0.01), with_p(0.04)]) == [False, True, False]
    assert told_apart([with_p(0.024), with_p(0.01), with_p(0.04)]) == [True, True, True]
    assert told_apart([with_p(0.02), with_p(0.03), with_p(0.04)]) == [False, False, False]
    one_seed = Estimate.of([9.0])
    assert told_apart([with_p(0.04), one_seed, None]) == [True, False, False]
    assert number_tested([with_p(0.04), one_seed, None]) == 1


@pytest.mark.parametrize(("seeds", "comparisons"), [(3, 1), (5, 1), (5, 4)])
def test_the_smallest_difference_is_found_four_times_of_five(seeds: int, comparisons: int) -> None:
    """The test is repeated on values drawn with exactly this mean and the deviation that was measured."""
    generator = np.random.default_rng(seeds)
    measured = generator.normal(size=seeds)
    smallest = Estimate.of(list(measured)).smallest(comparisons)
    assert smallest is not None
    drawn = generator.normal(smallest, measured.std(ddof=1), size=(20_000, seeds))
    found = (stats.ttest_1samp(drawn, 0.0, axis=1, alternative="greater").pvalue < 0.05 / comparisons / 2).mean()
    assert found == pytest.approx(0.8, abs=0.01)
