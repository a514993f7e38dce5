"""Jaccard similarity of n-grams, and how far the mean of one side is above the other's."""

import numpy as np
import pytest

from simulations.benchmarks.privacy.jaccard import excess, jaccard


def test_jaccard_counts_different_n_grams() -> None:
    assert jaccard("abab", "abc", 1) == pytest.approx(2 / 3)
    assert jaccard("abab", "abc", 2) == pytest.approx(1 / 3)
    assert jaccard("abc", "xyz", 1) == jaccard("ab", "ab", 3) == 0
    assert jaccard([1, 2, 3, 4], [1, 2, 3, 4], 4) == 1


def test_the_excess_covers_the_difference_of_means_and_is_wide_where_nothing_varies() -> None:
    draws = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        one, two = draws.beta(2, 5, 60), draws.beta(1, 9, 40)
        found = excess(one, two)
        covered += found.lower <= 2 / 7 - 0.1 <= found.upper
    assert 180 <= covered <= 199
    flat = excess(np.zeros(50), np.zeros(100))
    assert (flat.estimate, flat.upper) == (0, pytest.approx(1 - 0.025 ** (1 / 50)))
    assert flat.lower == -flat.upper
    assert excess([0.5], draws.random(20)).upper > 0.9  # of one value nothing is known
