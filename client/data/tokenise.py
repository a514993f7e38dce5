"""From texts to tokens: of classifiers, of language models, and of prompts with their summaries."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from client.data.records import Records
from client.data.sensitive import token_weights
from client.data.sources import Texts
from client.data.spec import DataSettings

BEFORE_SUMMARY = "\nSummary:"
"""What stands between a text and its summary, in training and when a summary is asked for."""

_TEXTS_AT_ONCE = 8192


def tokenise(
    texts: Texts,
    labels: NDArray[np.int64] | None,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    max_length: int,
    weights: DataSettings | None = None,
) -> tuple[Records, int]:
    """Token ids with the tokenizer's special tokens, at most `max_length`; how many records were cut.

    Language models get an end-of-text token behind every record if the tokenizer does not put one there. A record of
    summarisation is text, :data:`BEFORE_SUMMARY`, summary; its loss is on the summary and the end-of-text token.

    With `weights`, every token gets the weight of that policy (:mod:`client.data.sensitive`); an end-of-text token is
    none of the text's and weighs like its other tokens.

    Raises:
        ValueError: a text has no tokens, or a summary leaves no room for its text.
    """
    if task == "summarisation":
        return _summaries(texts, tokenizer, max_length)
    end = tokenizer.eos_token_id if task == "causal-lm" else None
    rows: list[list[int]] = []
    weighed: list[list[float]] = []
    truncated = 0
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        chunk = slice(start, start + _TEXTS_AT_ONCE)
        encoded = tokenizer(
            texts.texts[chunk],
            None if texts.pairs is None else texts.pairs[chunk],
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=weights is not None,
        )
        truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings or [])
        rows += encoded["input_ids"]
        if weights is not None:
            weighed += [row.tolist() for row in token_weights(texts.texts[chunk], encoded["offset_mapping"], weights)]
    if end is not None:
        open_ended = [not row or row[-1] != end for row in rows]
        rows = [[*row[: max_length - 1], end] if added else row for row, added in zip(rows, open_ended, strict=True)]
        if weights is not None:
            weighed = [
                [*row[: max_length - 1], weights.other_weight] if added else row
                for row, added in zip(weighed, open_ended, strict=True)
            ]
    if any(not row for row in rows):
        raise ValueError(f"{sum(not row for row in rows)} texts have no tokens under the tokenizer of model.name")
    return Records.from_lists(rows, labels, None if weights is None else weighed), truncated


def prompts(texts: list[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> tuple[list[list[int]], int]:
    """Tokens of each text and :data:`BEFORE_SUMMARY`, at most `longest`, and how many texts were cut at their end."""
    tail = _plain(tokenizer, [BEFORE_SUMMARY])[0]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = longest - len(start) - len(tail)
    bodies = _plain(tokenizer, texts)
    return [[*start, *body[: max(0, room)], *tail] for body in bodies], sum(len(body) > room for body in bodies)


def _summaries(texts: Texts, tokenizer: PreTrainedTokenizerBase, longest: int) -> tuple[Records, int]:
    assert texts.pairs is not None
    end = tokenizer.eos_token_id
    answers = [[*answer, end] for answer in _plain(tokenizer, [f" {pair.strip()}" for pair in texts.pairs])]
    rows, weights, truncated = [], [], 0
    for text, answer in zip(texts.texts, answers, strict=True):
        kept = answer[: longest // 2]  # a summary longer than half a record is cut too
        (prompt,), cut = prompts([text], tokenizer, longest - len(kept))
        truncated += bool(cut or len(kept) < len(answer))
        rows.append([*prompt, *kept])
        weights.append([0.0] * len(prompt) + [1.0] * len(kept))
    return Records.from_lists(rows, None, weights), truncated


def _plain(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return encoded
