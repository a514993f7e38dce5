"""Random models and clients that the tests of the cohort engine share. Not a test."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from client.data.records import Records
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import CausalLM, SequenceClassification, Task

WORDS = 90
CLASSES = 3
_ENCODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "num_labels": CLASSES,
    "pad_token_id": 0,
}
_DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 96,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str) -> tuple[nn.Module, LoraSpec, Task]:
    """A small random model with an adapter spec and a task that fit it."""
    classes = SequenceClassification(CLASSES, balance="prior")
    encoder = LoraSpec(4, 8.0, ("query", "value"), heads=("classifier",))
    decoder = LoraSpec(4, 8.0, ("q_proj", "v_proj"))
    makers = {
        "bert": (lambda: BertForSequenceClassification(BertConfig(**_ENCODER)), encoder, classes),
        "roberta": (lambda: RobertaForSequenceClassification(RobertaConfig(**_ENCODER)), encoder, classes),
        "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)), LoraSpec(4, 8.0, ("c_attn", "c_fc")), CausalLM()),
        "gpt2-classifier": (
            lambda: GPT2ForSequenceClassification(GPT2Config(**_GPT2)),
            LoraSpec(4, 8.0, ("c_attn",), heads=("score",)),
            classes,
        ),
        "llama": (lambda: LlamaForCausalLM(LlamaConfig(**_DECODER)), decoder, CausalLM()),
        "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**_DECODER)), decoder, CausalLM()),
        "mistral": (
            lambda: MistralForCausalLM(MistralConfig(**_DECODER, sliding_window=None)),
            LoraSpec(4, 8.0, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")),
            CausalLM(),
        ),
    }
    make, spec, task = makers[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make().eval()
    return model, spec, task


ARCHITECTURES = ("bert", "roberta", "gpt2", "gpt2-classifier", "llama", "qwen2", "mistral")


def clients(sizes: tuple[int, ...], *, seed: int = 0, longest: int = 21, weights: bool = False) -> list[Records]:
    """Ragged clients of random tokens and labels."""
    rng = np.random.default_rng(seed)
    made = []
    for size in sizes:
        rows = [rng.integers(3, WORDS, rng.integers(2, longest)) for _ in range(size)]
        given = [rng.uniform(0.1, 2.0, len(row)) for row in rows] if weights else None
        made.append(Records.from_lists(rows, rng.integers(0, CLASSES, size), given))
    return made


def pairs(
    count: int, *, seed: int = 0, longest: int = 14, made: list[tuple[list[int], list[int]]] | None = None
) -> Records:
    """Pairs of texts, of random tokens or of those that are `made`; the first of each is the prompt, and given."""
    rng = np.random.default_rng(seed)
    if made is None:
        made = []
        for _ in range(count):
            prompt = rng.integers(3, WORDS, rng.integers(1, longest // 2)).tolist()
            answers = (rng.integers(3, WORDS, rng.integers(1, longest // 2)).tolist() for _ in range(2))
            first, second = ([*prompt, *answer] for answer in answers)
            made.append((first, second))
    weights = [[float(place > 0) for text in pair for place in range(len(text))] for pair in made]
    records = Records.from_lists([[*first, *second] for first, second in made], None, weights)
    return replace(records, splits=np.array([len(first) for first, _ in made], dtype=np.int64))


def start(model: nn.Module, spec: LoraSpec) -> Tensor:
    """A full vector with B and heads away from zero, so that every gradient is."""
    vector = initial_adapter(adapter_layout(model, spec), model, seed=5)
    generator = torch.Generator().manual_seed(3)
    return vector + 0.05 * torch.randn(len(vector), generator=generator)


def fresh(model: nn.Module) -> nn.Module:
    """A copy for an engine to take over."""
    return copy.deepcopy(model)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
