"""A frozen layer of BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764), as transformers loads it.

    y = quantise(x) ternary(W)^T      quantise: 8 bits, one scale per token;  ternary: -1, 0, 1 times mean |W|

Both roundings pass gradients straight through, so a frozen layer's gradient in its input is ``dy ternary(W)``, and an
adapter beside it works on the plain input, as in PEFT. The weight is rounded once here instead of at every call.
"""

from torch import Tensor, nn

from client.models.frozen.kernels import in_own_dtype

SMALLEST = 1e-5


def is_ternary(module: nn.Module) -> bool:
    """Whether it is transformers' ``AutoBitLinear`` without a norm of its own inside."""
    return type(module).__name__ == "AutoBitLinear" and getattr(module, "rms_norm", None) is None


class TernaryWeight:
    """The two products of a frozen ternary layer; see :class:`client.models.frozen.kernels.FrozenWeight`."""

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
