"""A plain transformers model with an adapter added into its weights: for generation and for attacks.

`W + (alpha / rank) B A` in the place of `W` computes what the adapter beside `W` computes, up to rounding, and then
everything transformers can do with a model (generation with its cache, scoring) works on it.
"""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from client.bitnet import is_ternary
from client.layout import PEFT_PREFIX
from client.lora import LoraSpec, adapter_layout


def merged(model: nn.Module, spec: LoraSpec, vector: Float[Tensor, " size"]) -> Any:
    """A copy of `model` with the adapter `vector` (full, of the layout of `spec`) in its weights; `model` is unchanged.

    Args:
        model: as :func:`client.models.load_base` gives it, not one that an engine has taken over.

    Raises:
        ValueError: an adapter beside a ternary weight, which cannot be added to it, or a vector of another size.
    """
    layout, result = adapter_layout(model, spec), copy.deepcopy(model)
    tensors = layout.tensors(vector)
    with torch.no_grad():
        for entry in layout.entries:
            if entry.factor == "B":
                module: Any = result.get_submodule(entry.pair)
                if is_ternary(module):
                    raise ValueError(f"{entry.pair} has ternary weights, to which no adapter can be added")
                first = tensors[entry.name.replace(".lora_B.", ".lora_A.")]
                change = spec.scale * tensors[entry.name].double() @ first.double()
                weight = module.weight.double() + (change if isinstance(module, nn.Linear) else change.t())
                # a new parameter: an embedding that is tied to this weight stays as it is, as beside an adapter
                module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
            elif entry.factor == "head":
                result.get_parameter(entry.name.removeprefix(PEFT_PREFIX)).copy_(tensors[entry.name])
    return result.eval()
