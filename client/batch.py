"""Rows of several clients, padded together into micro-batches under a token budget."""

from collections.abc import Sequence

import numpy as np
import torch

from client.records import Records
from client.tasks import Batch


class Pool:
    """The records of several clients laid end to end, so that rows of any of them can be padded together."""

    def __init__(self, clients: Sequence[Records]) -> None:
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
        self.lengths = np.concatenate([np.empty(0, np.int64), *(records.lengths for records in clients)])
        if len(self.lengths) and self.lengths.min() < 1:
            empty = int(np.argmin(self.lengths))
            raise ValueError(f"record {empty - self.first[self.client[empty]]} of client {self.client[empty]} is empty")
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
        """The given records (indices into the pool) as one padded micro-batch."""
        lengths, starts = self.lengths[rows], self.starts[rows]
        longest = int(lengths.max())
        columns = np.arange(longest)
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
        )

    def padded(self, rows: np.ndarray) -> bool:
        """Whether these rows differ in length."""
        lengths = self.lengths[rows]
        return bool(lengths.min() != lengths.max())


def micro_batches(lengths: np.ndarray, owner: np.ndarray, token_budget: int, overhead: int = 0) -> list[np.ndarray]:
    """Cut rows into micro-batches of similar length; returns positions, each micro-batch sorted by owner.

    A micro-batch of `r` rows holds `r * longest <= token_budget` tokens with padding (a single longer row is allowed).
    Where to cut is chosen so that the sum of padded tokens, plus `overhead` for every micro-batch, is least. Where
    the budget would split the rows of one owner, the cut moves to keep them together if that costs less than a
    quarter of the micro-batch: whole owners take the engine's fast path.

    Args:
        lengths: tokens of each row.
        owner: slot of each row.
        token_budget: most tokens of one micro-batch.
        overhead: fixed cost of one micro-batch, in tokens.
    """
    order = np.lexsort((owner, lengths))
    pieces = []
    for low, high in _level_cuts(lengths[order], token_budget, overhead):
        count = max(1, token_budget // int(lengths[order[high - 1]]))
        start = low
        while start < high:
            end = min(start + count, high)
            if end < high:
                cut = end
                while cut > start and owner[order[cut]] == owner[order[cut - 1]]:
                    cut -= 1
                if cut - start >= 0.75 * (end - start):
                    end = cut
            piece = order[start:end]
            pieces.append(piece[np.argsort(owner[piece], kind="stable")])
            start = end
    return pieces


def _level_cuts(lengths: np.ndarray, token_budget: int, overhead: int) -> list[tuple[int, int]]:
    """Ranges of rows, sorted by length, that share one padded length; least total cost by dynamic programming."""
    if not len(lengths):
        return []
    levels, counts = np.unique(lengths, return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)])
    best = np.zeros(len(levels) + 1)
    previous = np.zeros(len(levels) + 1, dtype=np.int64)
    for j, level in enumerate(levels, start=1):
        rows = ends[j] - ends[:j]
        per_batch = max(1, token_budget // int(level))
        costs = best[:j] + rows * level + overhead * -(-rows // per_batch)
        previous[j] = np.argmin(costs)
        best[j] = costs[previous[j]]
    cuts, j = [], len(levels)
    while j:
        cuts.append((int(ends[previous[j]]), int(ends[j])))
        j = int(previous[j])
    return cuts[::-1]
