"""Shares that were released with noise, made shares again: post-processing of a release."""

import torch
from jaxtyping import Float64
from torch import Tensor


def nearest_shares(noisy: Float64[Tensor, " bins"], total: float) -> Float64[Tensor, " bins"]:
    """The shares nearest to noisy ones, none below 0, that sum to ``total``: most of the noise of empty bins goes.

    Projection onto the simplex; Duchi et al. 2008 (ICML), Figure 1.
    """
    ordered = noisy.sort(descending=True).values
    excess = (ordered.cumsum(0) - total) / torch.arange(1, len(noisy) + 1)
    last = int(torch.nonzero(ordered > excess)[-1]) if bool((ordered > excess).any()) else 0
    return (noisy - excess[last]).clamp(0.0)
