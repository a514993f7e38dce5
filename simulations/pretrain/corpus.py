"""The public text ``lacquer-small`` is trained on, as two streams of tokens.

English novels (ELTeC-eng, 37 novels, public domain) and two thirds of the articles of WikiText-2's training split
(CC BY-SA 3.0; which third is left out and why: :mod:`client.documents`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

from client import documents

NOVELS = "eltec_eng/train.parquet"
ARTICLES = "wikitext2/train.parquet"
EVALUATION = "wikitext2/validation.parquet"


def lines(folder: Path, name: str) -> list[str]:
    """The column ``text`` of a parquet file of `folder`."""
    rows: list[str] = pyarrow.parquet.read_table(folder / name, columns=["text"])["text"].to_pylist()
    return rows


def novels(folder: Path) -> list[str]:
    """Passages of whole paragraphs, about 1,500 characters each."""
    return [text for text in lines(folder, NOVELS) if text.strip()]


def encyclopedia(folder: Path) -> list[str]:
    """Whole articles of WikiText-2 that are not held back."""
    found = documents.articles(lines(folder, ARTICLES))
    return [article.text for article in documents.for_pretraining(found)]


@dataclass(frozen=True)
class Stream:
    """Documents as one array, ``<s>`` in front of each and ``</s>`` behind; `starts` are the beginnings of lines."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]

    @staticmethod
    def of(texts: Sequence[str], tokenizer: Any) -> "Stream":
        """Tokenise; a line start is the first token after a line break, or the first of a document."""
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        pieces: list[int] = []
        starts: list[int] = []
        for text in texts:
            pieces.append(begin)
            for line in text.splitlines(keepends=True):
                starts.append(len(pieces))
                pieces += tokenizer.backend_tokenizer.encode(line, add_special_tokens=False).ids
            pieces.append(end)
        return Stream(np.array(pieces, np.int32), np.array(starts, np.int64))

    def window(self, length: int, draws: np.random.Generator) -> NDArray[np.int64]:
        """``<s>`` and the `length - 1` tokens from a random place: the start of a line in every second window.

        Records of an experiment start with a line, the windows of an evaluation anywhere; the model meets both.
        """
        at = int(draws.integers(1, len(self.tokens) - length))
        if draws.random() < 0.5:
            at = int(self.starts[max(0, int(np.searchsorted(self.starts, at, side="right")) - 1)])
        at = min(at, len(self.tokens) - length)
        return np.concatenate([self.tokens[:1], self.tokens[at : at + length - 1]]).astype(np.int64)
