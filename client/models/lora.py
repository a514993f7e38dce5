"""Low-rank adapters: which modules carry them, the vector training starts from, PEFT files in and out, merging.

LoRA (Hu et al. 2021, arXiv 2106.09685): `y = x W^T + b + (alpha / rank) (x A^T) B^T` with W frozen, A `[rank, in]` and
B `[out, rank]`.

What is trained here loads with `PeftModel.from_pretrained`, and PEFT's files load here. Merged, `W + (alpha / rank) B
A` stands in the place of `W` and computes what the adapter beside `W` computes, up to rounding: a plain transformers
model, with which everything works that transformers can do (generation with its cache, scoring).
"""

import copy
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from peft import LoraConfig, TaskType
from safetensors.torch import load_file, save
from torch import Tensor, nn

from client.models.frozen.bitnet import is_ternary
from privacy import checks
from strategies.adapter.layout import PEFT_PREFIX, AdapterLayout, Entry, drawn_a
from strategies.adapter.residual import check_residual, pairs


class CannotMerge(ValueError):
    """An adapter that its base model cannot take into its weights."""


@dataclass(frozen=True)
class LoraSpec:
    """The places of adapters and which of their values are trained.

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
    """The shape (in, out) of a Linear or of GPT-2's transposed `Conv1D`. None for any other module."""
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
        raise ValueError(
            f"targets {missing} name no module of {type(model).__name__}; its Linear layers are {known}; 'auto' "
            "chooses, 'all-linear' takes those of the blocks"
        )
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


def merge_adapter(model: nn.Module, spec: LoraSpec, vector: Float[Tensor, " size"]) -> Any:
    """A copy of `model` with the adapter `vector` (full, of the layout of `spec`) in its weights; `model` is unchanged.

    Args:
        model: as :func:`client.models.base.load_base` gives it, not one that an engine has taken over.

    Raises:
        CannotMerge: an adapter beside a ternary weight, which cannot be added to it.
        ValueError: a vector of another size.
    """
    layout, result = adapter_layout(model, spec), copy.deepcopy(model)
    tensors = layout.tensors(vector)
    with torch.no_grad():
        for entry in layout.entries:
            if entry.factor == "B":
                module: Any = result.get_submodule(entry.pair)
                if is_ternary(module):
                    raise CannotMerge(f"{entry.pair} has ternary weights, to which no adapter can be added")
                first = tensors[entry.name.replace(".lora_B.", ".lora_A.")]
                change = spec.scale * tensors[entry.name].double() @ first.double()
                weight = module.weight.double() + (change if isinstance(module, nn.Linear) else change.t())
                # a new parameter: an embedding that is tied to this weight stays as it is, as beside an adapter
                module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
            elif entry.factor == "head":
                result.get_parameter(entry.name.removeprefix(PEFT_PREFIX)).copy_(tensors[entry.name])
    return result.eval()


WEIGHTS = "adapter_model.safetensors"
BASE_DIGEST = "base-fingerprint"
"""Entry of the header of that file: what :func:`client.models.files.fingerprint` says of the base model."""


def peft_config(spec: LoraSpec, *, base: str = "", task_type: TaskType | None = None) -> LoraConfig:
    """PEFT's configuration of a spec."""
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # PEFT only divides it by r
        lora_dropout=spec.dropout,
        target_modules=list(spec.targets),
        layers_to_transform=None if spec.layers is None else list(spec.layers),
        modules_to_save=list(spec.heads) or None,
        use_dora=spec.dora,
        bias=spec.bias,  # type: ignore[arg-type]  # checked by LoraSpec
        base_model_name_or_path=base or None,
        task_type=task_type,
    )


def save_peft(
    folder: str | Path,
    vector: Tensor,
    layout: AdapterLayout,
    spec: LoraSpec,
    *,
    base: str = "",
    task_type: TaskType | None = None,
    base_digest: str = "",
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` into `folder` (made if missing).

    Args:
        vector: full vector of `layout`.
        base: name or folder of the base model, recorded in the configuration, as `task_type` is.
        base_digest: its fingerprint, recorded in the header of the weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: values.detach().float().cpu().contiguous() for name, values in layout.tensors(vector).items()}
    header = {"format": "pt"} | ({BASE_DIGEST: base_digest} if base_digest else {})
    (folder / WEIGHTS).write_bytes(_ordered(save(tensors, metadata=header)))
    config = peft_config(spec, base=base, task_type=task_type)
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _ordered(content: bytes) -> bytes:
    """A safetensors file with the entries about it in order, which safetensors writes in another one each time."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def load_peft(folder: str | Path, layout: AdapterLayout) -> Tensor:
    """The full vector in PEFT's `folder`. ValueError if its tensors are not those of `layout`."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} holds no {WEIGHTS}; give the folder of a saved adapter")
    tensors = load_file(path)
    extra = set(tensors) - {entry.name for entry in layout.entries}
    if extra:
        raise ValueError(f"adapter has tensors this layout does not know: {sorted(extra)[:4]}")
    return layout.vector(tensors).to(torch.float32)


def read_spec(folder: str | Path) -> LoraSpec:
    """The specification that :func:`save_peft` wrote into `folder`."""
    config: Any = LoraConfig.from_pretrained(str(folder))
    layers = config.layers_to_transform
    return LoraSpec(
        rank=config.r,
        alpha=float(config.lora_alpha),
        targets=tuple(sorted(config.target_modules or ())),
        layers=None if layers is None else tuple(layers),
        heads=tuple(config.modules_to_save or ()),
        dropout=config.lora_dropout,
        dora=config.use_dora,
        bias=config.bias,
    )


def as_one_adapter(
    vector: Float[Tensor, " size"], residual: Tensor, layout: AdapterLayout, spec: LoraSpec
) -> tuple[Tensor, AdapterLayout, LoraSpec]:
    """An adapter on W0 alone that computes the same: R + s B A of every layer by its singular vectors, the heads as is.

    Its rank is the largest numerical rank of a layer in float32, its alpha that rank, so that its scale is one.
    """
    check_residual(residual, layout)
    found = {}
    for pair in pairs(layout):
        product = pair.b.of(vector).double() @ pair.a.of(vector).double()
        u, singular, v = torch.linalg.svd(pair.of(residual).double() + spec.scale * product, full_matrices=False)
        kept = int((singular > singular.max() * max(pair.shape) * torch.finfo(torch.float32).eps).sum())
        root = singular.sqrt()
        found[pair.a.name] = (root[:, None] * v, kept)
        found[pair.b.name] = (u * root, kept)
    rank = max(1, *(kept for _, kept in found.values()))
    values, entries, offset = [], [], 0
    for entry in layout.entries:
        tensor = entry.of(vector)
        if entry.factor != "head":
            tensor = torch.zeros((rank, entry.shape[1]) if entry.factor == "A" else (entry.shape[0], rank))
            whole, kept = found[entry.name]
            if entry.factor == "A":
                tensor[:kept] = whole[:kept]
            else:
                tensor[:, :kept] = whole[:, :kept]
        values.append(tensor.reshape(-1))
        entries.append(replace(entry, shape=tuple(tensor.shape), offset=offset, ranks=None))
        offset += tensor.numel()
    return torch.cat(values), AdapterLayout(tuple(entries)), replace(spec, rank=rank, alpha=float(rank))
