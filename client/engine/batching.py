"""The records of every step of a client, and rows of several clients padded together under a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64

from client.data.records import Records
from client.engine.local_training import LocalTraining
from client.models.tasks import Batch
from privacy.randomness.rng import simulation_generator

LEVELS = np.array([8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256])
LAST_STEP = 64
"""Lengths that rows are padded to, and their distance beyond the last of them."""

UNMASKED_FROM = 48
UNBOUNDED = 2**31


def local_steps(local: LocalTraining, count: int, seed: int) -> list[np.ndarray]:
    """The record indices of every step of a client with `count` records. Depends on nothing else."""
    steps: list[np.ndarray] = []
    for epoch in range(local.epochs if count else 0):
        order = simulation_generator(seed, "batch order", epoch).permutation(count)
        steps += [order[i : i + local.batch_size] for i in range(0, count, local.batch_size)]
        if local.max_steps and len(steps) >= local.max_steps:
            return steps[: local.max_steps]
    return steps


class Pool:
    """The records of several clients laid end to end, so that rows of any of them can be padded together.

    `longest`: positions that the model has.

    Where records are pairs, both texts of one go through the model beside each other, padded alike: what `lengths` has
    of it is the longer's, and `references` holds what :mod:`client.engine.references` found of it.
    """

    def __init__(self, clients: Sequence[Records], longest: int = UNBOUNDED) -> None:
        self.longest = longest
        self.counts = np.array([len(records) for records in clients], dtype=np.int64)
        self.first = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)
        self.client = np.repeat(np.arange(len(clients)), self.counts)
        tokens, starts, base = [np.empty(0, np.int32)], [np.empty(0, np.int64)], 0
        for records in clients:
            low, high = int(records.offsets[0]), int(records.offsets[-1])
            tokens.append(np.asarray(records.tokens[low:high]))
            starts.append(np.asarray(records.offsets[:-1]) - low + base)
            base += high - low
        self.tokens = np.concatenate(tokens)
        self.starts = np.concatenate(starts)
        self.sizes = np.concatenate([np.empty(0, np.int64), *(records.lengths for records in clients)])
        if len(self.sizes) and self.sizes.min() < 1:
            empty = int(np.argmin(self.sizes))
            raise ValueError(f"record {empty - self.first[self.client[empty]]} of client {self.client[empty]} is empty")
        self.splits = self._joined([records.splits for records in clients], self.counts, "splits")
        self.texts_each = 1 if self.splits is None else 2
        self.lengths = self.sizes if self.splits is None else np.maximum(self.splits, self.sizes - self.splits)
        self.references: np.ndarray | None = None
        self.labels = self._joined([records.labels for records in clients], self.counts, "labels")
        sizes = np.array([int(r.offsets[-1]) - int(r.offsets[0]) for r in clients])
        weights = [
            None if r.token_weights is None else r.token_weights[int(r.offsets[0]) : int(r.offsets[-1])]
            for r in clients
        ]
        self.token_weights = self._joined(weights, sizes, "token_weights")

    @staticmethod
    def _joined(parts: list[np.ndarray | None], sizes: np.ndarray, what: str) -> np.ndarray | None:
        given = [part is not None for part, size in zip(parts, sizes, strict=True) if size]  # an empty client fits any
        if not given or not any(given):
            return None
        if not all(given):
            raise ValueError(f"either all clients or none must have {what}")
        return np.concatenate([part for part in parts if part is not None])

    def batch(self, rows: np.ndarray, pad: int, device: torch.device) -> Batch:
        """The given records (indices into the pool) as one micro-batch, padded to :func:`padded_lengths`."""
        starts, lengths = self.texts(rows)
        columns = np.arange(int(padded_lengths(self.lengths[rows], self.longest).max()))
        real = columns < lengths[:, None]
        where = np.where(real, starts[:, None] + columns, 0)
        ids = np.where(real, self.tokens[where], pad)
        weights = None
        if self.token_weights is not None:
            weights = torch.from_numpy(np.where(real, self.token_weights[where], 0.0).astype(np.float32)).to(device)
        labels = None
        if self.labels is not None:
            labels = torch.from_numpy(self.labels[rows].astype(np.int64)).to(device)
        return Batch(
            input_ids=torch.from_numpy(ids.astype(np.int64)).to(device),
            attention_mask=torch.from_numpy(real.astype(np.int64)).to(device),
            labels=labels,
            token_weights=weights,
            references=None if self.references is None else torch.from_numpy(self.references[rows]).to(device),
        )

    def texts(self, rows: np.ndarray) -> tuple[Int64[np.ndarray, " texts"], Int64[np.ndarray, " texts"]]:
        """The starts and lengths of the texts of records: one each, of pairs two, beside each other."""
        starts, sizes = self.starts[rows], self.sizes[rows]
        if self.splits is None:
            return starts, sizes
        first = self.splits[rows]
        return np.stack([starts, starts + first], 1).reshape(-1), np.stack([first, sizes - first], 1).reshape(-1)

    def hides_padding(self, rows: np.ndarray) -> bool:
        """Whether padding of these rows is hidden, see :func:`rows_with_padding`; of pairs it always is."""
        return self.splits is not None or bool(rows_with_padding(self.lengths[rows], self.longest).any())


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        rows: their positions, sorted by owner.
        whole: every owner has all its rows of the step here, and all owners have as many: one product serves an owner.
    """

    rows: Int64[np.ndarray, " rows"]
    whole: bool


