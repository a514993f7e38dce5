"""The row of shares that a unit says of its own records, over bins that are the same for everybody."""

from typing import Final

import numpy as np

from client.data.columns.scripts import SCRIPTS, scripts_of
from client.data.records import Records

RECORDS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the bins of a unit's records; the last bin is open."""
TOKENS: Final = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Upper ends of the bins of a text's tokens; the last bin is open."""


def parts_of(classes: int) -> dict[str, int]:
    """The number of bins of every part of a row, in their order; without labels where there are no ``classes``."""
    found = {"records": len(RECORDS) + 1, "tokens": len(TOKENS) + 1, "scripts": len(SCRIPTS)}
    return found | ({"labels": classes} if classes else {})


def share_row(records: Records, classes: int, model: str) -> np.ndarray:
    """Describe records as those of one unit, float64: each of the parts of :func:`parts_of` sums to at most 1.

    The bin that the number of its records lies in; the share of them in every bin of length and in every script; with
    ``classes`` labels the share with each.

    Args:
        model: base model whose tokenizer made the records.
    """
    found = [_shares(np.array([len(records)]), RECORDS), _shares(records.lengths, TOKENS)]
    found.append(_counted(scripts_of(records, model), len(SCRIPTS)))
    if classes:
        assert records.labels is not None
        found.append(_counted(np.asarray(records.labels), classes))
    return np.concatenate(found)


def _shares(values: np.ndarray, edges: tuple[int, ...]) -> np.ndarray:
    """The share of values in every bin; zeros of none."""
    return _counted(np.searchsorted(edges, values), len(edges) + 1)


def _counted(bins: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(bins, minlength=count) / max(len(bins), 1)
