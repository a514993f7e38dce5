"""Arithmetic of the frozen weights: which kernel multiplies them, in float32 or bfloat16.

A frozen Linear costs two products, `x W^T` forwards and `dy W` backwards, and no weight gradient. Measured on one core
(AMD Zen 4, 2,000 rows, 384 to 1,536 columns, torch 2.13): 105 GFLOP/s with torch's default float32 kernel (MKL), 240
with oneDNN's float32 kernel (same accuracy), 450 with oneDNN's bfloat16 kernel. So:

- `"fp32"`: oneDNN in float32 where the CPU has AVX2 or AVX-512, torch's default elsewhere;
- `"bf16"`: products of frozen weights in bfloat16 (inputs and result rounded to 8 bits of mantissa, sums in float32);
  attention, norms, residuals, adapters and heads stay float32. What a frozen layer passes to a fused activation stays
  bfloat16: it is rounded already, and the next product rounds it anyway.
- `"bf16-model"`: the whole frozen model in bfloat16, for GPUs; the adapters' parameters, gradients and moments, and
  the loss, stay float32.
- `"fp64"`: everything in float64, for tests of equality.

In one thread of a CPU with AVX2, `"fp32"` and `"bf16"` give a unit bit by bit the same contribution whatever others it
is computed with (client/engine/batching.py; docs/engine.md, "Batch invariance"), as the accountant takes it to be.
Two kernels choose how they sum by the number of rows, and are avoided for it: MKL's in float32, below 16 rows with
AVX-512 and at all numbers with AVX2, and oneDNN's for AMX in bfloat16 where a sum is longer than about 512. So float32
goes through oneDNN, and bfloat16, where that is so, in blocks of a few sizes that were found to sum alike
(:func:`block_sizes`), the last block filled up: the kernel never sees another number of rows.
Several threads, and a GPU, choose kernels by the number of rows too: float32 then moves a contribution by about 1e-5
of its size, bfloat16 by some 1e-2. So `"auto"` is `"bf16"` in one thread of a CPU that multiplies it in hardware and
whose products of the model's shapes pass :func:`keeps_rows`, and `"fp32"` elsewhere; bfloat16 elsewhere is for whoever
asks for it, and privacy.json says that it was (`batch_invariance_note`).

A frozen layer may also be that of BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764), as transformers loads it:

    y = quantise(x) ternary(W)^T      quantise: 8 bits, one scale per token;  ternary: -1, 0, 1 times mean |W|

Both roundings pass gradients straight through, so a frozen layer's gradient in its input is ``dy ternary(W)``, and an
adapter beside it works on the plain input, as in PEFT. The weight is rounded once here instead of at every call.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from privacy import checks

log = logging.getLogger(__name__)

SMALLEST = 1e-5


def is_ternary(module: nn.Module) -> bool:
    """Whether it is transformers' ``AutoBitLinear`` without a norm of its own inside."""
    return type(module).__name__ == "AutoBitLinear" and getattr(module, "rms_norm", None) is None


class TernaryWeight:
    """The two products of a frozen ternary layer; see :class:`client.models.frozen_linear.FrozenWeight`."""

    def __init__(self, module: nn.Module) -> None:
        weight, bias = module.weight.detach(), module.bias  # type: ignore[operator]
        assert isinstance(weight, Tensor)
        weight = _ternary(weight) if getattr(module, "online_quant", False) else weight
        self.scale: Tensor | None = None if getattr(module, "online_quant", False) else module.weight_scale  # type: ignore[assignment]
        self._products = in_own_dtype(weight, bias if isinstance(bias, Tensor) else None, weight.device)

    def forward(self, x: Tensor) -> Tensor:
        y = self._products.forward(_quantise(x))
        return y if self.scale is None else y * self.scale

    def backward(self, dy: Tensor) -> Tensor:
        return self._products.backward(dy if self.scale is None else dy * self.scale)


def _ternary(weight: Tensor) -> Tensor:
    scale = 1.0 / weight.float().abs().mean().clamp(min=SMALLEST)
    return ((weight.float() * scale).round().clamp(-1, 1) / scale).to(weight.dtype)


def _quantise(x: Tensor) -> Tensor:
    wide = x.float()
    scale = 127 / wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return ((wide * scale).round().clamp(-128, 127) / scale).to(x.dtype)


PRECISIONS = ("auto", "fp32", "bf16", "bf16-model", "fp64")

SMALLEST_BF16_SIDE = 256
"""Below this width conversions cost more than the faster product saves."""

BEFORE_ACTIVATION = ("intermediate.dense", "mlp.gate_proj", "mlp.up_proj")
"""Frozen layers whose result goes through an elementwise activation into another frozen layer, and nowhere else."""


