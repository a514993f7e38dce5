"""Linear layers whose weight is frozen, and the kernel that each takes."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from client.models.frozen.bitnet import TernaryWeight, is_ternary
from client.models.frozen.kernels import BF16Weight, FrozenWeight, in_bf16, in_own_dtype

BEFORE_ACTIVATION = ("intermediate.dense", "mlp.gate_proj", "mlp.up_proj")
"""Frozen layers whose result goes through an elementwise activation into another frozen layer, and nowhere else."""


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
