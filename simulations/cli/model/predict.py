"""``lacquer predict``: the classes that a run's classifier gives to texts."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from server.run_folder.names import shell_quoted
from simulations.cli.exits import refusals
from simulations.cli.progress import say_working
from simulations.report.notation import percent_text, plain_table

if TYPE_CHECKING:
    from server.evaluation.finished import FinishedRun


def predict_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT...", help="None: one a line from input.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="The text that each is paired with, if the run was trained on pairs.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="So many of the most probable classes.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object a text.")] = False,
) -> None:
    """Classify texts with a run's adapter."""
    with refusals(ValueError):
        asked = texts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        with say_working("classifying"):
            from server.evaluation.finished import read_finished

            found = predictions(read_finished(run_folder), asked, pair or [])
    for text, classes in zip(asked, found, strict=True):
        best = classes[:top]
        if as_json:
            typer.echo(json.dumps({"text": text, "classes": dict(best)}, ensure_ascii=False))
        elif len(asked) == 1:
            _print(best)
        else:
            typer.echo(f"{best[0][0]}\t{best[0][1]:.3f}\t{text}")


def predictions(run: "FinishedRun", texts: list[str], pairs: list[str]) -> list[list[tuple[str, float]]]:
    """Classify texts: for every one its classes and their probabilities, the most probable first.

    Raises:
        ValueError: the run has trained a language model, or pairs are missing or given where there are none.
    """
    if not run.label_names:
        raise ValueError(
            f"{run.folder} has trained a language model; "
            f'try: lacquer generate {shell_quoted(run.folder)} --prompt "..."'
        )
    if not texts:
        raise ValueError("there is no text to classify; give some, or one a line on standard input")
    paired = bool(run.config.data.text_pair_column)
    if paired and len(pairs) != len(texts):
        raise ValueError(f"this run was trained on pairs: give --pair once for each text, got {len(pairs)}")
    if pairs and not paired:
        raise ValueError("this run was trained on single texts; leave out --pair")
    import torch
    from peft import PeftModel

    from client.models.base import load_base

    base, tokenizer = load_base(run.config.model.name, run.task, len(run.label_names), dtype=run.dtype)
    model = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    found = []
    for number, text in enumerate(texts):
        second = (pairs[number],) if paired else ()
        options = {"truncation": True, "max_length": run.config.model.max_length, "split_special_tokens": True}
        tokens = tokenizer(text, *second, return_tensors="pt", **options)
        with torch.no_grad():
            shares = model(**tokens)[0].double().softmax(dim=-1).flatten().tolist()
        found.append(sorted(zip(run.label_names, shares, strict=True), key=lambda each: -each[1]))
    return found


def _print(classes: list[tuple[str, float]]) -> None:
    table = plain_table()
    table.add_column("Class")
    table.add_column("Probability", justify="right")
    for name, share in classes:
        table.add_row(Text(name), percent_text(share))
    Console().print(table)
