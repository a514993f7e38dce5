"""Whole models in folders that others load: transformers' for a language model, sentence-transformers' for classes.

A classifier of ours is an encoder, a pooling, a normalisation without parameters and a linear head. Those are modules
of sentence-transformers, which reads them from a list in ``modules.json``: its ``encode`` gives the logits, and no code
of ours or of a repository is run. The files are written by hand, as releases from 2.2 to 6 read them.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from client.models.base import SequenceClassifier, load_base
from client.models.files import RANDOM_PREFIX, locate, quiet
from client.models.lora import CannotMerge, adapter_layout, load_peft, merge_adapter, read_spec

LICENSES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")
"""Files of a base model's folder that its licence asks to be handed on."""


def merged_model(name: str, task: str, num_labels: int | None, adapter: Path) -> Any:
    """The base model with the adapter of a folder in its weights.

    A language model has the type that its weights are stored in; a classifier float32, in which it was evaluated.

    Raises:
        CannotMerge: ternary weights, DoRA or trained biases.
    """
    dtype = stored_dtype(name) if num_labels is None else torch.float32
    model, _ = load_base(name, task, num_labels, dtype=dtype)
    spec = read_spec(adapter)
    if spec.dora or spec.bias != "none":
        raise CannotMerge("adapters with DoRA or trained biases are merged by PEFT (merge_and_unload), not here")
    found = merge_adapter(model, spec, load_peft(adapter, adapter_layout(model, spec)))
    if num_labels is None:
        _untie(found)
    return found


def stored_dtype(name: str) -> torch.dtype:
    """The type that the weights of a base model are stored in, as its configuration says."""
    if name.startswith(RANDOM_PREFIX):
        return torch.float32
    location, options = locate(name)
    dtype = getattr(AutoConfig.from_pretrained(location, **options), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def save_tokenizer(tokenizer: Any, task: str, folder: Path) -> None:
    """A tokenizer that encodes as the records were: only a chat template writes special tokens, a text never does."""
    saved = copy.deepcopy(tokenizer)  # those of random models are shared
    rendered = task == "instruction" or (task == "preference" and saved.chat_template)
    saved.split_special_tokens = saved.init_kwargs["split_special_tokens"] = not rendered
    saved.save_pretrained(folder)


def write_language_model(model: Any, tokenizer: PreTrainedTokenizerBase, task: str, folder: Path) -> None:
    """Weights in safetensors, configuration, how to generate, and the tokenizer with its chat template."""
    with quiet():
        model.save_pretrained(folder)
    save_tokenizer(tokenizer, task, folder)


def write_classifier(
    model: SequenceClassifier,
    tokenizer: PreTrainedTokenizerBase,
    label_names: tuple[str, ...],
    max_length: int,
    folder: Path,
) -> None:
    """A folder of sentence-transformers whose ``encode`` gives the logits, in the order of `label_names`.

    Args:
        max_length: tokens that a text is cut to, as the records were.
    """
    encoder, hidden = model.encoder, int(model.config.hidden_size)
    encoder.config.id2label = dict(enumerate(label_names))
    encoder.config.label2id = {name: number for number, name in enumerate(label_names)}
    with quiet():
        encoder.save_pretrained(folder, state_dict={**_unused(encoder), **encoder.state_dict()})
    tokenizer.padding_side = "right"
    tokenizer.model_max_length = max_length
    save_tokenizer(tokenizer, "classification", folder)
    _json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    modes = {"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
    others = {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}
    pooling = {mode: name == model.pooling for name, mode in modes.items()}
    _json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, **others, **pooling})
    _json(folder / "2_LayerNorm" / "config.json", {"dimension": hidden})
    same = {"norm.weight": torch.ones(hidden), "norm.bias": torch.zeros(hidden)}  # a norm without parameters
    save_file(same, folder / "2_LayerNorm" / "model.safetensors", metadata={"format": "pt"})
    head = {f"linear.{name}": _plain(value) for name, value in model.classifier.state_dict().items()}
    identity = "torch.nn.modules.linear.Identity"
    shape = {"in_features": hidden, "out_features": len(label_names), "bias": True}
    _json(folder / "3_Dense" / "config.json", {**shape, "activation_function": identity})
    save_file(head, folder / "3_Dense" / "model.safetensors", metadata={"format": "pt"})
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_LayerNorm": "LayerNorm", "3_Dense": "Dense"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2), encoding="utf-8")
    _json(folder / "config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": None})


def copy_licenses(name: str, folder: Path) -> list[str]:
    """Copy the base model's licence files into `folder`, where its own folder has any; their names."""
    source = Path(name if name.startswith(RANDOM_PREFIX) else locate(name)[0])
    found = sorted({path for pattern in LICENSES for path in source.glob(pattern)}) if source.is_dir() else []
    for path in found:
        (folder / path.name).write_bytes(path.read_bytes())
    return [path.name for path in found]


def _untie(model: Any) -> None:
    """Where an adapter on the output embedding has parted it from the input's, both are saved."""
    head, first = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Module) and model.config.tie_word_embeddings and head.weight is not first.weight:
        model.config.tie_word_embeddings = False


def _unused(encoder: Any) -> dict[str, Tensor]:
    """Zeros for weights that others make with such an encoder and nobody here uses (BERT's pooler): none is missing."""
    with torch.device("meta"):
        whole = type(encoder)(encoder.config).state_dict()
    return {name: torch.zeros(value.shape) for name, value in whole.items() if name not in encoder.state_dict()}


def _plain(value: Tensor) -> Tensor:
    return value.detach().float().cpu().contiguous()


def _json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
