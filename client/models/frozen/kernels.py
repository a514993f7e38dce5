"""Kernels that multiply by a frozen weight, in float32 or bfloat16.

A frozen Linear costs two products, `x W^T` forwards and `dy W` backwards, and no weight gradient. Measured on one core
(AMD Zen 4, 2,000 rows, 384 to 1,536 columns, torch 2.13): 105 GFLOP/s with torch's default float32 kernel (MKL), 240
with oneDNN's float32 kernel (same accuracy), 450 with oneDNN's bfloat16 kernel.

Two kernels choose how they sum by the number of rows, and are avoided for it: MKL's in float32, below 16 rows with
AVX-512 and at all numbers with AVX2, and oneDNN's for AMX in bfloat16 where a sum is longer than about 512. So float32
goes through oneDNN, and bfloat16, where that is so, in blocks of a few sizes that were found to sum alike
(:func:`block_sizes`), the last block filled up: the kernel never sees another number of rows.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

SMALLEST_BF16_SIDE = 256
"""Below this width conversions cost more than the faster product saves."""

FEWEST_ROWS = 4

BLOCK = 128
"""Rows of the block of a bfloat16 product that the other sizes are compared with."""

BLOCKS = (2048, 1024, 512, 256, BLOCK, 64, 32)
"""Sizes that are tried; no product has more rows than the first. Measured on one core of a Xeon with AMX, 576 x 576: 64
rows run at 900 GFLOP/s, 128 at 1,240, 256 at 1,480, 1,024 at 1,640. What fills up the last costs half of the least."""

GPU_BLOCKS = (16384, 8192, 4096, *BLOCKS)
"""The same on a GPU, whose products of few rows leave most of it idle. Ampere and Ada change kernels between them."""

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
        sizes: gives the numbers of rows of a product by the shape `(out, in)` that it multiplies by and the device,
            see :func:`block_sizes`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        narrow: bool = False,
        sizes: Callable[[tuple[int, int], torch.device], tuple[int, ...]] | None = None,
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
        most = (BLOCKS if weight.device.type == "cpu" else GPU_BLOCKS)[0]
        rows, sizes = x.reshape(-1, x.shape[-1]), self.sizes((width, weight.shape[1]), weight.device)
        if not sizes and len(rows) <= most:
            return _bf16_linear(x, weight, bias).to(dtype)
        low, result = 0, torch.empty(len(rows), width, dtype=dtype, device=x.device)
        while low < len(rows):
            part = rows[low : low + next((size for size in sizes if size <= len(rows) - low), most)]
            count = len(part)
            if sizes and count < sizes[-1]:
                part = F.pad(part, (0, 0, 0, sizes[-1] - count))
            result[low : low + count] = _bf16_linear(part, weight, bias)[:count]
            low += count
        return result.view(*x.shape[:-1], width)


def in_own_dtype(weight: Tensor, bias: Tensor | None, device: torch.device) -> FrozenWeight:
    """The products of `weight` ``[out, in]`` without rounding it."""
    if weight.dtype == torch.float32 and device.type == "cpu" and has_fast_onednn():
        return OneDnnWeight(weight, bias)
    return PlainWeight(weight, bias)


def in_bf16(shape: tuple[int, int]) -> bool:
    """Whether a weight of this shape is multiplied in bfloat16 under that precision."""
    return min(shape) >= SMALLEST_BF16_SIDE


def block_sizes(shape: tuple[int, int], device: torch.device) -> tuple[int, ...]:
    """The numbers of rows, largest first, at which `x W^T`, W bfloat16 `(out, in)`, keeps the bits of each row.

    Of :data:`BLOCKS`, or on a GPU :data:`GPU_BLOCKS`, those in which every row has the bits that it has in
    :data:`BLOCK` rows. None, which is any number up to the first, where that is so for all sizes, for :data:`PROBED`,
    and for about as many rows as W has, at which kernels change. Tried out in this process, on sums that cancel:
    another order shows in most values. It takes some 10 ms a shape and number of threads.
    """
    return _sizes_that_agree(shape, torch.get_num_threads(), device)


@functools.cache
def _sizes_that_agree(shape: tuple[int, int], threads: int, device: torch.device) -> tuple[int, ...]:
    blocks = BLOCKS if device.type == "cpu" else GPU_BLOCKS
    x, weight = cancelling_sums(shape, blocks[0])
    if device.type != "cpu":  # where oneDNN packs nothing
        x, weight = x.to(device), (weight.to_dense() if weight.is_mkldnn else weight).to(device)
    alike = torch.cat([_bf16_linear(part, weight, None) for part in torch.split(x, BLOCK)])

    def same(rows: int) -> bool:
        return torch.equal(_bf16_linear(x[:rows], weight, None), alike[:rows])

    about = {shape[0] - 1, shape[0], shape[0] + 1, shape[0] + 32, 2 * shape[0]}
    if all(same(rows) for rows in {*blocks, *PROBED, *about} if rows <= len(x)):
        return ()
    return tuple(rows for rows in blocks if rows <= len(x) and same(rows))


def cancelling_sums(shape: tuple[int, int], most: int = BLOCKS[0]) -> tuple[Tensor, Tensor]:
    """Rows `[n, in]`, at most so many, and a packed weight `(out, in)` of which large products cancel and small remain.

    Two thirds of the columns are pairs of one weight and opposite values, 2^18 times as large as the others, at places
    drawn by lot. What the sum loses on its way depends on its order.
    """
    draws = torch.Generator().manual_seed(0)
    most = min(most, 2**23 * most // BLOCKS[0] // max(shape))  # a vocabulary's would take long
    x, weight = torch.randn(most + -most % BLOCK, shape[1], generator=draws), torch.randn(shape, generator=draws)
    third = shape[1] // 3
    weight[:, third : 2 * third] = weight[:, :third]
    x[:, :third] *= 2.0**18
    x[:, third : 2 * third] = -x[:, :third]
    mixed = torch.randperm(shape[1], generator=draws)
    return x[:, mixed].to(torch.bfloat16), _packed(weight[:, mixed].to(torch.bfloat16))


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
    return x.dtype == torch.float32 and x.device.type == "cpu" and has_fast_onednn()


@functools.cache
def has_fast_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


@functools.cache
def multiplies_bf16() -> bool:
    """Whether oneDNN takes bfloat16 on this processor; with AVX2 alone torch's own product does, slowly."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
    refused = weight.dtype == torch.bfloat16 and not multiplies_bf16()
    if weight.device.type != "cpu" or vocabulary or refused or not has_fast_onednn():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK)  # type: ignore[no-any-return]


def _packed_transpose(weight: Tensor) -> Tensor:
    return _packed((weight.to_dense() if weight.is_mkldnn else weight).t())
