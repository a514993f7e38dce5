"""The frozen layers below the first adapted one, computed once per record.

If only the upper layers carry adapters, everything below is a fixed function of a record's tokens: the same for every
client, step, epoch and round. The hidden state that enters the first adapted layer is kept and found again by the
record's tokens themselves; what no longer fits into the cache is computed anew each time. Where heads alone are
trained, what is kept is the state that leaves the last layer. `client.prefix_check` tries every prefix first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from client.batch import Pool
from client.lora import layer_index
from client.prefix_cache import PrefixCache


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
        """Within the block, states are kept in another cache."""
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
        keys = [pool.tokens[pool.starts[row] : pool.starts[row] + pool.lengths[row]].tobytes() for row in rows]
        places = np.array([self._cache.find(key) for key in keys])
        missing = np.flatnonzero(places[:, 0] < 0)
        if len(missing):
            part = torch.from_numpy(missing).to(input_ids.device)
            fresh = self._compute(input_ids[part], None if mask is None else mask[part])
            for hidden, position in zip(fresh.cpu(), missing, strict=True):
                known = self._cache.find(keys[position])  # the same text twice in one micro-batch
                length = int(pool.lengths[rows[position]])
                places[position] = known if known[0] >= 0 else self._cache.put(keys[position], hidden[:length])
            if (places[:, 0] < 0).any():  # the cache is full: rounded as what it holds, or a row would tell of that
                whole = fresh if len(missing) == len(rows) else self._compute(input_ids, mask)
                return whole.to(self._cache.dtype)
        return self._cache.gather(places, pool.lengths[rows], input_ids.shape[1]).to(input_ids.device)

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
