"""Where every value of an adapter lies in one flat vector.

Two vectors are used everywhere:

- the *full* vector (`layout.size` values) holds every adapter value, also a factor that is frozen this round;
- the *trainable* vector (`layout.dim` = D values) is the sub-vector that is trained, clipped and sent.

Names are those of PEFT's state dicts, so that a vector can be written as files that `PeftModel.from_pretrained` loads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from privacy import checks

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Entry:
    """One tensor of the adapter: `factor` is "A", "B" or "head"; `pair` names the block it is clipped with."""

    name: str
    shape: tuple[int, ...]
    offset: int
    factor: str
    pair: str
    trainable: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class AdapterLayout:
    """Where each tensor lies in the full vector, and which of them form the trainable vector (in the same order)."""

    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Values in the full vector."""
        return sum(entry.size for entry in self.entries)

    @property
    def dim(self) -> int:
        """Values in the trainable vector (D)."""
        return sum(entry.size for entry in self.entries if entry.trainable)

    def trainable_entries(self) -> Iterator[tuple[Entry, int]]:
        """Every trainable entry with its offset in the trainable vector."""
        offset = 0
        for entry in self.entries:
            if entry.trainable:
                yield entry, offset
                offset += entry.size

    def blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks of the trainable vector, in its order: one per (A, B) pair, then one per head."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            if entry.trainable:
                sizes[entry.pair] = sizes.get(entry.pair, 0) + entry.size
        return tuple(sizes.values())

    def block_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.pair for entry in self.entries if entry.trainable))

    def trainable(self, full: Tensor) -> Tensor:
        """The trainable values `[..., D]` of full vectors `[..., size]` (a copy)."""
        self._check(full, self.size, "full adapter vector")
        parts = [full[..., e.offset : e.offset + e.size] for e in self.entries if e.trainable]
        return torch.cat(parts, dim=-1) if parts else full[..., :0].clone()

    def with_trainable(self, full: Tensor, trainable: Tensor) -> Tensor:
        """A copy of `full` whose trainable values are replaced."""
        self._check(full, self.size, "full adapter vector")
        self._check(trainable, self.dim, "trainable vector")
        result = full.clone()
        for entry, offset in self.trainable_entries():
            result[..., entry.offset : entry.offset + entry.size] = trainable[..., offset : offset + entry.size]
        return result

    def training(self, train: str) -> "AdapterLayout":
        """The same values with other factors trained: `"both"`, `"a"` or `"b"`. Heads are always trained."""
        checks.one_of(("both", "a", "b"), train=train)
        frozen = {"both": "", "a": "B", "b": "A"}[train]
        return AdapterLayout(tuple(replace(e, trainable=e.factor != frozen) for e in self.entries))

    def tensors(self, full: Tensor) -> dict[str, Tensor]:
        """Named views of one full vector, under PEFT's state-dict names."""
        self._check(full, self.size, "full adapter vector")
        return {e.name: full[e.offset : e.offset + e.size].view(e.shape) for e in self.entries}

    def vector(self, tensors: dict[str, Tensor]) -> Tensor:
        """The inverse of `tensors`: one float32 vector. ValueError if a name is missing or a shape differs."""
        for entry in self.entries:
            if entry.name not in tensors:
                raise ValueError(f"adapter has no tensor {entry.name!r}; were targets, layers or heads the same?")
            if tuple(tensors[entry.name].shape) != entry.shape:
                raise ValueError(f"{entry.name} must have shape {entry.shape}, got {tuple(tensors[entry.name].shape)}")
        return torch.cat([tensors[e.name].detach().reshape(-1).float().cpu() for e in self.entries])

    def to_json(self) -> list[dict[str, object]]:
        return [
            {"name": e.name, "shape": list(e.shape), "factor": e.factor, "pair": e.pair, "trainable": e.trainable}
            for e in self.entries
        ]

    @staticmethod
    def from_json(data: list[dict[str, Any]]) -> "AdapterLayout":
        entries, offset = [], 0
        for item in data:
            entry = Entry(item["name"], tuple(item["shape"]), offset, item["factor"], item["pair"], item["trainable"])
            entries.append(entry)
            offset += entry.size
        return AdapterLayout(tuple(entries))

    @staticmethod
    def _check(vector: Tensor, size: int, what: str) -> None:
        if vector.shape[-1] != size:
            raise ValueError(f"{what} must have {size} values, got {vector.shape[-1]}")
