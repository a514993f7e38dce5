"""The statistics that judge the planner, against values worked out by hand."""

import pytest

from simulations.benchmarks.planning.validation import GROUPS, rows_of, spearman, weighted


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # weights 3 and 1
    assert weighted([([1, 2, 3, 4], [1, 2, 4, 3]), ([1, 2], [2, 1])]) == pytest.approx((3 * 0.8 - 1) / 4)


def test_no_setting_is_counted_twice() -> None:
    found = [(group.file, row["setting"]) for group in GROUPS for row in rows_of(group)]
    assert len(found) == len(set(found))
    assert len(found) >= 12
