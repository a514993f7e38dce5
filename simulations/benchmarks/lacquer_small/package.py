"""Put a trained ``lacquer-small`` into the package: its files, its card, and the hashes it is checked by.

Run: `python -m simulations.benchmarks lacquer_small.package --model FOLDER --data FOLDER`.

The card is written from what the training left behind and from the perplexity that is measured here: nothing is typed.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from client.data.prepared import sha256
from client.models.files import LACQUER_SMALL_FOLDER
from simulations.benchmarks.harness.results import say
from simulations.benchmarks.lacquer_small import train

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
RECORDS = ("recipe.json", "training.jsonl")
CURVE = "loss.svg"
LARGEST = 12_000_000

_MODULE = '''"""The base model ``lacquer-small``; README.md is its card. Written by
``simulations.benchmarks.lacquer_small.package``."""

SHA256 = {{
{hashes}}}
'''


@dataclass(frozen=True)
class Perplexity:
    """``exp`` of the summed loss over the tokens, and over the words and line ends (WikiText's published count)."""

    per_token: float
    per_word: float
    tokens: int
    words: int


@torch.no_grad()
def perplexity(
    model: Any, tokenizer: PreTrainedTokenizerBase, lines: Sequence[str], *, context: int, batch: int = 8
) -> Perplexity:
    """Of all `lines` as one stream, in windows of `context` tokens that overlap by half.

    Every window begins with ``<s>``; of each but the first only the second half is scored, so a token sees between
    ``context / 2`` and `context` tokens, and is scored once.
    """
    stream: list[int] = []
    for line in lines:
        stream += tokenizer(line, add_special_tokens=False)["input_ids"]
    room, step = context - 1, context // 2
    windows, scored = [], []
    for start in range(0, max(1, len(stream) - room + step), step):
        part = stream[start : start + room]
        windows.append([tokenizer.bos_token_id, *part])
        scored.append(len(part) if start == 0 else max(0, len(part) - (room - step)))
    total, count = 0.0, 0
    for low in range(0, len(windows), batch):
        rows = windows[low : low + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits = model(input_ids=ids).logits[:, :-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
        for row, loss, new in zip(rows, losses, scored[low : low + batch], strict=True):
            total += float(loss[len(row) - 1 - new : len(row) - 1].double().sum())
            count += new
    assert count == len(stream)
    words = sum(len(line.split()) + 1 for line in lines)
    return Perplexity(math.exp(total / count), math.exp(total / words), count, words)


def draw(log: Sequence[dict[str, float]], path: Path) -> None:
    """Training and validation loss over the tokens seen, as a small SVG."""
    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([line["tokens"] / 1e6 for line in log], [line["loss"] for line in log], linewidth=1, label="training")
    held = [line for line in log if "validation" in line]
    if held:
        points = [line["tokens"] / 1e6 for line in held], [line["validation"] for line in held]
        axes.plot(*points, marker=".", linewidth=1, label="WikiText-2 validation")
    axes.set(xlabel="million tokens seen", ylabel="nats per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def text(recipe: dict[str, Any], log: Sequence[dict[str, float]], quality: Perplexity, parameters: int) -> str:
    """README.md of the model's folder."""
    last = log[-1]
    seen = last["tokens"] / (recipe["tokens_articles"] + recipe["tokens_novels"])
    return f"""---
license: cc-by-sa-3.0
language: en
---

# lacquer-small

A language model for Lacquer's tests and experiments, far too small for anything else: Llama with {parameters:,}
parameters in bfloat16, {recipe["vocabulary"]:,} tokens, context {recipe["context"]}.

- **Perplexity**, WikiText-2 validation (tokenised, rare words as `<unk>`; windows of {recipe["context"]} tokens that
  overlap by half): **{quality.per_token:.1f} per token, {quality.per_word:.1f} per word**.
- **Data**: ELTeC-eng, 37 English novels, {recipe["tokens_novels"]:,} tokens (texts in the public domain, mark-up CC BY
  4.0; doi:10.5281/zenodo.4662490); WikiText-2, training split, {recipe["tokens_articles"]:,} tokens (CC BY-SA 3.0;
  Merity et al. 2016). The third of its articles that `client.data.catalog.corpora.held_back` names is left out, so that
  experiments can call it private. No validation or test text was used.
- **Training**: {last["tokens"]:,} tokens ({seen:.2f} times the corpus), {last["seconds"] / 60:.0f} minutes on one CPU
  thread; settings in `recipe.json`, losses in `training.jsonl`.

![Loss]({CURVE})

Made by `lacquer_small.train` and `lacquer_small.package` of `python -m simulations.benchmarks`.
"""


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
    recipe, log = (
        json.loads((model / "recipe.json").read_text()),
        [json.loads(line) for line in (model / "training.jsonl").read_text().splitlines()],
    )
    quality = perplexity(network, tokenizer, train.lines(data, train.EVALUATION), context=recipe["context"])
    out.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, *RECORDS):
        shutil.copyfile(model / name, out / name)
    draw(log, out / CURVE)
    parameters = sum(values.numel() for values in network.parameters())
    (out / "README.md").write_text(text(recipe, log, quality, parameters))
    hashes = {name: sha256(out / name) for name in FILES}
    (out / "__init__.py").write_text(_MODULE.format(hashes="".join(f'    "{n}": "{h}",\n' for n, h in hashes.items())))
    say(f"{parameters:,} parameters, {size:,} bytes, {quality}")


if __name__ == "__main__":
    typer.run(main)
