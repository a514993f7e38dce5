"""Very small models with seeded random weights, one per architecture, and a tokenizer of bytes.

They exist so that every architecture can be tested without a download: two layers, width 32, grouped-query attention
where the architecture has it. A run on one of them learns little and says nothing about utility.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BitNetConfig,
    BloomConfig,
    DebertaV2Config,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    MPNetConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    RobertaConfig,
)

from client.models.files import RANDOM_PREFIX

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_VOCABULARY = len(_SPECIAL) + 256
_POSITIONS = 130

_ENCODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": _POSITIONS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
_DECODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": _POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": _VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": _POSITIONS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BLOOM = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT_NEO = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "max_position_embeddings": _POSITIONS,
    "resid_dropout": 0.0,
    "embed_dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK = {
    **_DECODER,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DEBERTA = {
    **_ENCODER,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_buckets": 16,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
ARCHITECTURES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "bert": (BertConfig, _ENCODER),
    "roberta": (RobertaConfig, {**_ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2": (GPT2Config, _GPT2),
    "llama": (LlamaConfig, _DECODER),
    "llama-tied": (LlamaConfig, {**_DECODER, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, _DECODER),
    "mistral": (MistralConfig, _DECODER),
    "gemma2": (Gemma2Config, {**_DECODER, "head_dim": 8, "sliding_window": 8}),
    "bloom": (BloomConfig, _BLOOM),
    "gpt-neo": (GPTNeoConfig, _GPT_NEO),
    "deepseek-v3": (DeepseekV3Config, _DEEPSEEK),
    "deberta-v2": (DebertaV2Config, _DEBERTA),
    "mpnet": (MPNetConfig, _ENCODER),
    "bitnet": (BitNetConfig, _DECODER),
    "bitnet-ternary": (BitNetConfig, _DECODER),
}
ENCODERS_ALONE = ("deberta-v2", "mpnet")
"""Architectures that transformers has no language model of."""


def configuration(name: str, *, causal: bool) -> PretrainedConfig:
    """The configuration of the model `name` (``"random:bert"``).

    Raises:
        ValueError: unknown architecture.
    """
    architecture = name.removeprefix(RANDOM_PREFIX)
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"unknown random model {name!r}; known: {', '.join(RANDOM_PREFIX + key for key in ARCHITECTURES)}"
        )
    make, arguments = ARCHITECTURES[architecture]
    config = make(**arguments)
    if causal and isinstance(config, BertConfig | RobertaConfig):
        config.is_decoder = True
    return config


def build(name: str, *, causal: bool, seed: int = 0, **options: Any) -> Any:
    """The model `name` (``"random:bert"``), a language model if `causal`. The global random state is left as it was.

    Raises:
        ValueError: unknown architecture.
    """
    architecture = name.removeprefix(RANDOM_PREFIX)
    config = configuration(name, causal=causal)
    auto: Any = AutoModelForCausalLM if causal else AutoModel
    if not causal and isinstance(config, BertConfig | MPNetConfig | RobertaConfig):
        options = {**options, "add_pooling_layer": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, **options)
        if architecture == "bitnet-ternary":
            _make_ternary(model)
    model.name_or_path = model.config.name_or_path = name
    return model


def _make_ternary(model: nn.Module) -> None:
    """Linear layers but the head as BitNet b1.58 has them: ternary weights, activations of 8 bits."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path != "lm_head":
            from transformers.integrations.bitnet import AutoBitLinear  # brings a compiler that nothing else needs

            make: Any = AutoBitLinear
            layer = make(
                module.in_features, module.out_features, bias=False, dtype=module.weight.dtype, online_quant=True
            )
            layer.weight = module.weight
            model.set_submodule(path, layer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, ``<s>`` in front and ``</s>`` behind; reversible on any text. The caller's own."""
    return copy.deepcopy(_byte_tokenizer())


@functools.cache
def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL.values(), *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end = _SPECIAL["bos_token"], _SPECIAL["eos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B {end}",
        special_tokens=[(begin, vocabulary[begin]), (end, vocabulary[end])],
    )
    make: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make(tokenizer_object=tokenizer, model_max_length=_POSITIONS - 2, **_SPECIAL)
    return fast
