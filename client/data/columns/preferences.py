"""Pairs of answers to one prompt, of which people prefer the first, in the forms that TRL reads.

Forms, by the columns of a table:

- explicit prompt: ``prompt``, ``chosen``, ``rejected``, texts;
- implicit prompt: ``chosen`` and ``rejected``, whole texts; the prompt is what both begin with;
- conversations: the same columns with lists of turns (:mod:`client.data.conversations`); the prompt is the turns that
  both begin with. A ``prompt`` that is a text beside them is in them already, and is not read.

A pair is kept as one line of JSON: prompt and two answers, or two whole conversations. Pairs that prefer nothing are
left out by a rule of that pair alone.
"""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from client.data import conversations
from client.data.columns.normal_form import is_blank
from client.data.columns.tables import Columns

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
NO_PREFERENCE = "pairs with equal answers"


def read_columns(table: Columns, where: str) -> tuple[list[str | None], Counter[str]]:
    """The pair of every row, None for one that is left out; how many were, by reason.

    Args:
        where: opens the messages.

    Raises:
        ValueError: a column is missing or there twice, or holds values of another shape.
    """
    for name in (CHOSEN, REJECTED):
        if table.names.count(name) != 1:
            raise ValueError(
                f"{where}: pairs need one column {name!r}; it has {', '.join(table.names)}. They are kept as TRL reads "
                "them: prompt, chosen and rejected, or chosen and rejected alone, texts or lists of turns"
            )
    prompt = PROMPT if table.names.count(PROMPT) == 1 else ""
    if table.is_flat(CHOSEN) and table.is_flat(REJECTED):
        columns = [table.texts(name, where) for name in (CHOSEN, REJECTED)]
        prompts = table.texts(prompt, where) if prompt else [None] * table.rows
        found = [_texts(*row, explicit=bool(prompt)) for row in zip(prompts, *columns, strict=True)]
    else:
        if prompt and table.is_flat(prompt):
            prompt = ""
        both = []
        for name in (CHOSEN, REJECTED):
            asked, answered = (prompt, name) if prompt else (name, "")
            both.append(conversations.read_column(table, asked, answered, where)[0])
        found = [_conversations(first, second) for first, second in zip(*both, strict=True)]
    left_out = Counter(reason for _, reason in found if reason)
    return [text for text, _ in found], left_out


def pair_of(text: str) -> list[str]:
    """Prompt, chosen and rejected answer of a line; or two conversations, of :mod:`client.data.conversations`."""
    found: list[str] = json.loads(text)
    return found


def to_text(*parts: str) -> str:
    """The line of a pair, see :func:`pair_of`."""
    return json.dumps(parts, ensure_ascii=False)


def words(text: str) -> int:
    """Words, between blanks, of a pair."""
    parts = pair_of(text)
    return sum(len(part.split()) if len(parts) > 2 else conversations.words(part) for part in parts)


def shared_start(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of values that both sequences begin with."""
    return sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))


def _texts(prompt: str | None, chosen: str | None, rejected: str | None, *, explicit: bool) -> tuple[str | None, str]:
    texts = [chosen, rejected, *([prompt] if explicit else [])]
    if any(text is None or is_blank(text) for text in texts):
        return None, "pairs with an empty text"
    assert chosen is not None
    assert rejected is not None
    if chosen == rejected:
        return None, NO_PREFERENCE
    if prompt is None:
        prompt = chosen[: shared_start(chosen, rejected)].removesuffix(" ")  # a blank goes with the word behind it
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return to_text(prompt, chosen, rejected), ""


def _conversations(first: str | None, second: str | None) -> tuple[str | None, str]:
    if first is None or second is None:
        return None, f"pairs without a {CHOSEN if first is None else REJECTED} answer that can be used"
    both = [conversations.from_text(text) for text in (first, second)]
    for messages in both:
        for message in messages:
            message.pop("train", None)  # all of an answer is compared, and nothing before it
    if both[0] == both[1]:
        return None, NO_PREFERENCE
    shared = shared_start(*both)
    if not shared or shared in map(len, both):
        return None, "pairs of conversations that do not begin alike, or of which one is the other's beginning"
    lines: list[Any] = [conversations.to_text([_read(m) for m in each[:shared]] + each[shared:]) for each in both]
    return to_text(*lines), ""


def _read(message: conversations.Message) -> conversations.Message:
    """A turn of the prompt: an answer in it is read, not learnt."""
    return {**message, "train": False} if message["role"] == conversations.ASSISTANT else message
