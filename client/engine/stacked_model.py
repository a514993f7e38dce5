"""A frozen Hugging Face model whose targets and heads take the parameters of many clients from one flat buffer.

The buffer has one row per slot. Inside the engine B lies transposed (`[rank, out]`, see `client.engine.stacked`), so
the columns of a row are a permutation of the public vector; `inward` and `outward` are the two conversions.

Every micro-batch allocates and frees the same few hundred buffers of several MB. By default glibc returns such buffers
to the system at once, and the next one is paid for with a page fault and a zeroed page per 4 kB: 5-15 % of a training
step, more in virtual machines. So the memory of freed tensors is kept.
"""

import ctypes
import functools
import logging
import math
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from client.engine.attention import use_short_attention
from client.engine.checkpointing import checkpoint_blocks
from client.engine.norms import use_fused_norms
from client.engine.stacked import Adapted, Context, Gradient, Rows, TrainedHead
from client.models.frozen.kernels import in_own_dtype
from client.models.frozen.linear import FrozenLinear, MovedWeight, freeze_linear
from client.models.frozen.quantised import QuantisedWeight, block_linears, refuse_ternary
from client.models.lm_head import Predictions, run
from client.models.lora import LoraSpec, adapter_layout, computes_as_linear, head_modules, linear_shape, target_modules
from strategies.adapter.layout import PEFT_PREFIX, Entry
from strategies.adapter.residual import check_residual, pairs

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc, for the whole process, not to return freed memory. False where the C library is another one.

    The process then stays at its peak size until it ends, which is what a training worker needs.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    kept = bool(libc.mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST))
    if not kept:
        log.info("glibc refused mallopt; freed memory goes back to the system")
    return kept


class UnsupportedAdapter(ValueError):
    """The adapter needs the sequential engine."""


def refuse_unsupported(model: nn.Module, spec: LoraSpec) -> None:
    """Raise `UnsupportedAdapter`, with the reason, for what cannot be stacked."""
    if spec.dora:
        raise UnsupportedAdapter("DoRA couples the adapter with the norm of the frozen weight")
    if spec.bias != "none":
        raise UnsupportedAdapter(f"bias={spec.bias!r} trains biases of the frozen model")
    if spec.dropout:
        raise UnsupportedAdapter(f"adapter dropout {spec.dropout} draws masks that depend on how rows are batched")
    for path, module in target_modules(model, spec).items():
        if linear_shape(module) is None or not computes_as_linear(module):
            raise UnsupportedAdapter(f"target {path} is a {type(module).__name__}, not a plain Linear")
    for path, head in head_modules(model, spec).items():
        for name, part in head.named_modules():
            if next(part.parameters(recurse=False), None) is None:
                continue
            if linear_shape(part) is None or not computes_as_linear(part):
                raise UnsupportedAdapter(
                    f"head {path} holds a {type(part).__name__} ({name}); only Linear can be stacked"
                )
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedAdapter(f"{path} is a batch norm: it mixes the rows of different clients")


def _leave_the_file(model: nn.Module, going: set[int]) -> None:
    """Copy all weights but those that are `going` out of the file that they were loaded from.

    In the file's own dtype they are views of one mapping of it, which stays in memory as long as any of them does.
    """
    for weight in model.parameters():
        if id(weight) not in going:
            weight.data = weight.data.clone()


