"""The layout of an adapter: the place of every value in one flat vector.

Two vectors are used everywhere:

- the *full* vector (`layout.size` values) holds every adapter value, also a factor that is frozen this round;
- the *trainable* vector (`layout.dim` = D values) is the sub-vector that is trained, clipped and sent.

Names are those of PEFT's state dicts, so that a vector can be written as files that `PeftModel.from_pretrained` loads.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks
from privacy.randomness.rng import simulation_generator

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Entry:
    """One tensor of the adapter.

    Attributes:
        factor: "A" `[rank, in]`, "B" `[out, rank]` or "head".
        pair: the block it is clipped with.
        ranks: of a factor, only the first so many ranks (rows of A, columns of B) are trained; None: all of them.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    factor: str
    pair: str
    trainable: bool = True
    ranks: int | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def trained_shape(self) -> tuple[int, ...]:
        """Shape of what is trained of it."""
        if self.ranks is None:
            return self.shape
        return (self.ranks, self.shape[1]) if self.factor == "A" else (self.shape[0], self.ranks)

    @property
    def trained_size(self) -> int:
        return math.prod(self.trained_shape)

    def of(self, full: Tensor) -> Tensor:
        """View this tensor in full vectors `[..., size]`."""
        return _shaped(full[..., self.offset : self.offset + self.size], self.shape)

    def trained_of(self, full: Tensor) -> Tensor:
        """View the trained part of this tensor in full vectors."""
        if self.ranks is None:
            return self.of(full)
        return self.of(full)[..., : self.ranks, :] if self.factor == "A" else self.of(full)[..., : self.ranks]