def padded_lengths(lengths: Int64[np.ndarray, " n"], longest: int) -> Int64[np.ndarray, " n"]:
    """The length each row is padded to, a function of its own length alone: the next of :data:`LEVELS`.

    At most `longest`, the positions that the model has.
    """
    known = np.searchsorted(LEVELS, lengths)
    beyond = -(-lengths // LAST_STEP) * LAST_STEP
    levels = np.where(known < len(LEVELS), LEVELS[np.minimum(known, len(LEVELS) - 1)], beyond)
    found: Int64[np.ndarray, " n"] = np.maximum(np.minimum(levels, longest), lengths)
    return found


def rows_with_padding(lengths: Int64[np.ndarray, " n"], longest: int) -> Bool[np.ndarray, " n"]:
    """Whether a row's micro-batch hides padding. Long rows without any are kept apart: attention is faster for them."""
    found: Bool[np.ndarray, " n"] = (lengths < UNMASKED_FROM) | (lengths != padded_lengths(lengths, longest))
    return found


def micro_batches(
    lengths: Int64[np.ndarray, " n"],
    token_budget: int,
    owner: Int64[np.ndarray, " n"] | None = None,
    longest: int = UNBOUNDED,
) -> list[MicroBatch]:
    """Cut rows into micro-batches in which no row is computed otherwise than it would be beside any others.

    What goes with a row is decided by the row and its owner's other rows alone: its padding, whether padding is hidden,
    and whether its owner's rows share a product. How many others there are changes only how many rows a product has,
    and on a CPU its rows come out bit by bit the same for it (docs/engine.md, "Batch invariance"). So a unit does
    not move the rounding of others. Shortest rows come first, and an owner's rows in their order, so that sums over an
    owner are taken in the same order too.

    A micro-batch of `r` rows holds `r * padded length <= token_budget` tokens (a single longer row is allowed).

    Args:
        owner: whose gradients are summed, sorted or not; None keeps rows apart.
        longest: positions that the model has.
    """
    levels, hidden = padded_lengths(lengths, longest), rows_with_padding(lengths, longest)
    together = np.zeros(len(lengths), dtype=np.int64)  # rows of the owner, where they share a product; else 0
    if owner is not None and len(owner):
        counts = np.bincount(owner)
        same = np.ones(len(counts), dtype=bool)
        key = levels * 2 + hidden
        first = np.zeros(len(counts), dtype=np.int64)
        first[owner[::-1]] = key[::-1]
        np.logical_and.at(same, owner, key == first[owner])
        whole = same[owner] & (counts[owner] * levels <= token_budget)
        together = np.where(whole, counts[owner], 0)
    order = np.lexsort((np.arange(len(lengths)) if owner is None else owner, together, hidden, levels))
    keys = np.stack([levels, hidden, together], axis=1)[order]
    cuts = np.flatnonzero((np.diff(keys, axis=0) != 0).any(axis=1)) + 1
    pieces = []
    for group in np.split(order, cuts) if len(order) else []:
        level, rows = int(levels[group[0]]), max(1, int(together[group[0]]))
        most = max(1, token_budget // (level * rows)) * rows
        pieces += [MicroBatch(group[i : i + most], rows > 1) for i in range(0, len(group), most)]
    return pieces
