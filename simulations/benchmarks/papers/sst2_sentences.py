"""SST-2 with a second test set: 3,000 whole sentences, cut out of the training file with all their phrases.

The official validation file has 872 sentences, a standard error of 1.2 points at 85 %; this one has 0.65. The training
file holds phrases of sentences, and sentences: a whole sentence is a text of eight words or more that is no part of a
longer text of the file. Of those, 3,000 are drawn by a fixed seed; every text of the file that is a part of one of them
leaves it, about half of them. What remains, and both test sets, are written with a column ``prompted`` beside
``sentence``: the text as a question to a language model, whose last token then says what it takes the text for.

Run: `python -m simulations.benchmarks papers.sst2_sentences --data DATA --output FOLDER`, where DATA holds glue_sst2/.
It writes FOLDER/glue_sst2_sentences/ with train.parquet, sentences.parquet and official.parquet.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from simulations.benchmarks.harness.results import say

SENTENCES = 3000
LEAST_WORDS = 8
SEED = 20
PROMPT = "Review: {}\nSentiment:"


def parts(text: str) -> Iterator[str]:
    """All runs of words in a text, itself included; words are what blanks separate."""
    words = text.split()
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            yield " ".join(words[start:end])


def whole_sentences(texts: list[str]) -> list[int]:
    """Rows of the texts of eight words or more that are part of no longer one; of equal texts the first."""
    plain = [" ".join(text.split()) for text in texts]
    inner: set[str] = set()
    for text in set(plain):
        inner.update(part for part in parts(text) if len(part) < len(text) and part.count(" ") + 1 >= LEAST_WORDS)
    seen: set[str] = set()
    found = []
    for row, text in enumerate(plain):
        if text.count(" ") + 1 >= LEAST_WORDS and text not in inner and text not in seen:
            seen.add(text)
            found.append(row)
    return found


def split(texts: list[str], count: int = SENTENCES, seed: int = SEED) -> tuple[list[int], list[int]]:
    """Rows of the test sentences, and rows that stay for training: no part of a test sentence is among them.

    Raises:
        ValueError: there are fewer whole sentences.
    """
    whole = whole_sentences(texts)
    if len(whole) < count:
        raise ValueError(f"the file has {len(whole)} whole sentences, {count} were asked for")
    drawn = sorted(int(row) for row in np.random.default_rng(seed).choice(whole, count, replace=False))
    gone = {part for row in drawn for part in parts(texts[row])}
    return drawn, [row for row, text in enumerate(texts) if " ".join(text.split()) not in gone]


def write(table: pa.Table, file: Path) -> None:
    """A table with its texts as questions too."""
    prompted = [PROMPT.format(text.strip()) for text in table["sentence"].to_pylist()]
    pq.write_table(table.select(["sentence", "label"]).append_column("prompted", pa.array(prompted)), file)


def main(
    data: Annotated[Path, typer.Option(help="Folder that holds glue_sst2/.")],
    output: Annotated[Path, typer.Option(help="Folder in which glue_sst2_sentences/ is made.")],
) -> None:
    """Write the three files."""
    training = pq.read_table(data / "glue_sst2" / "train.parquet")
    test, left = split(training["sentence"].to_pylist())
    folder = output / "glue_sst2_sentences"
    folder.mkdir(parents=True, exist_ok=True)
    write(training.take(left), folder / "train.parquet")
    write(training.take(test), folder / "sentences.parquet")
    write(pq.read_table(data / "glue_sst2" / "validation.parquet"), folder / "official.parquet")
    say(f"{folder}: {len(left):,} of {len(training):,} texts left for training, {len(test):,} test sentences")


if __name__ == "__main__":
    typer.run(main)
