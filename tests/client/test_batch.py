"""Pooling records of several clients and cutting them into micro-batches."""

import numpy as np
import pytest
import torch

from client.batch import Pool, micro_batches
from client.records import Records
from privacy.rng import simulation_generator


def test_pool_pads_rows_of_any_clients():
    first = Records.from_lists([[5, 6, 7], [8]], [1, 0], [[1.0, 0.5, 0.0], [2.0]])
    second = Records.from_lists([[3, 4]], [2], [[0.25, 0.75]])
    sliced = Records(  # offsets need not begin at 0: a slice of a larger file
        tokens=np.array([9, 9, 1, 2, 3], dtype=np.int32),
        offsets=np.array([2, 5]),
        labels=np.array([1]),
        token_weights=np.ones(5, dtype=np.float32),
    )
    pool = Pool([first, Records.from_lists([], [], []), second, sliced])
    assert pool.counts.tolist() == [2, 0, 1, 1]
    assert pool.client.tolist() == [0, 0, 2, 3]
    batch = pool.batch(np.array([3, 1, 2]), 0, torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3], [8, 0, 0], [3, 4, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch.labels.tolist() == [1, 0, 2]
    assert batch.token_weights.tolist() == [[1, 1, 1], [2, 0, 0], [0.25, 0.75, 0]]
    assert pool.padded(np.array([3, 1]))
    assert not pool.padded(np.array([0, 3]))


def test_pool_refuses_what_cannot_be_mixed():
    with pytest.raises(ValueError, match="either all clients or none must have labels"):
        Pool([Records.from_lists([[1]], [0]), Records.from_lists([[1]])])
    with pytest.raises(ValueError, match="record 1 of client 1 is empty"):
        Pool([Records.from_lists([[1]]), Records.from_lists([[2], []])])


@pytest.mark.parametrize("token_budget", [1, 30, 200, 4000])
@pytest.mark.parametrize("overhead", [0, 20, 10_000])
def test_every_row_once_and_within_the_budget(token_budget, overhead):
    rng = simulation_generator(4, "test")
    lengths, owner = rng.integers(1, 60, 150), rng.integers(0, 12, 150)
    pieces = micro_batches(lengths, owner, token_budget, overhead)
    assert sorted(np.concatenate(pieces)) == list(range(150))
    for piece in pieces:
        assert len(piece) == 1 or len(piece) * lengths[piece].max() <= token_budget
        assert (np.diff(owner[piece]) >= 0).all()


def test_cuts_trade_padding_against_overhead():
    lengths, owner = np.array([2] * 10 + [3] * 10 + [50]), np.zeros(21, dtype=int)

    def shapes(overhead):
        return [(len(p), int(lengths[p].max())) for p in micro_batches(lengths, owner, 1000, overhead)]

    assert shapes(0) == [(10, 2), (10, 3), (1, 50)]
    assert shapes(15) == [(20, 3), (1, 50)]
    lengths = np.array([2] * 10 + [3] * 9 + [4])
    owner = np.zeros(20, dtype=int)
    assert shapes(5) == [(10, 2), (9, 3), (1, 4)]
    assert shapes(5000) == [(20, 4)]


def test_cut_cost_is_least_over_all_ways_to_cut():
    rng = simulation_generator(9, "test")
    lengths = rng.integers(1, 9, 14)
    ordered = np.sort(lengths)
    overhead, budget = 7, 40

    def cost(low, high):
        rows, longest = high - low, int(ordered[high - 1])
        return rows * longest + overhead * -(-rows // max(1, budget // longest))

    best = [0.0] + [np.inf] * 14
    for high in range(1, 15):
        best[high] = min(best[low] + cost(low, high) for low in range(high))
    pieces = micro_batches(lengths, np.arange(14), budget, overhead)
    found = sum(len(p) * lengths[p].max() + overhead for p in pieces)
    assert found <= best[-1]


def test_owners_stay_together_where_that_is_cheap():
    lengths, owner = np.full(12, 10), np.repeat(np.arange(4), 3)
    assert [owner[p].tolist() for p in micro_batches(lengths, owner, 70)] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


def test_nothing_gives_nothing():
    assert micro_batches(np.empty(0, np.int64), np.empty(0, np.int64), 10) == []
