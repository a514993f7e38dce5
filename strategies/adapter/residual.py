r"""The residual that an aggregation writes into the frozen weights: W = W0 + R + s B A, one dense R per adapted layer.

FedEx-LoRA (Singhal et al. 2024, arXiv 2410.09432) and FLoRA (Wang et al. 2024, arXiv 2409.05976) put a part of what
clients learnt into W0. Here W0 stays as it was loaded, whatever its form (bfloat16, BitNet's ternary values), and R is
kept beside the adapter in one flat float32 vector: the `[out, in]` matrices of the adapted layers, in the order of the
layout. It is as large as those layers, and so is the message that carries it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from strategies.adapter.layout import AdapterLayout, Entry


@dataclass(frozen=True)
class Pair:
    """The factors of one adapted layer, and where its R lies in the flat vector."""

    a: Entry
    b: Entry
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the layer's residual R: out, in."""
        return self.b.shape[0], self.a.shape[1]

    def of(self, residual: Tensor) -> Float[Tensor, "out in"]:
        """View the residual R of this layer in the flat vector."""
        rows, columns = self.shape
        return residual[self.offset : self.offset + rows * columns].view(rows, columns)


def pairs(layout: AdapterLayout) -> Iterator[Pair]:
    """Every adapted layer of a layout."""
    factors: dict[str, dict[str, Entry]] = {}
    for entry in layout.entries:
        if entry.factor != "head":
            factors.setdefault(entry.pair, {})[entry.factor] = entry
    offset = 0
    for both in factors.values():
        pair = Pair(both["A"], both["B"], offset)
        yield pair
        offset += pair.shape[0] * pair.shape[1]


def residual_size(layout: AdapterLayout) -> int:
    """Values in the flat vector of all R."""
    return sum(pair.shape[0] * pair.shape[1] for pair in pairs(layout))


def check_residual(residual: Tensor, layout: AdapterLayout) -> None:
    """Raise ValueError if the vector is not of this layout."""
    if residual.shape != (residual_size(layout),):
        raise ValueError(f"residual must have {residual_size(layout)} values, got shape {list(residual.shape)}")
