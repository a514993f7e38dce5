"""Blocks of a frozen model that keep nothing for the backward pass but their input, and are computed again in it.

Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174), one block at a time. The second pass is the first one over
again, by the same kernels on the same rows, so every gradient is the same bit by bit.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: nn.Module) -> None:
    """Let every layer of the model's lists of layers compute itself again in the backward pass."""
    found = list(blocks(model))
    if not found:
        raise ValueError(f"engine.checkpoint-blocks = true: {type(model).__name__} has no list of layers")
    for block in found:
        block.forward = functools.partial(_computed_again, block.forward)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The children of every list of modules that lies in no other list."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


def _computed_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # nothing is random in an engine, whose model is in evaluation mode
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