@dataclass(frozen=True)
class AdapterLayout:
    """The place of each tensor in the full vector, and which of them form the trainable vector (in the same order)."""

    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Values in the full vector."""
        return sum(entry.size for entry in self.entries)

    @property
    def dim(self) -> int:
        """Values in the trainable vector (D)."""
        return sum(entry.trained_size for entry in self.entries if entry.trainable)

    def trainable_entries(self) -> Iterator[tuple[Entry, int]]:
        """Every trainable entry with its offset in the trainable vector."""
        offset = 0
        for entry in self.entries:
            if entry.trainable:
                yield entry, offset
                offset += entry.trained_size

    def blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks of the trainable vector, in its order: one per (A, B) pair, then one per head."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            if entry.trainable:
                sizes[entry.pair] = sizes.get(entry.pair, 0) + entry.trained_size
        return tuple(sizes.values())

    def trainable_values(self, full: Tensor) -> Tensor:
        """The trainable values `[..., D]` of full vectors `[..., size]` (a copy)."""
        self._check(full, self.size, "full adapter vector")
        parts = [e.trained_of(full).flatten(-len(e.shape)) for e in self.entries if e.trainable]
        return torch.cat(parts, dim=-1) if parts else full[..., :0].clone()

    def with_trainable(self, full: Tensor, trainable: Tensor) -> Tensor:
        """A copy of `full` whose trainable values are replaced."""
        self._check(full, self.size, "full adapter vector")
        self._check(trainable, self.dim, "trainable vector")
        result = full.clone()
        for entry, offset in self.trainable_entries():
            values = trainable[..., offset : offset + entry.trained_size]
            entry.trained_of(result).copy_(_shaped(values, entry.trained_shape))
        return result

    def training(self, train: str, ranks: int | None = None, heads: bool = True) -> "AdapterLayout":
        """Make the layout of these values with other factors (`"both"`, `"a"`, `"b"`) and ranks trained, and `heads`.

        ValueError if the adapters have fewer than `ranks` ranks.
        """
        checks.one_of(("both", "a", "b"), train=train)
        frozen = ({"both": "", "a": "B", "b": "A"}[train], "" if heads else "head")
        trained = tuple(replace(e, trainable=e.factor not in frozen, ranks=None) for e in self.entries)
        if ranks is None or ranks == self.rank:
            return AdapterLayout(trained)
        checks.within(1, self.rank, ranks=ranks, remedy="the upper limit is model.rank")
        return AdapterLayout(tuple(replace(e, ranks=None if e.factor == "head" else ranks) for e in trained))

    @property
    def rank(self) -> int:
        """Rank of the adapters; 0 if there are none."""
        return next((e.shape[0] for e in self.entries if e.factor == "A"), 0)

    def truncate_ranks(self, full: Tensor, ranks: int) -> Tensor:
        """A copy of `full` in which all ranks but the first `ranks` are zero: the model of a client of that rank.

        Where A and B are zero so are their gradients: training in full then is training at that rank.
        """
        result = full.clone()
        for entry in self.entries:
            if entry.factor == "A":
                entry.of(result)[..., ranks:, :] = 0
            elif entry.factor == "B":
                entry.of(result)[..., ranks:] = 0
        return result

    def tensors(self, full: Tensor) -> dict[str, Tensor]:
        """Named views of one full vector, under PEFT's state-dict names."""
        self._check(full, self.size, "full adapter vector")
        return {e.name: e.of(full) for e in self.entries}

    def vector(self, tensors: dict[str, Tensor]) -> Tensor:
        """Join named tensors, as `tensors` gives them, into one float32 vector.

        ValueError if a name is missing or a shape differs.
        """
        for entry in self.entries:
            if entry.name not in tensors:
                raise ValueError(f"adapter has no tensor {entry.name!r}; were targets, layers or heads the same?")
            if tuple(tensors[entry.name].shape) != entry.shape:
                raise ValueError(f"{entry.name} must have shape {entry.shape}, got {tuple(tensors[entry.name].shape)}")
        return torch.cat([tensors[e.name].detach().reshape(-1).float().cpu() for e in self.entries])

    def to_json(self) -> list[dict[str, object]]:
        return [
            {
                "name": e.name,
                "shape": list(e.shape),
                "factor": e.factor,
                "pair": e.pair,
                "trainable": e.trainable,
                "ranks": e.ranks,
            }
            for e in self.entries
        ]

    @staticmethod
    def from_json(data: list[dict[str, Any]]) -> "AdapterLayout":
        entries, offset = [], 0
        for item in data:
            place = item["name"], tuple(item["shape"]), offset, item["factor"], item["pair"]
            entry = Entry(*place, item["trainable"], item["ranks"])
            entries.append(entry)
            offset += entry.size
        return AdapterLayout(tuple(entries))

    @staticmethod
    def _check(vector: Tensor, size: int, what: str) -> None:
        if vector.shape[-1] != size:
            raise ValueError(f"{what} must have {size} values, got {vector.shape[-1]}")


def _shaped(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view with the last dimension in this shape."""
    view: Tensor = values.unflatten(-1, shape)  # type: ignore[no-untyped-call]
    return view


def drawn_a(entry: Entry, seed: int, *keys: str | int) -> Tensor:
    """A factor A to start from: float32 ``[rank, in]``, uniform in +-1/sqrt(in); seed and keys decide it."""
    limit = 1.0 / math.sqrt(entry.shape[1])
    draws = simulation_generator(seed, *keys, entry.name).uniform(-limit, limit, entry.shape)
    return torch.from_numpy(draws.astype(np.float32))


def turn_factors(
    vector: Float[Tensor, "... size"],
    turns: Mapping[str, Float[Tensor, "r r"]],
    layout: AdapterLayout,
    moment: int = 1,
) -> Float[Tensor, "... size"]:
    """Full vectors whose blocks of B are multiplied by R from the right; by R o R where it holds second moments."""
    result = vector.clone()
    for entry in layout.entries:
        if entry.factor == "B":
            entry.of(result).copy_(entry.of(vector) @ turns[entry.pair] ** moment)
    return result
