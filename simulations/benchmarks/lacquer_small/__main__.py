"""Train the tokenizer and the model, and leave both in a folder as transformers saves them."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from client.data.catalog.corpora import articles
from simulations.benchmarks.lacquer_small import train, vocabulary


def main(
    data: Annotated[Path, typer.Option(help="Folder that holds eltec_eng/ and wikitext2/.")],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    minutes: Annotated[float, typer.Option(help="Wall time of the training loop.")] = 100.0,
    optimizer: Annotated[str, typer.Option(help="muon or adamw")] = "muon",
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    steps: Annotated[int, typer.Option(help="Most steps; 0 leaves the end to the clock.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
) -> None:
    """Train on the CPU; the weights so far are saved every ten minutes."""
    torch.set_num_threads(threads)
    recipe = train.Recipe(minutes=minutes, steps=steps, optimizer=optimizer, matrix_rate=rate, other_rate=rate)
    out.mkdir(parents=True, exist_ok=True)
    texts, passages = train.encyclopedia(data), train.novels(data)
    tokenizer = vocabulary.train([*texts, *passages], recipe.vocabulary, recipe.context)
    tokenizer.save_pretrained(out)
    encyclopedia, novels = (train.Stream.of(part, tokenizer) for part in (texts, passages))
    validation = train.Stream.of([article.text for article in articles(train.lines(data, train.EVALUATION))], tokenizer)
    rows = min(32, len(validation.tokens) // recipe.context)
    held = torch.from_numpy(validation.tokens[: rows * recipe.context].astype("int64")).view(rows, recipe.context)
    facts = {**asdict(recipe), "tokens_articles": len(encyclopedia.tokens), "tokens_novels": len(novels.tokens)}
    (out / "recipe.json").write_text(json.dumps(facts, indent=1))

    def save(model: Any) -> None:
        copy = type(model)(model.config)
        copy.load_state_dict(model.state_dict())
        copy.to(torch.bfloat16).save_pretrained(out / "new")
        for path in (out / "new").iterdir():
            os.replace(path, out / path.name)

    model = train.new_model(recipe, tokenizer)
    train.train(model, encyclopedia, novels, recipe, out / "training.jsonl", save, held)
    save(model)


if __name__ == "__main__":
    typer.run(main)
