"""The choice of linear layers that get an adapter where the settings leave it to the model.

``"auto"``: its attention's queries and values. They are what LoRA's paper adapts (Hu et al. 2021, arXiv 2106.09685v2,
section 4.2), under the names that models of transformers give them; where queries, keys and values are one layer, that
one; where none of those names is there, as ``"all-linear"``: every linear layer of its blocks, as PEFT means it
(Dettmers et al. 2023, arXiv 2305.14314v1, section 4), neither embeddings nor the output's layer nor a classifier.
"""

from torch import nn

from client.models.lora import layer_index, linear_shape, matches

AUTO, ALL_LINEAR = "auto", "all-linear"
"""The values of ``model.targets`` that ask for them."""

KNOWN = (
    ("query", "value"),  # BERT, RoBERTa, ELECTRA, ALBERT
    ("q_proj", "v_proj"),  # Llama, Mistral, Qwen, Gemma, OPT, Phi
    ("q_lin", "v_lin"),  # DistilBERT
    ("q_b_proj", "kv_b_proj"),  # DeepSeek-V2 and V3
    ("value_proj",),  # DeBERTa-v2 and v3, whose queries and keys are also made of positions, which all records share
    ("q", "v"),  # T5, MPNet
    ("c_attn",),  # GPT-2
    ("query_key_value",),  # GPT-NeoX, BLOOM, Falcon
    ("qkv_proj",),  # Phi-3, CodeGen
    ("Wqkv",),  # ModernBERT, MPT
    ("in_proj",),  # DeBERTa
)


def targets_of(model: nn.Module, asked: str) -> tuple[str, ...]:
    """Names of the layers to adapt: those in `asked`, separated by commas, or for "auto" and "all-linear" the model's.

    Raises:
        ValueError: every linear layer is asked for, and no block of the model has one.
    """
    if asked.strip() == ALL_LINEAR:
        return _of_blocks(model)
    if asked.strip() != AUTO:
        return tuple(name.strip() for name in asked.split(",") if name.strip())
    linear = {path.rpartition(".")[2] for path, module in model.named_modules() if linear_shape(module)}
    for names in KNOWN:
        if linear.issuperset(names):
            return names
    return _of_blocks(model)


def _of_blocks(model: nn.Module) -> tuple[str, ...]:
    """The shortest endings of paths that name every linear layer of the blocks and no other module, in their order."""
    inside = {path for path, module in model.named_modules() if linear_shape(module) and layer_index(path) is not None}
    others = [path for path, _ in model.named_modules() if path not in inside]
    if not inside:
        raise ValueError("all-linear finds no block with linear layers in this model; name the layers")
    names: list[str] = []
    for path, _ in model.named_modules():
        if path not in inside or matches(path, tuple(names)):
            continue
        parts = path.split(".")
        endings = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        names.append(next(name for name in endings if not any(matches(other, (name,)) for other in others)))
    return tuple(names)
