"""Tokenisation of texts: of classifiers, of language models, of conversations, and of prompts with their summaries."""

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from client.data import chat
from client.data.columns import preferences
from client.data.records import Records
from client.data.sensitive import token_weights
from client.data.sources import Texts
from client.data.spec import DataSettings

BEFORE_SUMMARY = "\nSummary:"
"""What stands between a text and its summary, in training and when a summary is asked for."""

_TEXTS_AT_ONCE = 8192


@dataclass(frozen=True)
class Tokenised:
    """Records of texts, and what became of them.

    Attributes:
        records: in the order of the texts.
        truncated: how many were cut.
        answers_cut: how many of these lost the end of an answer or of a summary.
        kept: rows of the texts that are records; None for all.
        left_out: how many others were left out, by reason.
        noted: what else was seen and how often.
    """

    records: Records
    truncated: int
    answers_cut: int = 0
    kept: NDArray[np.int64] | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def of(self, texts: Texts) -> Texts:
        """The texts that are records."""
        return texts if self.kept is None else texts.select(self.kept)


def tokenise(
    texts: Texts,
    labels: NDArray[np.int64] | None,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    max_length: int,
    weights: DataSettings | None = None,
    chat_template: str = "",
) -> Tokenised:
    """Token ids with the tokenizer's special tokens, at most `max_length` of a record, or of each text of a pair.

    What is written like a special token in a text is text. Language models get an end-of-text token behind every
    record that ends, and is not cut, if the tokenizer does not put one there. A record of
    summarisation is text, :data:`BEFORE_SUMMARY`, summary; its loss is on the summary and the end-of-text token. One
    of instructions is a conversation (:mod:`client.data.chat`); its loss is on the answers. One of preference is the
    texts of a pair, one behind the other, each of prompt and answer; what is compared is the answers.

    With `weights`, every token gets the weight of that policy (:mod:`client.data.sensitive`); an end-of-text token is
    none of the text's and weighs like its other tokens.

    Raises:
        ValueError: a text has no tokens, or a summary leaves no room for its text, or a chat template renders none of
            the conversations.
    """
    if task == "summarisation":
        return _summaries(texts, tokenizer, max_length)
    if task == "preference":
        return _pairs(texts, tokenizer, max_length, chat_template)
    if task == "instruction":
        return _conversations(texts, tokenizer, max_length, chat_template)
    end = tokenizer.eos_token_id if task == "causal-lm" else None
    language = task == "causal-lm"
    parts = [Records.from_lists([], None, None if weights is None else [])]
    truncated = 0
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        chunk = slice(start, start + _TEXTS_AT_ONCE)
        encoded = tokenizer(
            texts.texts[chunk],
            None if texts.pairs is None else texts.pairs[chunk],
            truncation=not language,  # which would put an end token behind a text that goes on
            max_length=None if language else max_length,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=weights is not None,
            verbose=False,
        )
        truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings or [])
        rows, weighed = encoded["input_ids"], None
        if weights is not None:
            weighed = [row.tolist() for row in token_weights(texts.texts[chunk], encoded["offset_mapping"], weights)]
        if language:
            open_ended = [end is not None and (not row or row[-1] != end) for row in rows]
            truncated += sum(len(row) - (row[-1:] == [end]) > max_length for row in rows)
            if weights is not None and weighed is not None:
                own = weights.other_weight
                weighed = [
                    [*row, own][:max_length] if added else row[:max_length]
                    for row, added in zip(weighed, open_ended, strict=True)
                ]
            rows = [
                [*row, end][:max_length] if added else row[:max_length]
                for row, added in zip(rows, open_ended, strict=True)
            ]
        parts.append(Records.from_lists(rows, None, weighed))
    records = Records.concatenate(parts)
    if without := int((records.lengths == 0).sum()):
        raise ValueError(f"{without} texts have no tokens under the tokenizer of model.name")
    return Tokenised(replace(records, labels=labels), truncated)


