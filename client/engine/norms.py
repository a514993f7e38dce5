"""Root-mean-square norms (Zhang and Sennrich 2019, arXiv 1910.07467) in one pass over the memory of a GPU.

`y = x w / sqrt(mean(x^2) + eps)` takes transformers six to eight kernels forwards and more backwards, each of which
reads and writes the whole hidden state. torch has one kernel for each direction on a GPU; on a CPU it has none.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from privacy.randomness.rng import simulation_generator

SIZES = (1e-3, 0.1, 1.0, 100.0)
"""Of the rows that are compared before a norm is replaced."""


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
        norm = RootMeanSquareNorm(parameters["weight"], float(eps))
        if _same(module, norm):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, norm)


class RootMeanSquareNorm(nn.Module):
    """The norm by torch's own function, in the dtype of what it is given."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        y: Tensor = F.rms_norm(x, tuple(self.weight.shape), self.weight, self.eps)
        return y


@torch.no_grad()
def _same(original: nn.Module, norm: RootMeanSquareNorm) -> bool:
    """Whether the formula is the norm's own, on rows of very different size."""
    draws = simulation_generator(0, "norm-check").uniform(-1.0, 1.0, (len(SIZES), len(norm.weight)))
    x = torch.from_numpy(draws).to(norm.weight) * torch.tensor(SIZES).to(norm.weight)[:, None]
    found, expected = norm(x), original(x)
    tolerance = 2.0**-6 if x.dtype == torch.bfloat16 else 1e-5
    return found.shape == expected.shape and bool(torch.allclose(found, expected, rtol=tolerance, atol=0.0))
