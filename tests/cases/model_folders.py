"""Folders with very small models of every architecture that is said to run. Not a test."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from client.models import toy

_SMALL: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 130, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
LANGUAGE_MODELS: dict[str, dict[str, Any] | None] = {
    "gpt2": None, "llama": None, "qwen2": None, "mistral": None, "gemma2": None, "bloom": None, "gpt-neo": None,
    "deepseek-v3": None,
    "qwen3": {**_GROUPED, "head_dim": 8},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "gemma3_text": {**_GROUPED, "head_dim": 8, "sliding_window": 8},
    "phi3": {**_GROUPED, "rope_scaling": None},
    "olmo2": _GROUPED,
    "smollm3": _GROUPED,
    "gpt_neox": _SMALL,
    "opt": {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "falcon": _SMALL,
    "granite": _GROUPED,
}  # fmt: skip
"""The settings of a model by its type for transformers; None: what ``random:`` makes under that name."""
ENCODERS: dict[str, dict[str, Any] | None] = {
    "bert": None, "roberta": None, "deberta-v2": None, "mpnet": None,
    "distilbert": {"vocab_size": 260, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0},
    "modernbert": {**_SMALL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    "xlm-roberta": _SMALL,
    "electra": {**_SMALL, "embedding_size": 16},
    "albert": {**_SMALL, "embedding_size": 16},
}  # fmt: skip


def model_folder(kind: str, folder: Path) -> str:
    """Write a model of that kind and a tokenizer of bytes into `folder`; the task that it is for."""
    causal = kind in LANGUAGE_MODELS
    settings = (LANGUAGE_MODELS if causal else ENCODERS)[kind]
    if settings is None:
        model = toy.build(f"random:{kind}", causal=causal)
    else:
        auto: Any = AutoModelForCausalLM if causal else AutoModel
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = auto.from_config(AutoConfig.for_model(kind, **settings))
    model.save_pretrained(folder)
    toy.byte_tokenizer().save_pretrained(folder)
    return "causal-lm" if causal else "classification"