class StackedModel:
    """Takes ownership of `model`: freezes it, and replaces its Linears in place.

    Args:
        quantisation: of the weights of the blocks, see `client.models.frozen.quantised`.
        checkpointing: see `client.engine.checkpointing`.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: LoraSpec,
        *,
        precision: str,
        device: torch.device,
        quantisation: str = "none",
        checkpointing: bool = False,
    ) -> None:
        refuse_unsupported(model, spec)
        self.layout = adapter_layout(model, spec)
        self.model = model.eval().requires_grad_(False)
        self.device = device
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        if precision in ("fp64", "bf16-model"):
            model.to(torch.float64 if precision == "fp64" else torch.bfloat16)
        self.context = Context(device)
        self._forget_generation_cache()
        if device.type == "cpu":
            keep_freed_memory()
            if precision != "fp64":
                use_short_attention(model)
        else:
            use_fused_norms(model)
        self._modules: dict[str, Adapted | TrainedHead] = {}
        targets, heads = list(target_modules(model, spec)), list(head_modules(model, spec))
        self.trained = [*targets, *heads]
        quantised: set[str] = set()
        if quantisation != "none":
            refuse_ternary(model)
            quantised = set(block_linears(model))
        linears = {p: m for p, m in model.named_modules() if linear_shape(m) and computes_as_linear(m)}
        if quantised:
            _leave_the_file(model, {id(linears[path].weight) for path in quantised})
        for path in list(linears):
            module = linears.pop(path).to(device)  # one by one: a quantised weight is gone before the next one comes
            stored = functools.partial(QuantisedWeight, quantisation) if path in quantised else None
            if any(path == head or path.startswith(head + ".") for head in heads):
                self._modules[path] = TrainedHead(self.context)
                replacement: nn.Module = self._modules[path]
            elif path in targets:
                weight = freeze_linear(path, module, precision, device, adapted=True, stored=stored)
                self._modules[path] = Adapted(weight, spec.scale, self.context)
                replacement = self._modules[path]
            else:
                replacement = FrozenLinear(freeze_linear(path, module, precision, device, stored=stored))
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], replacement)
        model.to(device)
        if checkpointing:
            checkpoint_blocks(model)

    def _forget_generation_cache(self) -> None:
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False

    @property
    def pad(self) -> int:
        return getattr(self.model.config, "pad_token_id", None) or 0

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None, rows: Rows) -> Tensor | Predictions:
        """Logits of rows that belong to the slots named by `rows`, or what a language model's loss takes instead."""
        self.context.rows, self.context.tokens = rows.to(self.device), input_ids.numel()
        return run(self.model, input_ids, attention_mask)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        """Gradients of `loss`, into the bound buffers."""
        loss.backward()  # type: ignore[no-untyped-call]

    def inward(self, rows: Float[Tensor, "... values"], *, full: bool) -> Tensor:
        """Public vectors in the engine's order and dtype."""
        return self._reorder(rows.to(self.device, self.dtype), full, inward=True)

    def outward(self, rows: Float[Tensor, "... dim"]) -> Tensor:
        """Trainable vectors of the engine in public order."""
        return self._reorder(rows, False, inward=False)

    def _reorder(self, rows: Tensor, full: bool, *, inward: bool) -> Tensor:
        size = self.layout.size if full else self.layout.dim
        if rows.shape[-1] != size:
            raise ValueError(
                f"{'full adapter' if full else 'trainable'} vector must have {size} values, got {rows.shape[-1]}"
            )
        result = rows.clone()
        for entry, offset in self._offsets(full):
            if entry.factor == "B":
                shape = entry.shape if inward else entry.shape[::-1]
                view = _block(rows, offset, shape).transpose(-1, -2)
                _block(result, offset, shape[::-1]).copy_(view)
        return result

    def _offsets(self, full: bool) -> Iterator[tuple[Entry, int]]:
        if full:
            return ((entry, entry.offset) for entry in self.layout.entries)
        return self.layout.trainable_entries()

    def set_residual(self, residual: Float[Tensor, " values"] | None) -> None:
        """The frozen weights of the adapted layers as loaded, plus the residual if there is one."""
        if residual is not None:
            check_residual(residual, self.layout)
            residual = residual.to(self.device, self.dtype)
        for pair in pairs(self.layout):
            module = self._modules[pair.a.pair]
            assert isinstance(module, Adapted), "pairs are of adapters"
            loaded = module.weight_.frozen if isinstance(module.weight_, MovedWeight) else module.weight_
            module.weight_ = loaded
            if residual is not None:
                added = in_own_dtype(pair.of(residual), None, self.device)
                module.weight_ = MovedWeight(loaded, added, self.dtype)

    def bind(
        self,
        base: Float[Tensor, " size"],
        stacked: Float[Tensor, "slots dim"] | None = None,
        gradients: Float[Tensor, "slots dim"] | Sequence[Tensor] | None = None,
    ) -> None:
        """Point every module at its parameters (all in the engine's order).

        Args:
            base: full vector; gives the frozen factors, and all of them where `stacked` is None.
            stacked: trainable vectors, one per slot.
            gradients: where gradients of the trainable factors go: added to one row per slot, or written to one
                tensor per entry with a row per record (`record_buffers`).
        """
        for entry in self.layout.entries:
            self._set(entry, _block(base, entry.offset, self._inner_shape(entry)), None)
        self._gradients: list[Gradient | None] = []
        for number, (entry, offset) in enumerate(self.layout.trainable_entries()):
            shape = self._inner_shape(entry)
            values = None if stacked is None else _block(stacked, offset, shape)
            gradient = None
            if isinstance(gradients, Tensor):
                gradient = Gradient(_block(gradients, offset, shape))
            elif gradients is not None:
                gradient = Gradient(gradients[number], fresh=True)
            self._gradients.append(gradient)
            self._set(entry, values, gradient)

    def record_buffers(self, records: int) -> list[Tensor]:
        """Room for the gradients of so many records, one contiguous tensor per trainable entry."""
        shapes = [self._inner_shape(entry) for entry, _ in self.layout.trainable_entries()]
        return [torch.empty(records, *shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def record_rows(self, records: int) -> Float[Tensor, "records dim"]:
        """The vectors, in public order, that the last backward pass wrote into the bound `record_buffers`."""
        result = torch.zeros(records, self.layout.dim, dtype=self.dtype, device=self.device)
        for (entry, offset), gradient in zip(self.layout.trainable_entries(), self._gradients, strict=True):
            if gradient is not None and not gradient.fresh:  # a module that the loss does not reach has gradient 0
                values = gradient.values[:records]
                values = values.transpose(1, 2) if entry.factor == "B" else values
                _block(result, offset, tuple(values.shape[1:])).copy_(values)
        return result

    @staticmethod
    def _inner_shape(entry: Entry) -> tuple[int, ...]:
        if entry.factor == "B":
            return entry.shape[::-1]
        return (1, *entry.shape) if len(entry.shape) == 1 else entry.shape

    def _set(self, entry: Entry, values: Tensor | None, gradient: Gradient | None) -> None:
        path, _, name = entry.name.removeprefix(PEFT_PREFIX).rpartition(".")
        if entry.factor != "head":
            path, name = path.rpartition(".")[0], entry.factor.lower()
        module = self._modules[path]
        attribute = name if entry.factor != "head" else name + "_"
        if values is not None:
            setattr(module, attribute, values)
        setattr(module, "gradient_" + name, gradient)


def _block(rows: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """The values of one entry in vectors `[..., values]`, as a view `[..., *shape]`."""
    return rows[..., offset : offset + math.prod(shape)].view(*rows.shape[:-1], *shape)
