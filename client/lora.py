"""Low-rank adapters as data: which modules carry them, and where every value lies in one flat vector.

LoRA (Hu et al. 2021, arXiv 2106.09685): `y = x W^T + b + (alpha / rank) (x A^T) B^T` with W frozen, A `[rank, in]` and
B `[out, rank]`.

Two vectors are used everywhere:

- the *full* vector (`layout.size` values) holds every adapter value, also a factor that is frozen this round;
- the *trainable* vector (`layout.dim` = D values) is the sub-vector that is trained, clipped and sent.

Names are those of PEFT's state dicts, so that a vector can be written as files that `PeftModel.from_pretrained` loads.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from privacy.rng import simulation_generator

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraSpec:
    """Where adapters go and which of their values are trained.

    Attributes:
        rank: columns of B, rows of A.
        alpha: numerator of the scale `alpha / rank`.
        targets: module names (or dotted suffixes) of the Linear layers to adapt, e.g. `("query", "value")`.
        layers: indices of the transformer layers to adapt; None adapts all of them.
        train: `"both"`, or one factor only: `"b"` (FFA-LoRA, arXiv 2403.12313), `"a"` (RoLoRA's other half).
        heads: modules (or dotted suffixes) trained in full beside the adapters, e.g. `("classifier",)`.
        dropout: dropout on the adapter's input; must be 0 for the stacked engine (frozen evaluation mode).
        dora: weight-decomposed LoRA; only the sequential engine knows it.
        bias: `"none"`, `"all"` or `"lora_only"`; anything but `"none"` needs the sequential engine.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    train: str = "both"
    heads: tuple[str, ...] = ()
    dropout: float = 0.0
    dora: bool = False
    bias: str = "none"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be >= 1, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be > 0, got {self.alpha}")
        if self.train not in ("both", "a", "b"):
            raise ValueError(f"train must be one of 'both', 'a', 'b', got {self.train!r}")
        if self.bias not in ("none", "all", "lora_only"):
            raise ValueError(f"bias must be one of 'none', 'all', 'lora_only', got {self.bias!r}")
        if not self.targets and not self.heads:
            raise ValueError("nothing to train: name at least one target module or one head")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


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
        if train not in ("both", "a", "b"):
            raise ValueError(f"train must be one of 'both', 'a', 'b', got {train!r}")
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
    def from_json(data: list[dict]) -> "AdapterLayout":
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


def matches(path: str, names: tuple[str, ...]) -> bool:
    """Whether a module path is named by one of `names`, whole or as a dotted suffix (PEFT's rule)."""
    return any(path == name or path.endswith("." + name) for name in names)


def layer_index(path: str) -> int | None:
    """Index of the transformer layer a module path lies in (its first numeric part), or None outside the stack."""
    found = re.search(r"(?:^|\.)(\d+)\.", path)
    return int(found.group(1)) if found else None


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a Linear or of GPT-2's transposed `Conv1D`; None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and module.weight.ndim == 2:
        return module.weight.shape[0], module.weight.shape[1]
    return None


def target_modules(model: nn.Module, spec: LoraSpec) -> dict[str, nn.Module]:
    """Modules that carry an adapter, by path, in the model's own order. ValueError if a target names nothing."""
    found, used = {}, set()
    for path, module in model.named_modules():
        for name in spec.targets:
            if not matches(path, (name,)):
                continue
            used.add(name)
            if spec.layers is None or layer_index(path) in spec.layers:
                found[path] = module
    missing = [name for name in spec.targets if name not in used]
    if missing:
        known = sorted({path.rpartition(".")[2] for path, m in model.named_modules() if linear_shape(m)})
        raise ValueError(f"targets {missing} name no module of {type(model).__name__}; its Linear layers are {known}")
    if spec.targets and not found:
        raise ValueError(f"layers {spec.layers} hold none of the targets {spec.targets}")
    return found


def head_modules(model: nn.Module, spec: LoraSpec) -> dict[str, nn.Module]:
    """Modules trained in full, by path. ValueError if a head names nothing."""
    found = {path: module for path, module in model.named_modules() if path and matches(path, spec.heads)}
    missing = [name for name in spec.heads if not any(matches(path, (name,)) for path in found)]
    if missing:
        raise ValueError(f"heads {missing} name no module of {type(model).__name__}")
    return found


def adapter_layout(model: nn.Module, spec: LoraSpec) -> AdapterLayout:
    """The layout of `spec` on `model`: (A, B) of every target in the model's order, then the heads."""
    entries: list[Entry] = []
    offset = 0

    def add(name: str, shape: tuple[int, ...], factor: str, pair: str) -> None:
        nonlocal offset
        entries.append(Entry(PEFT_PREFIX + name, shape, offset, factor, pair))
        offset += math.prod(shape)

    for path, module in target_modules(model, spec).items():
        shape = linear_shape(module)
        if shape is None:
            raise ValueError(f"target {path} is a {type(module).__name__}; adapters need a Linear (or GPT-2's Conv1D)")
        add(f"{path}.lora_A.weight", (spec.rank, shape[0]), "A", path)
        add(f"{path}.lora_B.weight", (shape[1], spec.rank), "B", path)
    for path, module in head_modules(model, spec).items():
        for name, parameter in module.named_parameters():
            add(f"{path}.{name}", tuple(parameter.shape), "head", path)
    return AdapterLayout(tuple(entries)).training(spec.train)


def initial_adapter(layout: AdapterLayout, model: nn.Module, seed: int) -> Tensor:
    """A full float32 vector to start from: A uniform in +-1/sqrt(in) (PEFT's default), B zero, heads as in `model`.

    The same seed gives the same A on every machine. `model` must not yet have been given to an engine.
    """
    heads = dict(model.named_parameters())
    full = torch.zeros(layout.size)
    for entry in layout.entries:
        values = full[entry.offset : entry.offset + entry.size].view(entry.shape)
        if entry.factor == "A":
            limit = 1.0 / math.sqrt(entry.shape[1])
            draws = simulation_generator(seed, "adapter", entry.name).uniform(-limit, limit, entry.shape)
            values.copy_(torch.from_numpy(draws.astype(np.float32)))
        elif entry.factor == "head":
            values.copy_(heads[entry.name.removeprefix(PEFT_PREFIX)].detach())
    return full