FEWEST_ROWS = 4

BLOCK = 128
"""Rows of the block of a bfloat16 product that the other sizes are compared with."""

BLOCKS = (2048, 1024, 512, 256, BLOCK, 64, 32)
"""Sizes that are tried; no product has more rows than the first. Measured on one core of a Xeon with AMX, 576 x 576: 64
rows run at 900 GFLOP/s, 128 at 1,240, 256 at 1,480, 1,024 at 1,640. What fills up the last costs half of the least."""

PROBED = (4, 8, 16, 33, 96, 300, 1365)
"""Further numbers of rows that are compared. A vocabulary's weight never meets the most of them."""

NARROWEST = 8
"""A float32 matrix with a side so many times the other is a vocabulary's, and often the embeddings' tensor too: packing
would hold it twice."""


def enough_rows(x: Tensor) -> Tensor:
    """`x` ``[rows, n]`` with rows of zeros behind it where it has fewer than :data:`FEWEST_ROWS`.

    Products of fewer rows go through other kernels, which sum in another order: a row would tell how few there were.
    """
    return x if len(x) >= FEWEST_ROWS else F.pad(x, (0, 0, 0, FEWEST_ROWS - len(x)))


class FrozenWeight(Protocol):
    """The two products of a frozen Linear. Shapes `[..., in]` and `[..., out]`."""

    def forward(self, x: Tensor) -> Tensor: ...
    def backward(self, dy: Tensor) -> Tensor: ...


