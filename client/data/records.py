"""Tokenised records of ragged length, stored flat: one array of tokens and the offset of every record in it."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

MOST_AT_ONCE: Final = 4096
"""Units whose rows of shares are held at once."""

COLUMNS = ("labels", "units", "splits")
"""What a record may have once, as :class:`Records` names it."""


@dataclass(frozen=True)
class Records:
    """A sequence of tokenised records.

    Record `i` is `tokens[offsets[i]:offsets[i + 1]]`. The arrays may be memory maps: nothing is copied until `select`.

    Attributes:
        tokens: int32, flat, all records one after the other.
        offsets: int64 `[n + 1]`, non-decreasing, `offsets[0] == 0` is not required (a slice of a larger file is fine).
        labels: `[n]` int64 class labels, or None where the tokens are their own labels (causal language models).
        token_weights: float32, flat like `tokens`, weight of the loss at each token; None means 1 everywhere.
        units: `[n]` int64, the unit of privacy of every record where several records form one; None: each its own.
        splits: `[n]` int64, how many tokens of a pair are its first text; None where a record is one text.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray | None = None
    token_weights: np.ndarray | None = None
    units: np.ndarray | None = None
    splits: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or len(self.offsets) < 1:
            raise ValueError(f"offsets must be a vector of n + 1 integers, got shape {self.offsets.shape}")
        if self.labels is not None and len(self.labels) != len(self):
            raise ValueError(f"labels must have one entry per record ({len(self)}), got {len(self.labels)}")
        if self.units is not None and len(self.units) != len(self):
            raise ValueError(f"units must have one entry per record ({len(self)}), got {len(self.units)}")
        if self.splits is not None:
            one_each = len(self.splits) == len(self)
            if not (one_each and (self.splits > 0).all() and (self.splits < self.lengths).all()):
                raise ValueError(f"splits must lie inside the {len(self)} records, one in each, got {len(self.splits)}")
        if self.token_weights is not None and len(self.token_weights) != len(self.tokens):
            raise ValueError(
                f"token_weights must have one entry per token ({len(self.tokens)}), got {len(self.token_weights)}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per record, int64 `[n]`."""
        return np.diff(self.offsets)

    def span(self, first: int, last: int) -> "Records":
        """The records ``first`` to ``last`` (exclusive), not copied."""
        columns = {name: of[first:last] for name in COLUMNS if (of := getattr(self, name)) is not None}
        return replace(self, offsets=self.offsets[first : last + 1], **columns)

    def select(self, indices: Sequence[int] | np.ndarray) -> "Records":
        """The records at `indices` (any order, repeats allowed), copied into memory."""
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= len(self)):
            raise ValueError(f"indices must lie in [0, {len(self)}), got {chosen.min()}..{chosen.max()}")
        starts, lengths = np.asarray(self.offsets)[chosen], self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # position of every wanted token in the flat array, without a Python loop over records
        flat = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Records(
            tokens=np.asarray(self.tokens[flat], dtype=np.int32),
            offsets=offsets,
            token_weights=None if self.token_weights is None else np.asarray(self.token_weights[flat]),
            **{name: np.asarray(of[chosen]) for name in COLUMNS if (of := getattr(self, name)) is not None},
        )

    @staticmethod
    def from_lists(
        sequences: Iterable[Sequence[int]],
        labels: Sequence[int] | np.ndarray | None = None,
        token_weights: Iterable[Sequence[float]] | None = None,
    ) -> "Records":
        """Flatten Python lists of token ids (and, if given, of token weights)."""
        flat, lengths = array("i"), [0]  # not an object for each of millions of records
        for row in sequences:
            flat.extend(row)
            lengths.append(len(row))
        weights = None
        if token_weights is not None:
            weights = array("f")
            for weighed in token_weights:
                weights.extend(weighed)
        return Records(
            tokens=np.array(flat, dtype=np.int32),
            offsets=np.cumsum(lengths, dtype=np.int64),
            labels=None if labels is None else np.asarray(labels, dtype=np.int64),
            token_weights=None if weights is None else np.array(weights, dtype=np.float32),
        )

    @staticmethod
    def concatenate(parts: Sequence["Records"]) -> "Records":
        """The tokens, and weights if the first has any, of all parts in their order; at least one."""
        lengths = np.concatenate([[0], *(part.lengths for part in parts)])
        weights = [part.token_weights for part in parts if part.token_weights is not None]
        return Records(
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=np.cumsum(lengths, dtype=np.int64),
            token_weights=np.concatenate(weights) if weights else None,
        )
