"""The few lines that load a run's adapter, with the names and sizes of that run filled in."""

import json
from pathlib import Path

from simulations.run_folder import ADAPTER_FOLDER, Run


def loading_code(run: Run) -> str | None:
    """Python that loads the adapter onto its base model; None if the run has left no adapter."""
    folder = run.path / ADAPTER_FOLDER
    if run.config is None or not (folder / "adapter_config.json").is_file():
        return None
    labels = classes(folder)
    arguments = f'"{run.config.model.name}", "{run.config.model.task}"' + (f", num_labels={labels}" if labels else "")
    return (
        "from peft import PeftModel\n"
        "from client.models import load_base\n"
        "\n"
        f"base, tokenizer = load_base({arguments})\n"
        f'model = PeftModel.from_pretrained(base, "{run.shown_path / ADAPTER_FOLDER}")'
    )


def classes(adapter: Path) -> int | None:
    """Classes of the adapter's head: the rows of its weight, read from the header of the safetensors file."""
    file = adapter / "adapter_model.safetensors"
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name.endswith("classifier.weight")]
    return int(shapes[0][0]) if shapes else None