class PlainWeight:
    """Torch's default products, in the model's own dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def backward(self, dy: Tensor) -> Tensor:
        return torch.matmul(dy, self.weight)


class OneDnnWeight:
    """A frozen weight for oneDNN's float32 products, held twice once it has gone backwards: 8 bytes a value."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = _packed(weight.detach())
        self.bias = None if bias is None else bias.detach().contiguous()

    @functools.cached_property
    def transposed(self) -> Tensor:
        return _packed_transpose(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return _onednn_linear(x, self.weight, self.bias)

    def backward(self, dy: Tensor) -> Tensor:
        return _onednn_linear(dy, self.transposed, None)


class BF16Weight:
    """A frozen weight with bfloat16 products. Holds the weight twice once it has gone backwards: 4 bytes a value.

    A bfloat16 input gives a bfloat16 gradient back; the result is bfloat16 only if `narrow`.

    Args:
        sizes: gives the numbers of rows of a product by the shape `(out, in)` that it multiplies by, see
            :func:`block_sizes`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        narrow: bool = False,
        sizes: Callable[[tuple[int, int]], tuple[int, ...]] | None = None,
    ) -> None:
        self.weight = _packed(weight.detach().to(torch.bfloat16))
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)
        self.narrow, self.sizes = narrow, sizes or block_sizes

    @functools.cached_property
    def transposed(self) -> Tensor:
        return _packed_transpose(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._times(x, self.weight, self.bias, torch.bfloat16 if self.narrow else torch.float32)

    def backward(self, dy: Tensor) -> Tensor:
        return self._times(dy, self.transposed, None, torch.bfloat16)

    def _times(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, width = x.to(torch.bfloat16), weight.shape[0]
        if weight.device.type != "cpu":
            return _bf16_linear(x, weight, bias).to(dtype)
        rows, sizes = x.reshape(-1, x.shape[-1]), self.sizes((width, weight.shape[1]))
        if not sizes and len(rows) <= BLOCKS[0]:
            return _bf16_linear(x, weight, bias).to(dtype)
        low, result = 0, torch.empty(len(rows), width, dtype=dtype)
        while low < len(rows):
            part = rows[low : low + next((size for size in sizes if size <= len(rows) - low), BLOCKS[0])]
            count = len(part)
            if sizes and count < sizes[-1]:
                part = F.pad(part, (0, 0, 0, sizes[-1] - count))
            result[low : low + count] = _bf16_linear(part, weight, bias)[:count]
            low += count
        return result.view(*x.shape[:-1], width)


class MovedWeight:
    """A frozen weight and, added to it, a residual (:mod:`strategies.adapter.residual`) with products of its own."""

    def __init__(self, frozen: FrozenWeight, residual: FrozenWeight, dtype: torch.dtype) -> None:
        self.frozen, self.residual, self.dtype = frozen, residual, dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen.forward(x)
        return y + self.residual.forward(x.to(self.dtype)).to(y.dtype)

    def backward(self, dy: Tensor) -> Tensor:
        dx = self.frozen.backward(dy)
        return dx + self.residual.backward(dy.to(self.dtype)).to(dx.dtype)


class FrozenLinear(nn.Module):
    """A Linear whose weight is never trained; saves nothing for the backward pass."""

    def __init__(self, weight: FrozenWeight) -> None:
        super().__init__()
        self.weight_ = weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _FrozenFunction.apply(x, self.weight_)  # type: ignore[no-untyped-call]
        return result


class _FrozenFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight) -> Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        return weight.forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        weight: FrozenWeight = ctx.weight
        return weight.backward(dy).to(ctx.dtype), None


Products = Callable[[Tensor], FrozenWeight]
"""The kernel that multiplies by a weight ``[out, in]``."""


def freeze_linear(
    path: str,
    module: nn.Module,
    precision: str,
    device: torch.device,
    *,
    adapted: bool = False,
    stored: Callable[[Tensor, Products], FrozenWeight] | None = None,
) -> FrozenWeight:
    """The products of the Linear (or BitNet's, or GPT-2's Conv1D, which stores `[in, out]`) at `path` of a model.

    The result is `narrow` before an activation, except where an adapter adds to it: its part would be rounded away.
    `stored` holds the weight in its own way, and is given the kernel that would have multiplied by it.
    """
    if is_ternary(module):
        return TernaryWeight(module)
    weight, bias = cast(Tensor, module.weight), cast(Tensor | None, module.bias)
    if not isinstance(module, nn.Linear):
        weight = weight.t()

    def products(weight: Tensor) -> FrozenWeight:
        if precision == "bf16" and in_bf16((weight.shape[0], weight.shape[1])) and weight.dtype == torch.float32:
            return BF16Weight(weight, bias, narrow=not adapted and path.endswith(BEFORE_ACTIVATION))
        return in_own_dtype(weight, bias, device)

    return products(weight) if stored is None else stored(weight, products)


def in_own_dtype(weight: Tensor, bias: Tensor | None, device: torch.device) -> FrozenWeight:
    """The products of `weight` ``[out, in]`` without rounding it."""
    if weight.dtype == torch.float32 and device.type == "cpu" and _has_fast_onednn():
        return OneDnnWeight(weight, bias)
    return PlainWeight(weight, bias)


def choose(precision: str, device: torch.device, shapes: Iterable[tuple[int, int]] = ()) -> str:
    """`"auto"` becomes the fastest arithmetic in which units do not round one another.

    Args:
        shapes: `(out, in)` of the frozen weights, which are tried out before bfloat16 is taken.
    """
    checks.one_of(PRECISIONS, precision=precision)
    if precision not in ("auto", "bf16"):
        return precision
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    if precision == "auto" and not (alone and fast):
        return "fp32"
    failed = [shape for shape in sorted(set(shapes)) if alone and in_bf16(shape) and not keeps_rows(shape)]
    if not failed:
        return "bf16"
    log.warning(
        "bfloat16 products of %s x %s round a row by the number of rows beside it on this processor: %s",
        *failed[0],
        "float32 is taken"
        if precision == "auto"
        else "units move each other's contributions; engine.precision = 'auto' takes float32 here",
    )
    return "bf16" if precision == "bf16" else "fp32"


def in_bf16(shape: tuple[int, int]) -> bool:
    """Whether a weight of this shape is multiplied in bfloat16 under that precision."""
    return min(shape) >= SMALLEST_BF16_SIDE


def block_sizes(shape: tuple[int, int]) -> tuple[int, ...]:
    """The numbers of rows, largest first, at which `x W^T`, W bfloat16 `(out, in)`, keeps the bits of each row.

    Of :data:`BLOCKS`, those in which every row has the bits that it has in :data:`BLOCK` rows. None, which is any
    number up to the first, where that is so for all sizes, for :data:`PROBED`, and for about as many rows as W has, at
    which kernels change. Tried out in this process, on sums that cancel: another order shows in most values. It takes
    some 10 ms a shape and number of threads.
    """
    return _sizes_that_agree(shape, torch.get_num_threads())


@functools.cache
def _sizes_that_agree(shape: tuple[int, int], threads: int) -> tuple[int, ...]:
    x, weight = _cancelling(shape)
    alike = torch.cat([_bf16_linear(part, weight, None) for part in torch.split(x, BLOCK)])

    def same(rows: int) -> bool:
        return torch.equal(_bf16_linear(x[:rows], weight, None), alike[:rows])

    about = {shape[0] - 1, shape[0], shape[0] + 1, shape[0] + 32, 2 * shape[0]}
    if all(same(rows) for rows in {*BLOCKS, *PROBED, *about} if rows <= len(x)):
        return ()
    return tuple(rows for rows in BLOCKS if rows <= len(x) and same(rows))


def _cancelling(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Rows `[n, in]` and a packed weight `(out, in)` whose large products cancel, and whose small ones remain.

    Two thirds of the columns are pairs of one weight and opposite values, 2^18 times as large as the others, at places
    drawn by lot. What the sum loses on its way depends on its order.
    """
    draws = torch.Generator().manual_seed(0)
    most = min(BLOCKS[0], 2**23 // max(shape))  # a vocabulary's would take long
    x, weight = torch.randn(most + -most % BLOCK, shape[1], generator=draws), torch.randn(shape, generator=draws)
    third = shape[1] // 3
    weight[:, third : 2 * third] = weight[:, :third]
    x[:, :third] *= 2.0**18
    x[:, third : 2 * third] = -x[:, :third]
    mixed = torch.randperm(shape[1], generator=draws)
    return x[:, mixed].to(torch.bfloat16), _packed(weight[:, mixed].to(torch.bfloat16))


@functools.cache
def keeps_rows(shape: tuple[int, int]) -> bool:
    """Whether a row of both bfloat16 products with a weight `(out, in)` has the same bits in few rows and in many.

    Tried out on the first and on the last of the rows, as :func:`block_sizes` does, which chose how to multiply.
    """
    for wanted in (shape, shape[::-1]):
        x, packed = _cancelling(wanted)
        weight = BF16Weight(packed.to_dense() if packed.is_mkldnn else packed, None, narrow=True)
        many = weight.forward(x)
        for rows in (rows for rows in PROBED if rows < len(x)):
            first, last = weight.forward(x[:rows]), weight.forward(x[-rows:])
            if not (torch.equal(first, many[:rows]) and torch.equal(last, many[-rows:])):
                return False
    return True


def batch_invariance_note(precision: str, *, gpu: bool = False) -> tuple[str, ...]:
    """The part that a guarantee under this setting does not cover, for ``privacy.json``."""
    checks.one_of(PRECISIONS, precision=precision)
    if not precision.startswith("bf16"):
        if gpu:
            return (
                "rounding of gradients on a GPU: it depends on which units are computed together, so one unit moves "
                "the contributions of others, in float32 by about 1e-5 of their size where it was measured",
            )
        if precision == "fp64" or _has_fast_onednn():
            return ()
        return (
            "rounding of gradients to float32: this processor has no kernels that are known to round a record alike "
            "whatever records are computed with it, so one unit may move the contributions of others by their rounding",
        )
    return (
        f"rounding of gradients to bfloat16 (engine.precision = {precision!r}) on a GPU or in several threads: it "
        "depends on which units are computed together, so one unit moves the contributions of others by some percent "
        "of their size where it was measured; the default ('auto') takes bfloat16 only where that does not happen",
    )


def shared_product(x: Tensor, factor: Tensor) -> Tensor:
    """`x F^T` of a thin factor that all rows share; x `[n, in]`, F `[out, in]`, the same bits in any number of rows."""
    if _by_onednn(x):
        return _onednn_linear(enough_rows(x), factor.contiguous(), None)[: len(x)]
    return (enough_rows(x) @ factor.t())[: len(x)]


def add_shared_expansion(y: Tensor, u: Tensor, factor: Tensor) -> None:
    """`y += u F`, in place; u `[n, out]`, F `[out, in]`, y `[n, in]`, the same bits in any number of rows."""
    if _by_onednn(u) and torch.backends.cpu.get_cpu_capability() == "AVX2":
        y += shared_product(u, factor.t())
    elif len(u) < FEWEST_ROWS:
        y.copy_(enough_rows(y).addmm_(enough_rows(u), factor)[: len(u)])
    else:
        y.addmm_(u, factor)  # a third of oneDNN's time, and the bits of a row are its own with AVX-512


def _by_onednn(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and _has_fast_onednn()


@functools.cache
def _has_fast_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # torch's public F.linear uses oneDNN for bfloat16 only; this is the operator that torch.compile emits for float32
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _onednn_linear(x, weight, bias) if weight.is_mkldnn else F.linear(x, weight, bias)


def _packed(weight: Tensor) -> Tensor:
    """`weight` in oneDNN's own order, which each product would have to bring it into otherwise."""
    weight = weight.contiguous()
    vocabulary = weight.dtype == torch.float32 and max(weight.shape) >= NARROWEST * min(weight.shape)
    if weight.device.type != "cpu" or vocabulary or not _has_fast_onednn():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK)  # type: ignore[no-any-return]


def _packed_transpose(weight: Tensor) -> Tensor:
    return _packed((weight.to_dense() if weight.is_mkldnn else weight).t())
