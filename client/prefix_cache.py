"""Where the hidden states of `client.prefix` are kept: in memory up to a budget, then in a memory-mapped file."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks


class PrefixCache:
    """Hidden states `[tokens, width]` of many records, laid end to end.

    Args:
        width: hidden size.
        dtype: in which they are kept.
        memory: bytes held in memory.
        folder: where the file beyond that lies; None for no file.
        disk: most bytes of that file (it is sparse: only what is used takes space).
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        memory: int,
        folder: str | Path | None = None,
        disk: int = 2**36,
    ) -> None:
        checks.integer_at_least(0, memory=memory, disk=disk)
        size = width * dtype.itemsize
        # untouched pages of an empty tensor take no memory
        stores = [torch.empty(memory // size, width, dtype=dtype)]
        if folder is not None and disk >= size:
            Path(folder).mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="prefix-", suffix=".cache", dir=folder)
            os.ftruncate(handle, disk // size * size)
            os.close(handle)
            stores.append(torch.from_file(name, shared=True, size=disk // size * width, dtype=dtype).view(-1, width))
            os.unlink(name)  # the map keeps it alive; it is gone when the process ends, however that happens
        self._stores = stores
        self._used = [0] * len(stores)
        self._place: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._place)

    def find(self, key: bytes) -> tuple[int, int]:
        """Store and first row of a record; (-1, -1) if it is not here."""
        return self._place.get(key, (-1, -1))

    def put(self, key: bytes, hidden: Float[Tensor, "tokens width"]) -> tuple[int, int]:
        """Keep a record's hidden state where there is room; returns its place as `find` does."""
        for store, (rows, used) in enumerate(zip(self._stores, self._used, strict=True)):
            if used + len(hidden) <= len(rows):
                rows[used : used + len(hidden)] = hidden
                self._used[store] = used + len(hidden)
                self._place[key] = (store, used)
                return store, used
        return -1, -1

    def gather(self, places: np.ndarray, lengths: np.ndarray) -> Float[Tensor, "rows tokens width"]:
        """Padded hidden states of records at `places` (int `[rows, 2]`). Padding repeats a record's first token."""
        columns = np.arange(int(lengths.max()))
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
