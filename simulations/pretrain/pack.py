"""Put a trained model into the package: its files, its card, and the hashes it is checked by."""

import json
import platform
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from client.data import sha256
from client.model_files import LACQUER_SMALL_FOLDER
from simulations.pretrain import card, corpus
from simulations.pretrain.quality import perplexity

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
RECORDS = ("recipe.json", "training.jsonl")
LARGEST = 12_000_000


def main(
    model: Annotated[Path, typer.Option(help="Folder that the training wrote.")],
    data: Annotated[Path, typer.Option(help="Folder that holds wikitext2/.")],
    out: Annotated[Path, typer.Option(help="Folder of the package.")] = LACQUER_SMALL_FOLDER,
) -> None:
    """Measure the stored weights in float32 and write the folder of the model."""
    torch.set_num_threads(1)
    size = sum((model / name).stat().st_size for name in FILES)
    if size > LARGEST:
        raise typer.BadParameter(f"the files hold {size:,} bytes; the package takes at most {LARGEST:,}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    recipe, log = json.loads((model / "recipe.json").read_text()), card.read_log(model / "training.jsonl")
    quality = perplexity(network, tokenizer, corpus.lines(data, corpus.EVALUATION), context=recipe["context"])
    out.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, *RECORDS):
        shutil.copyfile(model / name, out / name)
    card.draw(log, out / card.CURVE)
    parameters = sum(values.numel() for values in network.parameters())
    (out / "README.md").write_text(card.text(recipe, log, quality, parameters, machine()))
    hashes = {name: sha256(out / name) for name in FILES}
    (out / "__init__.py").write_text(_MODULE.format(hashes="".join(f'    "{n}": "{h}",\n' for n, h in hashes.items())))
    typer.echo(f"{parameters:,} parameters, {size:,} bytes, {quality}")


def machine() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


_MODULE = '''"""The base model ``lacquer-small``; README.md is its card. Written by ``simulations.pretrain.pack``."""

SHA256 = {{
{hashes}}}
'''


if __name__ == "__main__":
    typer.run(main)
