"""Root-mean-square norms (Zhang and Sennrich 2019, arXiv 1910.07467) in few passes over memory.

`y = x w / sqrt(mean(x^2) + eps)` takes transformers six to eight kernels forwards and more backwards, each of which
reads and writes the whole hidden state. On a GPU, where a 1.1B model in bfloat16 spent a quarter of its time in them,
torch has one kernel for each direction. On a CPU it has none: float32 states go through a third of the passes here.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from privacy.randomness.rng import simulation_generator

ROWS = 4
"""Rows that are compared before a norm is replaced."""


def use_fused_norms(model: nn.Module) -> None:
    """Replace the root-mean-square norms of a frozen model in place.

    No class name tells what a norm does with its weight (Gemma adds 1 to it), so every module that has a weight of one
    dimension and nothing else is tried: what comes out as another formula would have it stays as it is.
    """
    for path, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        parameters = dict(module.named_parameters())
        if eps is None or list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
            continue
        norm = RootMeanSquareNorm(module, parameters["weight"], float(eps))
        if _same(module, norm):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, norm)


class RootMeanSquareNorm(nn.Module):
    """In place of a model's own norm, which computes what neither kernel here is for."""

    def __init__(self, original: nn.Module, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.original = original
        self.weight = weight
        self.eps = eps

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        y: Tensor
        if x.device.type == "cuda":
            y = F.rms_norm(x, tuple(self.weight.shape), self.weight, self.eps)
        elif x.dtype == self.weight.dtype == torch.float32:
            y = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        else:
            y = self.original(x)
        return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        scaled = dy * weight
        along = (scaled * x).sum(-1, keepdim=True).mul_(inverse**3).div_(-x.shape[-1])
        return scaled.mul_(inverse).addcmul_(x, along), None, None


@torch.no_grad()
def _same(original: nn.Module, norm: RootMeanSquareNorm) -> bool:
    """Whether the formula is the norm's own, on rows of very different size."""
    weight = norm.weight
    draws = simulation_generator(0, "norm-check").standard_normal((ROWS, len(weight)))
    x = torch.from_numpy(draws).to(weight) * torch.tensor([[1e-3], [0.1], [1.0], [100.0]]).to(weight)
    found, expected = F.rms_norm(x, tuple(weight.shape), weight, norm.eps), original(x)
    tolerance = 2.0**-6 if weight.dtype == torch.bfloat16 else 1e-5
    return found.shape == expected.shape and bool(torch.allclose(found, expected, rtol=tolerance, atol=0.0))
