"""Pooling records of several clients and cutting them into micro-batches."""

import numpy as np
import pytest
import torch

from client.data.records import Records
from client.engine.batching import LEVELS, UNMASKED_FROM, Pool, micro_batches, padded_lengths, rows_with_padding
from privacy.randomness.rng import simulation_generator


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
    assert batch.input_ids.shape == (3, 8)
    assert batch.input_ids[:, :3].tolist() == [[1, 2, 3], [8, 0, 0], [3, 4, 0]]
    assert batch.attention_mask[:, :3].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch.labels.tolist() == [1, 0, 2]
    assert batch.token_weights[:, :3].tolist() == [[1, 1, 1], [2, 0, 0], [0.25, 0.75, 0]]
    assert not batch.input_ids[:, 3:].any()
    assert not batch.attention_mask[:, 3:].any()
    assert Pool([first], longest=5).batch(np.array([0]), 0, torch.device("cpu")).input_ids.shape == (1, 5)


def test_pool_refuses_what_cannot_be_mixed():
    with pytest.raises(ValueError, match=r"all clients or none .*labels"):
        Pool([Records.from_lists([[1]], [0]), Records.from_lists([[1]])])
    with pytest.raises(ValueError, match="record 1 of client 1"):
        Pool([Records.from_lists([[1]]), Records.from_lists([[2], []])])


def test_a_rows_padding_is_a_function_of_its_own_length():
    lengths = np.arange(1, 600)
    padded = padded_lengths(lengths, 512)
    assert (padded >= lengths).all()
    assert (padded[lengths <= 512] <= 512).all()
    assert (np.diff(padded) >= 0).all()
    assert ((padded - lengths)[32:] <= 0.5 * lengths[32:]).all()
    assert padded_lengths(LEVELS, 10_000).tolist() == LEVELS.tolist()
    assert rows_with_padding(np.array([8, 47, 48, 63, 64]), 512).tolist() == [True, True, False, True, False]
    assert UNMASKED_FROM in LEVELS


@pytest.mark.parametrize("token_budget", [1, 30, 200, 4000])
@pytest.mark.parametrize("owned", [True, False])
def test_every_row_once_and_within_the_budget(token_budget: int, owned: bool) -> None:
    rng = simulation_generator(4, "test")
    lengths, owner = rng.integers(1, 60, 150), rng.integers(0, 12, 150)
    pieces = micro_batches(lengths, token_budget, owner if owned else None)
    assert sorted(np.concatenate([piece.rows for piece in pieces])) == list(range(150))
    levels = padded_lengths(lengths, 2**31)
    for piece in pieces:
        assert len(piece.rows) == 1 or len(piece.rows) * levels[piece.rows[0]] <= token_budget
        assert len(set(levels[piece.rows])) == 1
        assert not owned or (np.diff(owner[piece.rows]) >= 0).all()
        assert not piece.whole  # every owner has rows of several levels


def test_only_owners_alike_and_whole_share_products():
    lengths = np.array([10] * 8 + [10, 50] + [12] * 4)
    owner = np.array([0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 5, 6])
    pieces = micro_batches(lengths, 100, owner)
    found = [(owner[piece.rows].tolist(), piece.whole) for piece in pieces]
    assert found == [
        ([4], False),  # its rows are of two levels
        ([2, 3, 6], False),  # one row each
        ([0, 0, 0, 1, 1, 1], True),
        ([5, 5, 5], True),  # 9 rows of 16 tokens are beyond the budget
        ([4], False),
    ]
    (alone,) = micro_batches(lengths[:3], 40, owner[:3])[:1]
    assert not alone.whole  # three rows of 16 tokens do not fit, so nobody's do


def test_how_a_row_is_cut_does_not_depend_on_the_others():
    rng = simulation_generator(5, "test")
    lengths, owner = rng.integers(1, 40, 200), rng.integers(0, 30, 200)

    def kinds(rows: np.ndarray) -> dict[int, tuple[int, bool, bool]]:
        found = {}
        for piece in micro_batches(lengths[rows], 500, owner[rows]):
            part = rows[piece.rows]
            for row in part:
                levels = padded_lengths(lengths[part], 2**31)
                found[int(row)] = (int(levels[0]), bool(rows_with_padding(lengths[part], 2**31)[0]), piece.whole)
        return found

    everybody = kinds(np.arange(200))
    some = kinds(np.flatnonzero(owner < 7))
    assert all(everybody[row] == kind for row, kind in some.items())


def test_nothing_gives_nothing():
    assert micro_batches(np.empty(0, np.int64), 10) == []
    assert micro_batches(np.empty(0, np.int64), 10, np.empty(0, np.int64)) == []
