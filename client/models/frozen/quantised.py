"""Frozen weights in 8 or 4 bits: blocks of 64 values with a scale each, made wide again for every product.

- ``"int8"``: `round(127 w / s)`, `s` the largest absolute value of the block (absmax; Dettmers et al. 2022, arXiv
  2208.07339v2, without its outliers).
- ``"nf4"``: the nearest of 16 values that are quantiles of a normal distribution, times `s` (QLoRA, Dettmers et al.
  2023, arXiv 2305.14314v1, without the second quantisation of the scales).

Only the Linear layers of the transformer's blocks are quantised: embeddings, heads, norms and biases stay as they are.
Adapters are trained beside the rounded weights. The products are those of the rounded weight in full width, by the
kernel that a weight without quantisation would have, so nothing that is proved or tested of those kernels changes. What
is saved is memory, not time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client.models.frozen.bitnet import is_ternary
from client.models.frozen.linear import Products
from client.models.lora import computes_as_linear, layer_index, linear_shape
from privacy import checks

QUANTISATIONS = ("none", "int8", "nf4")

BLOCK = 64
"""Values that share a scale."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Quantised:
    """A weight in few bits. `wide()` is the same values every time, in the dtype that the weight had."""

    def __init__(self, weight: Tensor, quantisation: str) -> None:
        checks.one_of(QUANTISATIONS[1:], quantisation=quantisation)
        self.shape, self.dtype, self.four = weight.shape, weight.dtype, quantisation == "nf4"
        values = weight.detach().float().flatten()
        blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        self.scales = blocks.abs().amax(dim=1, keepdim=True)
        shares = blocks / self.scales.clamp(min=torch.finfo(torch.float32).tiny)
        if not self.four:
            self.codes = (shares * 127).round().to(torch.int8)
            return
        table = torch.tensor(NF4, device=weight.device)
        codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        self.codes = codes[:, ::2] * 16 + codes[:, 1::2]
        self._pairs = torch.cartesian_prod(table, table)  # the two values of every byte

    def wide(self) -> Tensor:
        """The rounded weight, in full width."""
        if self.four:
            shares = self._pairs[self.codes.flatten().int()].view(-1, BLOCK)
            blocks = shares.mul_(self.scales)
        else:
            blocks = self.codes.float().mul_(self.scales / 127)
        return blocks.flatten()[: self.shape.numel()].view(self.shape).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


class QuantisedWeight:
    """The two products of a quantised weight; see :class:`client.models.frozen.kernels.FrozenWeight`.

    Args:
        products: of the wide weight.
    """

    def __init__(self, quantisation: str, weight: Tensor, products: Products) -> None:
        self.stored = Quantised(weight, quantisation)
        self._products = products

    def forward(self, x: Tensor) -> Tensor:
        return self._products(self.stored.wide()).forward(x)

    def backward(self, dy: Tensor) -> Tensor:
        return self._products(self.stored.wide()).backward(dy)


def stored_bytes(values: int, quantisation: str) -> int:
    """Bytes of a quantised weight of so many values."""
    return -(-values // BLOCK) * (BLOCK // (2 if quantisation == "nf4" else 1) + 4)


def block_linears(model: nn.Module) -> dict[str, Any]:
    """The layers that quantisation is for, by path: the Linear layers inside the transformer's blocks."""
    return {
        path: module
        for path, module in model.named_modules()
        if linear_shape(module) is not None and computes_as_linear(module) and layer_index(path) is not None
    }


def refuse_ternary(model: nn.Module) -> None:
    """Raise ValueError where a block's weights are of fewer bits already."""
    if any(is_ternary(module) for module in block_linears(model).values()):
        raise ValueError(
            "engine.quantisation: the model's weights are ternary already; set engine.quantisation = 'none'"
        )


@torch.no_grad()
def round_blocks(model: nn.Module, quantisation: str) -> None:
    """Round the weights of the blocks, in place, to what quantisation leaves of them; they stay in full width.

    For whatever computes with the model outside the stacked engine: it is then the model that adapters are trained on.
    """
    if quantisation == "none":
        return
    refuse_ternary(model)
    for module in block_linears(model).values():
        transposed = not isinstance(module, nn.Linear)  # GPT-2's Conv1D stores [in, out]
        weight = module.weight.t() if transposed else module.weight
        wide = Quantised(weight, quantisation).wide()
        module.weight.copy_(wide.t() if transposed else wide)
