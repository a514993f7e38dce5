"""Attention of short sequences on a CPU.

torch's fused attention handles one (row, head) at a time, which is right for long sequences; at the 8 to 64 tokens of
short texts its fixed cost per head dominates. Here all rows and heads go through batched products instead, and the keys
are padded to a full vector register so that the softmax is not computed one value at a time. Same mathematics, float32:
0.5-0.85 times the time of the fused kernel, forward and backward, up to 64 tokens; beyond that the fused one is used.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "lacquer_short"
LONGEST = 64
LANES = 16
"""float32 values in an AVX-512 register."""


def use_short_attention(model: nn.Module) -> None:
    """Switch a transformers model that uses `sdpa` attention to this one. Others are left as they are."""
    AttentionInterface.register(NAME, short_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = NAME


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention interface asks: query `[rows, heads, tokens, width]` -> `[rows, tokens, heads,
    width]`.
    """
    special = dropout or kwargs.get("position_bias") is not None or kwargs.get("cache") is not None
    if special or key.shape[2] > LONGEST or query.dtype != torch.float32 or query.device.type != "cpu":
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return result
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    bias = _bias(attention_mask, causal and attention_mask is None, query, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _ShortAttention.apply(query, key, value, bias, scale), None  # type: ignore[no-untyped-call]


def _bias(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """What is added to the scores: 0 where a token may look, the lowest number where it may not."""
    if mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask
    if mask.stride(2) == 0:  # the same for every query: keep it small
        mask = mask[:, :, :1]
    lowest = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, lowest)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        rows, heads, tokens, _ = query.shape
        keys = key.shape[2]
        # values may have another width than keys (DeepSeek)
        q, k, v = (x.reshape(rows * heads, -1, x.shape[-1]) for x in (query, key, value))
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
        if bias is not None:
            scores.view(rows, heads, tokens, keys).add_(bias)
        spare = -keys % LANES if keys < LANES else 0
        if spare:
            scores = F.pad(scores, (0, spare), value=-torch.inf)
        shares = torch.softmax(scores, -1)
        if spare:
            shares = shares[:, :, :keys].contiguous()
        result = torch.bmm(shares, v)
        ctx.save_for_backward(q, k, v, shares)
        ctx.shape, ctx.scale = query.shape, scale
        return result.view(rows, heads, tokens, -1).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, shares = ctx.saved_tensors
        rows, heads, tokens, _ = ctx.shape
        g = gradient.transpose(1, 2).reshape(rows * heads, tokens, -1)
        dv = torch.bmm(shares.transpose(1, 2), g)
        ds = torch.bmm(g, v.transpose(1, 2))
        # through the softmax: ds = p (dp - sum(p dp))
        if ds.shape[2] >= LANES:
            ds = torch.ops.aten._softmax_backward_data(ds, shares, -1, ds.dtype)
        else:  # the fused kernel takes rows under a register one value at a time
            ds.mul_(shares)
            ds.addcmul_(shares, ds.sum(-1, keepdim=True), value=-1)
        ds.mul_(ctx.scale)
        dq = torch.bmm(ds, k)
        dk = torch.bmm(ds.transpose(1, 2), q)
        dq, dk, dv = (x.view(rows, heads, -1, x.shape[-1]) for x in (dq, dk, dv))
        return dq, dk, dv, None, None
