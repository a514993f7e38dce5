"""An adapter in a folder as PEFT saves it: its form, read without PEFT, and the forms that no run goes on from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config.load import ConfigError
from server.config.tables import Model

FORM_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_rslora": "rsLoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "a bias in the adapters",
    "rank_pattern": "ranks that differ between layers",
    "alpha_pattern": "scales that differ between layers",
    "layer_replication": "replicated layers",
    "target_parameters": "adapted parameters that are no layers",
    "trainable_token_indices": "trained token embeddings",
    "alora_invocation_tokens": "aLoRA",
}
"""Entries of PEFT's configuration that make an adapter another method than plain LoRA."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings of ways to initialise LoRA that change the weights of the base model, too."""


@dataclass(frozen=True)
class SavedForm:
    """The form of a saved adapter.

    Attributes:
        targets: names of the adapted layers, sorted; None where they are a pattern.
        layers: indices of the adapted layers; None for all.
        base: name or folder of its base model; "" where that was not saved.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None
    layers: tuple[int, ...] | None
    base: str


def adapter_folder(place: Path) -> Path:
    """The folder with PEFT's files: of a run's folder the one inside, else the place itself."""
    inside = place / "adapter"
    return inside if (inside / FORM_FILE).is_file() else place


def read_form(place: str) -> SavedForm:
    """Read the form of the adapter that ``model.adapter`` names.

    Raises:
        ConfigError: there is none, or it is of a form that no run goes on from.
    """
    said, folder = f"model.adapter = {place!r}", adapter_folder(Path(place))
    path = folder / FORM_FILE
    if not path.is_file():
        whole = (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
        remedy = "a whole model is named by model.name" if whole else "give a run's folder, or one that PEFT has saved"
        raise ConfigError(f"{said}: it is no folder of a run that has ended, nor holds {FORM_FILE}; {remedy}")
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"{said}: {folder} holds no {WEIGHTS_FILE}; save the adapter as safetensors")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        start = str(found.get("init_lora_weights")).lower()
        wrong = [words for key, words in UNSUPPORTED.items() if found.get(key)]
        wrong += [str(found["peft_type"])] if found["peft_type"] != "LORA" else []
        wrong += [f"bias = {found['bias']!r}"] if found.get("bias", "none") != "none" else []
        wrong += [f"{start}, which changes the base model"] if start.startswith(CHANGES_BASE) else []
        if wrong:
            raise ConfigError(f"{said} is {', '.join(wrong)}; a run goes on from plain LoRA of one rank and one alpha")
        targets, layers = found["target_modules"], found.get("layers_to_transform")
        if isinstance(targets, str):
            targets = [targets] if targets == "all-linear" else None
        return SavedForm(
            rank=int(found["r"]),
            alpha=float(found["lora_alpha"]),
            targets=None if targets is None else tuple(sorted(targets)),
            layers=None if layers is None else tuple([layers] if isinstance(layers, int) else layers),
            base=found.get("base_model_name_or_path") or "",
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{said}: {path} is no configuration of PEFT's LoRA ({error!r}); restore it") from error


def adopt_form(model: Model, chosen: set[str]) -> Model:
    """Copy ``[model]`` with the form of its adapter where the settings say nothing else.

    Args:
        chosen: fields that the settings name; they stay, and the run refuses those that do not fit.

    Raises:
        ConfigError: see :func:`read_form`.
    """
    form = read_form(model.adapter)
    known: dict[str, Any] = {"rank": form.rank, "alpha": form.alpha, "layers": len(form.layers or ())}
    if form.targets:
        known["targets"] = ",".join(form.targets)
    return model.replace(**{name: value for name, value in known.items() if name not in chosen})
