"""The frozen layers below the first adapted one, computed once per record.

If only the upper layers carry adapters, everything below is a fixed function of a record's tokens: the same for every
client, step, epoch and round. The hidden state that enters the first adapted layer is kept, in memory up to a budget
and then in a memory-mapped file, and found again by the record's tokens themselves; what no longer fits into the cache
is computed anew each time. Where heads alone are trained, what is kept is the state that leaves the last layer.
`client.engine.forward` tries every prefix first.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from client.engine.batching import Pool
from client.models.lora import layer_index
from privacy import checks

log = logging.getLogger(__name__)


GROWTH = 2**24
"""Bytes by which the file grows. They are written before they are mapped: a full disk ends the file, not the run."""


class PrefixCache:
    """Hidden states `[tokens, width]` of many records, laid end to end.

    Args:
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


class Prefix:
    """Runs a transformer from its first adapted layer upwards; from behind its layers if ``first`` is their number.

    Works on any model that calls the modules of one `nn.ModuleList` in turn, each with the hidden state as first
    argument and as result, or the first of its results, as transformers' encoders and decoders do. Embeddings and masks
    are still computed by the model itself, which costs 1-2 % of a pass.
    """

    def __init__(self, model: nn.Module, stack: str, first: int, cache: PrefixCache) -> None:
        self.first = first
        self.hidden: Tensor | None = None
        self.capturing = False
        self._model = model
        self._cache = cache
        self._layers = layers = cast(nn.ModuleList, model.get_submodule(stack))
        for index in range(min(first, len(layers) - 1)):
            layers[index] = _Lower(layers[index], self)
        if first < len(layers):
            layers[first] = _First(layers[first], self)
        else:
            layers[-1] = _Last(layers[-1], self)

    def remove(self) -> None:
        """Give the model its own layers back."""
        for index, layer in enumerate(self._layers):
            if isinstance(layer, _Wrapped):
                self._layers[index] = layer.layer

    @contextmanager
    def keeping_in(self, cache: PrefixCache) -> Iterator[None]:
        """Keep states in another cache within the block."""
        own, self._cache = self._cache, cache
        try:
            yield
        finally:
            self._cache = own

    @torch.no_grad()
    def states(
        self, pool: Pool, rows: np.ndarray, input_ids: Int[Tensor, "rows tokens"], mask: Tensor | None
    ) -> Float[Tensor, "rows tokens width"]:
        """The hidden state entering the first adapted layer for padded rows of a pool, from the cache where it is."""
        starts, lengths = pool.texts(rows)
        keys = [pool.tokens[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]
        places = np.array([self._cache.find(key) for key in keys])
        missing = np.flatnonzero(places[:, 0] < 0)
        if len(missing):
            part = torch.from_numpy(missing).to(input_ids.device)
            fresh = self._compute(input_ids[part], None if mask is None else mask[part])
            for hidden, position in zip(fresh.cpu(), missing, strict=True):
                known = self._cache.find(keys[position])  # the same text twice in one micro-batch
                kept = hidden[: int(lengths[position])]
                places[position] = known if known[0] >= 0 else self._cache.put(keys[position], kept)
            if (places[:, 0] < 0).any():  # the cache is full: rounded as what it holds, or a row would tell of that
                whole = fresh if len(missing) == len(keys) else self._compute(input_ids, mask)
                return whole.to(self._cache.dtype)
        return self._cache.gather(places, lengths, input_ids.shape[1]).to(input_ids.device)

    def _compute(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        self.capturing, self.hidden = True, None
        try:
            self._model(input_ids=input_ids, attention_mask=mask)
        except _Reached as reached:
            return reached.hidden
        finally:
            self.capturing = False
        raise RuntimeError("the model returned without running its first adapted layer")


def prefix_of(model: nn.Module, trained: list[str], cache: PrefixCache) -> Prefix | None:
    """A prefix of `model` given the paths of its adapted and trained modules; None if there is nothing to keep.

    Modules outside the stack of layers are taken to come after it, as heads do, so it must be tried before it is used.
    """
    if not any(layer_index(path) is not None for path in trained):
        stack = _only_stack(model)
        return None if stack is None else Prefix(model, stack, len(list(model.get_submodule(stack).children())), cache)
    inside = {path: index for path in trained if (index := layer_index(path)) is not None}
    stacks = {path.split(f".{index}.", 1)[0] for path, index in inside.items()}
    first = min(inside.values(), default=0)
    if first == 0 or len(stacks) != 1:
        return None
    name = stacks.pop()
    return Prefix(model, name, first, cache) if isinstance(model.get_submodule(name), nn.ModuleList) else None


def _only_stack(model: nn.Module) -> str | None:
    """The path of the one list of layers of a model; None if it has several, or none."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    outer = [path for path in lists if not any(path.startswith(other + ".") for other in lists)]
    return outer[0] if len(outer) == 1 else None


class _Reached(Exception):
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Wrapped(nn.Module):
    """A layer in its list; what the model reads from the layer itself is still found."""

    def __init__(self, layer: nn.Module, prefix: Prefix) -> None:
        super().__init__()
        self.layer = layer
        self.prefix = prefix
        self.others: tuple[None, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def computed(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns; remembers in which form it does."""
        out = self.layer(*args, **kwargs)
        self.others = (None,) * (len(out) - 1) if isinstance(out, tuple) else None
        return out

    def as_returned(self, hidden: Tensor) -> Any:
        """A hidden state in the form in which the layer returns its own."""
        return hidden if self.others is None else (hidden, *self.others)


class _Lower(_Wrapped):
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.as_returned(hidden) if self.prefix.hidden is not None else self.computed(hidden, *args, **kwargs)


class _First(_Wrapped):
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.prefix.capturing:
            raise _Reached(hidden)
        given = self.prefix.hidden
        return self.layer(hidden if given is None else given.to(hidden.dtype), *args, **kwargs)


class _Last(_Wrapped):
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = self.prefix.hidden
        if given is not None:
            return self.as_returned(given.to(hidden.dtype))
        out = self.computed(hidden, *args, **kwargs)
        if self.prefix.capturing:
            raise _Reached(out[0] if isinstance(out, tuple) else out)
        return out
