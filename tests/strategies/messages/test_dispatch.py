"""A cohort is split whole, without overlap, evenly, and the same way every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.randomness.rng import simulation_generator
from strategies.messages.dispatch import split


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cohort=st.integers(0, 60), nodes=st.integers(1, 9), seed=st.integers(0, 10**6), weighted=st.booleans())
def test_every_client_is_in_exactly_one_sorted_share(cohort: int, nodes: int, seed: int, weighted: bool) -> None:
    generator = simulation_generator(seed, "cohort")
    clients = np.sort(generator.choice(200, cohort, replace=False)).astype(np.int64)
    work = generator.pareto(1.5, 200) if weighted else None
    shares = split(clients, nodes, work)
    assert len(shares) == nodes
    assert all(share.dtype == np.int64 and np.all(np.diff(share) > 0) for share in shares)
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), clients)
    cost = np.ones(200) if work is None else work
    loads = [cost[share].sum() for share in shares]
    least_possible = max(cost[clients].sum() / nodes, cost[clients].max(initial=0.0))
    # Graham's other bound needs no optimum: the last client put on the fullest node found all others at least as full.
    assert max(loads) <= cost[clients].sum() / nodes + cost[clients].max(initial=0.0) + 1e-9
    assert max(loads) >= least_possible - 1e-9
    for mine, again in zip(shares, split(clients.copy(), nodes, None if work is None else work.copy()), strict=True):
        np.testing.assert_array_equal(mine, again)


def test_the_largest_share_is_within_four_thirds_of_the_best() -> None:
    # Graham's own worst case for two machines: {3, 3} and {2, 2, 2} would be 6 and 6.
    work = np.array([3.0, 3.0, 2.0, 2.0, 2.0])
    loads = sorted(work[share].sum() for share in split(np.arange(5), 2, work))
    assert loads == [5.0, 7.0]
    assert 3 * max(loads) <= 4 * 6.0


def test_equal_work_gives_shares_that_differ_by_at_most_one_client() -> None:
    sizes = [len(share) for share in split(np.arange(100, 150), 7)]
    assert max(sizes) - min(sizes) == 1


def test_long_work_goes_first_and_ties_to_the_lower_node() -> None:
    work = np.array([1.0, 1.0, 10.0, 1.0, 1.0])
    assert [share.tolist() for share in split(np.arange(5), 2, work)] == [[2], [0, 1, 3, 4]]
    assert [share.tolist() for share in split(np.array([4, 9]), 3)] == [[4], [9], []]


def test_an_empty_cohort_gives_empty_shares() -> None:
    shares = split(np.empty(0, dtype=np.int64), 3)
    assert [share.tolist() for share in shares] == [[], [], []]
    assert all(share.dtype == np.int64 for share in shares)


def test_no_node_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes must be >= 1"):
        split(np.arange(3), 0)