def prompts(texts: list[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> tuple[list[list[int]], int]:
    """Tokens of each text and :data:`BEFORE_SUMMARY`, at most `longest`, and how many texts were cut at their end."""
    tail = _plain(tokenizer, [BEFORE_SUMMARY])[0]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = longest - len(start) - len(tail)
    bodies = _plain(tokenizer, texts)
    return [[*start, *body[: max(0, room)], *tail] for body in bodies], sum(len(body) > room for body in bodies)


def _summaries(texts: Texts, tokenizer: PreTrainedTokenizerBase, longest: int) -> Tokenised:
    """A summary may fill what its text leaves, and half of a record whatever its text's length."""
    assert texts.pairs is not None
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    answers = [[*answer, *end] for answer in _plain(tokenizer, [f" {pair.strip()}" for pair in texts.pairs])]
    rows, weights, truncated, answers_cut = [], [], 0, 0
    for text, answer in zip(texts.texts, answers, strict=True):
        (whole,), _ = prompts([text], tokenizer, sys.maxsize)
        kept = answer[: max(longest // 2, longest - len(whole))]
        (prompt,), cut = prompts([text], tokenizer, longest - len(kept))
        truncated += bool(cut or len(kept) < len(answer))
        answers_cut += len(kept) < len(answer)
        rows.append([*prompt, *kept])
        weights.append([0.0] * len(prompt) + [1.0] * len(kept))
    return Tokenised(Records.from_lists(rows, None, weights), truncated, answers_cut)


def _conversations(texts: Texts, tokenizer: PreTrainedTokenizerBase, longest: int, template: str) -> Tokenised:
    template = chat.template_of(tokenizer, template)
    first = tokenizer.bos_token_id
    kept: list[int] = []
    found: list[chat.Rendered] = []
    left_out: Counter[str] = Counter()
    truncated, answers_cut, tools_left_out, reason = 0, 0, 0, ""
    for row, text in enumerate(texts.texts):
        try:
            rendered = chat.render(tokenizer, text, template)
        except ValueError as error:  # of other errors not the words: a template may quote the text
            left_out[str(error) if isinstance(error, chat.NotRendered) else "not rendered by the chat template"] += 1
            reason = str(error)
            continue
        rendered, cut, answer_cut = chat.cut(rendered, longest, first)
        kept.append(row)
        found.append(rendered)
        tools_left_out += rendered.tools_left_out
        truncated, answers_cut = truncated + cut, answers_cut + answer_cut
    if not kept:
        raise ValueError(f"none of {len(texts)} conversations can be used: {reason}")
    records = Records.from_lists([row.tokens for row in found], None, [row.weights for row in found])
    chosen = None if len(kept) == len(texts) else np.array(kept, dtype=np.int64)
    what = "conversations describe tools, which the chat template leaves out"
    noted = Counter({what: tools_left_out} if tools_left_out else {})
    return Tokenised(records, truncated, answers_cut, chosen, left_out, noted)


def _pairs(texts: Texts, tokenizer: Any, longest: int, template: str) -> Tokenised:
    """Both texts of every pair; whether they are conversations is seen of the pair."""
    template = chat.template_of(tokenizer, template)
    kept: list[int] = []
    found: list[list[chat.Rendered]] = []
    truncated, answers_cut, left_out, reason = 0, 0, Counter[str](), ""
    for row, text in enumerate(texts.texts):
        parts = preferences.pair_of(text)
        try:
            if len(parts) == 2:
                pair = [chat.render(tokenizer, line, template) for line in parts]
            else:
                pair = _completed(tokenizer, *parts)
        except ValueError as error:  # see `_conversations`
            left_out[str(error) if isinstance(error, chat.NotRendered) else "not rendered by the chat template"] += 1
            reason = str(error)
            continue
        pair, cut, answer_cut = chat.cut_pair(pair, longest, tokenizer.bos_token_id)
        if pair[0].tokens == pair[1].tokens:
            left_out["pairs with equal answers, once they are cut"] += 1
            reason = f"their answers begin alike for more than {longest} tokens (model.max-length)"
            continue
        kept.append(row)
        found.append(pair)
        truncated, answers_cut = truncated + cut, answers_cut + answer_cut
    if not kept:
        raise ValueError(f"none of {len(texts)} pairs can be used: {reason}")
    records = Records.from_lists(
        [[*first.tokens, *second.tokens] for first, second in found],
        None,
        [[*first.weights, *second.weights] for first, second in found],
    )
    records = replace(records, splits=np.array([len(first.tokens) for first, _ in found], dtype=np.int64))
    chosen = None if len(kept) == len(texts) else np.array(kept, dtype=np.int64)
    return Tokenised(records, truncated, answers_cut, chosen, left_out)


def _completed(tokenizer: Any, prompt: str, chosen: str, rejected: str) -> list[chat.Rendered]:
    """A prompt with either answer. The answer begins where the tokens leave the prompt's, as in TRL."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer([prompt, prompt + chosen, prompt + rejected], split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    asked, *answered = ([*row[:-1]] if row[-1:] == end else row for row in encoded)
    whole = [[*row, *end] for row in answered]
    shared = min(preferences.shared_start(asked, row) for row in whole)
    return [chat.Rendered(row, [float(place >= shared) for place in range(len(row))]) for row in whole]


def _plain(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    encoded: list[list[int]] = tokenizer(texts, **options, verbose=False)["input_ids"]
    return encoded
