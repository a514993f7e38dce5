"""Adapters as PEFT files: what is trained here loads with `PeftModel.from_pretrained`, and PEFT's files load here."""

from pathlib import Path

import torch
from peft import LoraConfig, TaskType
from safetensors.torch import load_file, save_file
from torch import Tensor

from client.layout import AdapterLayout
from client.lora import LoraSpec

WEIGHTS = "adapter_model.safetensors"


def peft_config(spec: LoraSpec, *, base: str = "", task_type: TaskType | None = None) -> LoraConfig:
    """PEFT's configuration of a spec."""
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]  # PEFT only divides it by r
        lora_dropout=spec.dropout,
        target_modules=list(spec.targets),
        layers_to_transform=None if spec.layers is None else list(spec.layers),
        modules_to_save=list(spec.heads) or None,
        use_dora=spec.dora,
        bias=spec.bias,  # type: ignore[arg-type]  # checked by LoraSpec
        base_model_name_or_path=base or None,
        task_type=task_type,
    )


def save_peft(folder: str | Path, vector: Tensor, layout: AdapterLayout, spec: LoraSpec, *, base: str = "") -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` into `folder` (made if missing).

    Args:
        vector: full vector of `layout`.
        base: name or folder of the base model, recorded in the configuration.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: values.detach().float().cpu().contiguous() for name, values in layout.tensors(vector).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = peft_config(spec, base=base)
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load_peft(folder: str | Path, layout: AdapterLayout) -> Tensor:
    """The full vector in PEFT's `folder`. ValueError if its tensors are not those of `layout`."""
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} holds no {WEIGHTS}; give the folder of a saved adapter")
    tensors = load_file(path)
    extra = set(tensors) - {entry.name for entry in layout.entries}
    if extra:
        raise ValueError(f"adapter has tensors this layout does not know: {sorted(extra)[:4]}")
    return layout.vector(tensors).to(torch.float32)
