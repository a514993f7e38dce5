"""What ``local.balance = "prior"`` gives and costs: a skewed test set, and the table of docs/results/comparisons.md.

With ``prior`` a client's loss is adjusted for the shares of the labels in its own records, so that a client with one
label does not pull the model towards it. The model then learns labels as if all were equally frequent, which costs
accuracy where they are not. The sweep ``balance`` asks how much, with a tenth of urgent notes and with a half.

Run: `python -m simulations.benchmarks papers.balance --output FOLDER`. It writes FOLDER/skewed_notes/ with
train.parquet and test.parquet: synthetic notes, of which urgent ones are left out until they are a tenth.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from client.data.catalog.notes import NOTES_PER_BLOCK, generate
from simulations.benchmarks.harness.markdown import NOT_MEASURED, Columns, grouped, mean_text, table
from simulations.benchmarks.harness.results import say
from simulations.benchmarks.papers.dp_lac import COST, difference_text, marked, methods, provenance

URGENT_OF_TEN = 1
NOTES = {"train": 38_000, "test": 10_000}
SEED = 21
GRIDS = {"skewed": "a tenth of the notes is urgent", "balanced": "half of the notes are urgent"}
NAMES = {"none": "`none`", "prior": "`prior`"}

MEASURES = {"test_accuracy": "accuracy", "test_macro_f1": "macro-F1"}


def skewed(first: int, count: int) -> pa.Table:
    """Of so many notes all routine ones, and urgent ones until they are a tenth."""
    notes = list(generate(count, SEED, start=first))
    routine = sum(note.label == 0 for note in notes)
    left = routine * URGENT_OF_TEN // (10 - URGENT_OF_TEN)
    kept = []
    for note in notes:
        left -= note.label
        if note.label == 0 or left >= 0:
            kept.append(note)
    return pa.table({"text": [note.text for note in kept], "label": [note.label for note in kept]})


def balances(results: Mapping[str, Any]) -> str:
    """A table for each set: accuracy and macro-F1, with and without."""
    parts = []
    for grid, rows in grouped(results["cells"], lambda row: row["grid"]).items():
        groups = grouped(rows, lambda row: row["variant"])
        shown: dict[str, dict[str, Any]] = {name: {"name": name, "cells": cells} for name, cells in groups.items()}
        for measure in MEASURES:
            found = {name: {row["seed"]: row[measure] for row in cells} for name, cells in groups.items()}
            for row in methods(sorted(groups), groups, found, "none"):
                shown[row["name"]][measure] = row
        columns: Columns = {"`local.balance`": lambda row: NAMES[row["name"]]}
        for measure, words in MEASURES.items():
            columns = {**columns, **compared(measure, words)}
        constant = 100 * rows[0]["majority_accuracy"]
        made = table([shown[name] for name in sorted(groups)], {**columns, **COST})
        parts.append(
            f"**{GRIDS[grid]}** (the constant answer has {constant:.1f} % accuracy)\n\n{made}{provenance(rows)}"
        )
    return "\n".join(parts) if parts else NOT_MEASURED


def compared(measure: str, words: str) -> Columns:
    """The columns of one measure."""
    return {
        words: lambda row: mean_text([100 * value for value in row[measure]["found"]], unit=" %"),
        f"{words} against `none`": lambda row: against(row[measure]),
    }


def against(row: Mapping[str, Any]) -> str:
    """A difference to `none` in points; beside one that is not significant, the smallest that would be."""
    if row["is reference"] or row["difference"] is None:
        return ""
    words = marked(difference_text(row["difference"]), row["significant"])
    return words if row["smallest"] is None else f"{words}; {100 * row['smallest']:.1f} would show"


def main(output: Annotated[Path, typer.Option(help="Folder in which skewed_notes/ is made.")]) -> None:
    """Write the two files."""
    folder = output / "skewed_notes"
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for name, count in NOTES.items():
        first += -first % NOTES_PER_BLOCK
        made = skewed(first, count)
        first += count
        pq.write_table(made, folder / f"{name}.parquet")
        say(f"{folder / name}.parquet: {len(made):,} notes, {sum(made['label'].to_pylist()):,} of them urgent")


if __name__ == "__main__":
    typer.run(main)
