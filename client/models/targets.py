"""Which linear layers get an adapter where the settings leave it to the model: its attention's queries and values.

They are what LoRA's paper adapts (Hu et al. 2021, arXiv 2106.09685v2, section 4.2), under the names that models of
transformers give them; where queries, keys and values are one layer, that one.
"""

from torch import nn

from client.models.lora import linear_shape

AUTO = "auto"
"""The value of ``model.targets`` that asks for them."""

KNOWN = (
    ("query", "value"),  # BERT, RoBERTa, ELECTRA, ALBERT
    ("q_proj", "v_proj"),  # Llama, Mistral, Qwen, Gemma, OPT, Phi
    ("q_lin", "v_lin"),  # DistilBERT
    ("query_proj", "value_proj"),  # DeBERTa-v2
    ("q", "v"),  # T5, MPNet
    ("c_attn",),  # GPT-2
    ("query_key_value",),  # GPT-NeoX, BLOOM, Falcon
    ("qkv_proj",),  # Phi-3, CodeGen
    ("Wqkv",),  # ModernBERT, MPT
    ("in_proj",),  # DeBERTa
)


def targets_of(model: nn.Module, asked: str) -> tuple[str, ...]:
    """Names of the layers to adapt: those in `asked`, separated by commas, or for "auto" the model's own.

    Raises:
        ValueError: "auto", and the model has none of the known names.
    """
    if asked.strip() != AUTO:
        return tuple(name.strip() for name in asked.split(",") if name.strip())
    linear = {path.rpartition(".")[2] for path, module in model.named_modules() if linear_shape(module)}
    for names in KNOWN:
        if linear.issuperset(names):
            return names
    raise ValueError(f"auto knows none of this model's linear layers; name some of {', '.join(sorted(linear))}")
