"""A model that does not fit the GPU is refused with the memory it needs."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from client.models.devices import activation_bytes, refuse_too_large, weight_bytes
from client.models.frozen.base import FrozenBase


def test_what_a_model_of_seven_billion_needs():
    config = LlamaConfig(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    full, small = (weight_bytes(model, kind) for kind in ("none", "nf4"))
    assert full == 2 * 6_738_415_616
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert small == full - 2 * blocks + blocks // 2 + blocks // 16, "half a byte a value, four bytes a scale of 64"
    kept = activation_bytes(model, 512, value=2)
    assert activation_bytes(model, 512, value=2, checkpoint_blocks=True) < kept / 8
    refuse_too_large(small, kept, 10 * 2**30, 512)
    with pytest.raises(
        ValueError, match=r"needs about 14\.6 GiB \(12\.6 GiB for weights, 2\.0 GiB .* 10\.0 GiB are free"
    ):
        refuse_too_large(full, kept, 10 * 2**30, 512)
    refuse_too_large(full, kept, full + kept, 512)


def test_plain_peft_holds_rounded_weights_in_full_width(monkeypatch):
    model, _ = FrozenBase().load("random:llama", "causal-lm")
    base = FrozenBase(quantisation="nf4")
    kept = activation_bytes(model, 64)
    free = weight_bytes(model, "nf4") + kept
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    base.refuse_unfit(model, "cuda", 64)
    with pytest.raises(ValueError, match="does not fit the GPU"):
        base.refuse_unfit(model, "cuda", 64, plain=True)
    with pytest.raises(ValueError, match="does not fit the GPU"):
        base.refuse_unfit(model, "cuda", 65)
