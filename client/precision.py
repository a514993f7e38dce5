"""Arithmetic of the frozen weights: float32, or bfloat16 products inside a float32 model.

Frozen weights need no weight gradient, so each Linear costs two products: `x W^T` forwards, `dy W` backwards. In
bfloat16 they run 2.2-2.5 times faster on a CPU with AVX512-BF16; attention, norms, residuals and adapters stay float32
(attention's backward pass in bfloat16 is several times slower on a CPU). The forward product and the product of the
backward pass are rounded once each, to 8 bits of mantissa; everything is accumulated in float32 by the kernel.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALLEST_BF16_SIDE = 256
"""Below this width the conversions cost more than the faster product saves (measured: 0.5x at 64, 1.8x at 384)."""


class FrozenWeight(Protocol):
    """The two products of a frozen Linear. Shapes `[..., in]` and `[..., out]`."""

    def forward(self, x: Tensor) -> Tensor: ...
    def backward(self, dy: Tensor) -> Tensor: ...


class PlainWeight:
    """Products in the model's own dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def backward(self, dy: Tensor) -> Tensor:
        return torch.matmul(dy, self.weight)


class BF16Weight:
    """Products in bfloat16, float32 outside. Holds the weight twice (as it is and transposed): 4 bytes a value."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.detach().to(torch.bfloat16).contiguous()
        self.transposed = self.weight.t().contiguous()
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self.weight, self.bias).float()

    def backward(self, dy: Tensor) -> Tensor:
        return F.linear(dy.to(torch.bfloat16), self.transposed).float()


class FrozenLinear(nn.Module):
    """A Linear whose weight is never trained; saves nothing for the backward pass."""

    def __init__(self, weight: FrozenWeight) -> None:
        super().__init__()
        self.weight_ = weight

    def forward(self, x: Tensor) -> Tensor:
        return _FrozenFunction.apply(x, self.weight_)


class _FrozenFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: FrozenWeight) -> Tensor:
        ctx.weight = weight
        return weight.forward(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.weight.backward(dy), None


def weight_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight `[out, in]` and bias of a Linear or of GPT-2's Conv1D (which stores `[in, out]`)."""
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
    return weight, module.bias


def frozen(module: nn.Module, precision: str) -> FrozenWeight:
    weight, bias = weight_of(module)
    if precision == "bf16" and min(weight.shape) >= SMALLEST_BF16_SIDE and weight.dtype == torch.float32:
        return BF16Weight(weight, bias)
    return PlainWeight(weight, bias)


def choose(precision: str, device: torch.device) -> str:
    """`"auto"` becomes `"bf16"` where the machine multiplies bfloat16 in hardware, else `"fp32"`."""
    if precision not in ("auto", "fp32", "bf16", "fp64"):
        raise ValueError(f"precision must be one of 'auto', 'fp32', 'bf16', 'fp64', got {precision!r}")
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if fast else "fp32"
