"""The card of ``lacquer-small``: written from what the training left behind, nothing typed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from simulations.pretrain.quality import Perplexity

CURVE = "loss.svg"


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


def text(
    recipe: dict[str, Any], log: Sequence[dict[str, float]], quality: Perplexity, parameters: int, machine: str
) -> str:
    """README.md of the model's folder."""
    last = log[-1]
    seen = last["tokens"] / (recipe["tokens_articles"] + recipe["tokens_novels"])
    return f"""---
license: cc-by-sa-3.0
language: en
---

# lacquer-small

A language model for the tests and experiments of Lacquer, which have no model hub at hand: Llama with {parameters:,}
parameters ({recipe["layers"]} layers of width {recipe["width"]}, {recipe["heads"]} attention heads on
{recipe["groups"]} key-value heads, tied embeddings, {recipe["vocabulary"]:,} tokens, context {recipe["context"]}),
stored in bfloat16. It is far too small to be of use for anything else.

- **Perplexity**, WikiText-2 validation ({quality.tokens:,} tokens, {quality.words:,} words and line ends), windows of
  {recipe["context"]} tokens that overlap by half: **{quality.per_token:.1f} per token, {quality.per_word:.1f} per
  word**. The text is the tokenised one, in which rare words are `<unk>`.
- **Data**: ELTeC-eng, 37 English novels, {recipe["tokens_novels"]:,} tokens (texts in the public domain, mark-up CC BY
  4.0; doi:10.5281/zenodo.4662490); WikiText-2, training split without the third of the articles that
  `client.documents.held_back` names, {recipe["tokens_articles"]:,} tokens (CC BY-SA 3.0; Merity et al. 2016). The third
  is left out so that experiments can call it private. A {recipe["articles"]:.0%} share of the sequences is WikiText-2.
  No validation or test text was used.
- **Training**: {last["step"]:,} steps of {recipe["windows"]} sequences, {last["tokens"]:,} tokens in all ({seen:.2f}
  times the corpus), {last["seconds"] / 60:.0f} minutes of wall time and {last["cpu_seconds"] / 60:.1f} minutes of one
  CPU thread on {machine}, shared with other work. Hidden matrices by Muon, the rest by AdamW; peak learning rate
  {recipe["matrix_rate"]:g}, cosine to zero by the clock; matrix products in bfloat16; seed {recipe["seed"]}.
- **Tokenizer**: byte-level BPE trained on the same text; every digit is one token.

![Loss]({CURVE})

Made by `python -m simulations.pretrain`, packed by `python -m simulations.pretrain.pack`. `training.jsonl` and
`recipe.json` hold the numbers above. The files are checked by SHA-256 when the model is loaded.
"""


def read_log(path: Path) -> list[dict[str, float]]:
    """The lines of `training.jsonl`."""
    return [json.loads(line) for line in path.read_text().splitlines()]
