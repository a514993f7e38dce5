"""Log-probabilities of pairs of texts under the start model: computed once, where the record is, and sent to nobody.

A loss that compares a model with the one it began as (DPO) needs of that one a single number a pair. The start model is
the base without its adapter, whatever public records have taught the adapter since; so the number depends on the record
alone, and is found again by the record's own tokens as long as the process lives. It enters the client's own update,
which is clipped like any other.
"""

import hashlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int64

from client.engine.batching import Pool
from client.models.tasks import Task


class References:
    """Numbers of pairs under the start model, by the pair.

    Args:
        task: says whether any are needed.
        measure: computes them for rows of a pool.
    """

    def __init__(
        self,
        task: Task,
        measure: Callable[[Pool, Int64[np.ndarray, " rows"]], Float64[np.ndarray, " rows"]],
    ) -> None:
        self._needed = task.has_reference
        self._measure = measure
        self._known: dict[bytes, float] = {}

    def add_to(self, pool: Pool, rows: Int64[np.ndarray, " rows"] | None = None) -> None:
        """Set `pool.references` of these rows, of all if None; those not known are measured now."""
        if not self._needed or not len(pool.lengths):
            return
        rows = np.arange(len(pool.lengths)) if rows is None else rows
        keys = {int(row): _key(pool, int(row)) for row in rows}
        new = {key: row for row, key in keys.items() if key not in self._known}
        if new:
            found = self._measure(pool, np.array(list(new.values()), dtype=np.int64))
            self._known.update(zip(new, found.tolist(), strict=True))
        pool.references = np.zeros(len(pool.lengths))
        pool.references[list(keys)] = [self._known[key] for key in keys.values()]


def _key(pool: Pool, row: int) -> bytes:
    where = slice(int(pool.starts[row]), int(pool.starts[row] + pool.sizes[row]))
    parts = [pool.tokens[where]] + ([] if pool.token_weights is None else [pool.token_weights[where]])
    parts += [] if pool.splits is None else [pool.splits[row : row + 1]]
    return hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest()
