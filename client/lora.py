"""Low-rank adapters as data: which modules carry them, and the vector training starts from.

LoRA (Hu et al. 2021, arXiv 2106.09685): `y = x W^T + b + (alpha / rank) (x A^T) B^T` with W frozen, A `[rank, in]` and
B `[out, rank]`.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from client.bitnet import is_ternary
from client.layout import PEFT_PREFIX, AdapterLayout, Entry
from client.part import Part
from privacy import checks
from privacy.rng import simulation_generator

__all__ = [
    "AdapterLayout",
    "Entry",
    "LoraSpec",
    "Part",
    "adapter_layout",
    "computes_as_linear",
    "drawn_a",
    "head_modules",
    "initial_adapter",
    "layer_index",
    "linear_shape",
    "matches",
    "target_modules",
]


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
        checks.integer_at_least(1, rank=self.rank)
        checks.positive(alpha=self.alpha)
        checks.one_of(("both", "a", "b"), train=self.train)
        checks.one_of(("none", "all", "lora_only"), bias=self.bias)
        checks.fraction(dropout=self.dropout)
        if not self.targets and not self.heads:
            raise ValueError("nothing to train: name at least one target module or one head")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


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
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight.shape[0], weight.shape[1]
    return None


def computes_as_linear(module: nn.Module) -> bool:
    """Whether the module is a product with its weight and nothing more: no quantised one but BitNet's, no hooks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    return type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D" or is_ternary(module)


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
    """The layout of `spec` on `model`: (A, B) of every target in the model's order, then the heads.

    Raises:
        ValueError: a target is no linear layer, or smaller than the rank, beyond which nothing is gained.
    """
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
        if spec.rank > min(shape):
            raise ValueError(f"model.rank must be at most {min(shape)}, the smaller side of {path}, got {spec.rank}")
        add(f"{path}.lora_A.weight", (spec.rank, shape[0]), "A", path)
        add(f"{path}.lora_B.weight", (shape[1], spec.rank), "B", path)
    for path, module in head_modules(model, spec).items():
        for name, parameter in module.named_parameters():
            add(f"{path}.{name}", tuple(parameter.shape), "head", path)
    return AdapterLayout(tuple(entries)).training(spec.train)


def drawn_a(entry: Entry, seed: int, *keys: str | int) -> Tensor:
    """A factor A to start from: float32 ``[rank, in]``, uniform in +-1/sqrt(in); seed and keys decide it."""
    limit = 1.0 / math.sqrt(entry.shape[1])
    draws = simulation_generator(seed, *keys, entry.name).uniform(-limit, limit, entry.shape)
    return torch.from_numpy(draws.astype(np.float32))


def initial_adapter(layout: AdapterLayout, model: nn.Module, seed: int) -> Tensor:
    """A full float32 vector to start from: A uniform in +-1/sqrt(in) (PEFT's default), B zero, heads as in `model`.

    The same seed gives the same A on every machine. `model` must not yet have been given to an engine.
    """
    heads = dict(model.named_parameters())
    full = torch.zeros(layout.size)
    for entry in layout.entries:
        values = full[entry.offset : entry.offset + entry.size].view(entry.shape)
        if entry.factor == "A":
            values.copy_(drawn_a(entry, seed, "adapter"))
        elif entry.factor == "head":
            values.copy_(heads[entry.name.removeprefix(PEFT_PREFIX)].detach())
    return full
