"""Where the hidden states of `client.prefix` are kept: in memory up to a budget, then in a memory-mapped file."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks

log = logging.getLogger(__name__)


GROWTH = 2**24
"""Bytes by which the file grows. They are written before they are mapped: a full disk ends the file, not the run."""


class PrefixCache:
    """Hidden states `[tokens, width]` of many records, laid end to end.

    Args:
        width: hidden size.
        dtype: in which they are kept.
        memory: bytes held in memory.
        folder: where the file beyond that lies; None for no file. It has no name there and is gone when the process
            ends, however that happens.
        disk: most bytes of that file; None for a quarter of what is free there.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        memory: int,
        folder: str | Path | None = None,
        disk: int | None = None,
    ) -> None:
        checks.integer_at_least(0, memory=memory, disk=0 if disk is None else disk)
        self.dtype = dtype
        self._row = width * dtype.itemsize
        # untouched pages of an empty tensor take no memory
        self._stores = [torch.empty(memory // self._row, width, dtype=dtype)]
        self._file, self._allocated = -1, 0
        if folder is not None and disk != 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix="prefix-", suffix=".cache", dir=folder)
            rows = max(1, (shutil.disk_usage(folder).free // 4 if disk is None else disk) // self._row)
            os.ftruncate(self._file, rows * self._row)
            mapped = torch.from_file(name, shared=True, size=rows * width, dtype=dtype).view(-1, width)
            self._stores.append(mapped)
            os.unlink(name)  # the map keeps it alive
        self._used = [0] * len(self._stores)
        self._place: dict[bytes, tuple[int, int]] = {}

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)

    def __len__(self) -> int:
        return len(self._place)

    def find(self, key: bytes) -> tuple[int, int]:
        """Store and first row of a record; (-1, -1) if it is not here."""
        return self._place.get(key, (-1, -1))

    def put(self, key: bytes, hidden: Float[Tensor, "tokens width"]) -> tuple[int, int]:
        """Keep a record's hidden state where there is room; returns its place as `find` does."""
        for store, (rows, used) in enumerate(zip(self._stores, self._used, strict=True)):
            if used + len(hidden) <= len(rows) and (store == 0 or self._reserved((used + len(hidden)) * self._row)):
                rows[used : used + len(hidden)] = hidden
                self._used[store] = used + len(hidden)
                self._place[key] = (store, used)
                return store, used
        return -1, -1

    def _reserved(self, size: int) -> bool:
        """Whether the disk holds so many bytes of the file; a store through the map where it does not is fatal."""
        while self._allocated < size:
            try:
                written = os.pwrite(self._file, bytes(GROWTH), self._allocated)
            except OSError as error:
                log.warning("the prefix cache ends at %d MiB on disk: %s", self._used[1] * self._row >> 20, error)
                self._stores[1] = self._stores[1][: self._used[1]]
                return False
            self._allocated += written
        return True

    def gather(self, places: np.ndarray, lengths: np.ndarray, tokens: int) -> Float[Tensor, "rows tokens width"]:
        """Hidden states of records at `places` (int `[rows, 2]`), padded to `tokens` with a record's first token."""
        columns = np.arange(tokens)
        index = torch.from_numpy(places[:, 1:] + np.where(columns < lengths[:, None], columns, 0))
        present = np.unique(places[:, 0])
        if len(present) == 1:
            only: Tensor = self._stores[present[0]][index]
            return only
        store = torch.from_numpy(places[:, 0])
        result: Tensor = self._stores[0].new_empty(*index.shape, self._stores[0].shape[1])
        for number in present:
            chosen = store == int(number)
            result[chosen] = self._stores[number][index[chosen]]
        return result
