"""Conversations in the forms that people keep them in, read into one: a list of turns with a role and a text.

Forms, by the columns of a table:

- ``messages`` (OpenAI, TRL): a column of lists of ``{"role": ..., "content": ...}``;
- ShareGPT: ``conversations``, lists of ``{"from": "human" | "gpt" | "system", "value": ...}``;
- ``prompt`` and ``completion`` (or ``response``): texts, or lists of messages;
- Alpaca: ``instruction``, ``input`` (may be empty), ``output``; Dolly: ``instruction``, ``context``, ``response``;
- any other names: a column of lists in ``data.text-column``, or a question there and its answer in
  ``data.text-pair-column``.

A conversation is kept as one line of JSON, so that everything which works on texts works on conversations too. What has
another shape is refused, with the row. A conversation that cannot be trained on is left out by a rule of that
conversation alone, and counted by its reason: it has no answer, an empty turn, or roles that do not take turns.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from client.data.columns.tables import Columns

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), USER),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model"), ASSISTANT),
    "system": SYSTEM,
}
"""Names of roles in the sources, and in chat templates."""

Message = dict[str, str]

_LISTS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "", "completion"), ("prompt", "", "response"), ("question", "", "answer"))
_INSTRUCTIONS = (("instruction", "input", "output"), ("instruction", "context", "response"))
FORMS = (
    "messages, conversations (lists of turns), prompt and completion, question and answer, instruction with input and "
    "output (Alpaca) or with context and response (Dolly); other names go into data.text-column (lists of turns, or "
    "the question) and data.text-pair-column (the answer)"
)


def to_text(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as one line of JSON; equal conversations give equal lines."""
    return json.dumps([[message["role"], message["content"]] for message in messages], ensure_ascii=False)


def from_text(text: str) -> list[Message]:
    """The inverse of :func:`to_text`."""
    return [{"role": role, "content": content} for role, content in json.loads(text)]


def mapped(text: str, change: Any) -> str:
    """A conversation with ``change`` applied to the text of every turn."""
    return to_text([{**message, "content": change(message["content"])} for message in from_text(text)])


def words(text: str) -> int:
    """Words, between blanks, of all turns."""
    return sum(len(message["content"].split()) for message in from_text(text))


def read_column(
    table: Columns, text_column: str, pair_column: str, where: str
) -> tuple[list[str | None], Counter[str]]:
    """The conversation of every row, None for one that is left out, and how many were left out for which reason.

    Args:
        table: as opened.
        text_column, pair_column: ``data.text-column`` and ``data.text-pair-column``.
        where: opens the messages.

    Raises:
        ValueError: no column of a known form, or a value of another shape, with its row.
    """
    question, context, answer = _columns(table, text_column, pair_column, where)
    values = [table.cells(name) if name else None for name in (question, context, answer)]
    found: list[str | None] = []
    left_out: Counter[str] = Counter()
    for row in range(table.rows):
        first, middle, last = (None if column is None else column[row] for column in values)
        at = f"{where}, row {row + 1}"
        messages = _turns(first, question, at)
        if middle and messages:
            messages[-1]["content"] += f"\n\n{middle}"
        if answer:
            messages += _turns(last, answer, at, ASSISTANT)
        messages, reason = _usable(messages)
        found.append(None if reason else to_text(messages))
        if reason:
            left_out[reason] += 1
    return found, left_out


def _columns(table: Columns, text: str, pair: str, where: str) -> tuple[str, str, str]:
    """Names of the columns of the question (or of all turns), of what belongs to it, and of the answer; "" for none."""
    names = table.names
    if pair:
        for option, name in (("data.text-column", text), ("data.text-pair-column", pair)):
            if name not in names:
                raise ValueError(f"{where}: there is no column {name!r} ({option}); it has {', '.join(names)}")
        return text, "", pair
    for name in (text, *_LISTS):
        if name in names and not table.is_flat(name):
            return name, "", ""
    for question, context, answer in (*_INSTRUCTIONS, *_PAIRS):
        if question in names and answer in names:
            return question, context if context in names else "", answer
    raise ValueError(f"{where}: no conversations; it has {', '.join(names)}. Known are {FORMS}")


def _turns(value: Any, column: str, at: str, role: str = USER) -> list[Message]:
    """The turns in one cell: a text is a turn of `role`, a list is turns with roles of their own."""
    if value is None:
        return [{"role": role, "content": ""}]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"{at}: {column!r} holds {type(value).__name__}, not a text or a list of turns")
    return [_turn(turn, f"{at}: turn {number + 1} of {column!r}") for number, turn in enumerate(value)]


def _turn(turn: Any, at: str) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{at} is {type(turn).__name__}; a turn has 'role' and 'content', or 'from' and 'value'")
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if role_key in turn and content_key in turn:
            break
    else:
        raise ValueError(
            f"{at} has {', '.join(turn) or 'nothing'}; it needs 'role' and 'content', or 'from' and 'value'"
        )
    role, content = turn[role_key], turn[content_key]
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        raise ValueError(f"{at}: role {role!r} is unknown; roles are {', '.join(ROLES)}")
    return {"role": ROLES[role.strip().lower()], "content": _content(content, at)}


def _content(content: Any, at: str) -> str:
    """A text, or the texts of OpenAI's parts; nothing for a turn that only calls a tool."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    raise ValueError(f"{at}: its content is {type(content).__name__}, not a text; images and tools are not trained on")


def _usable(messages: list[Message]) -> tuple[list[Message], str]:
    """The conversation up to its last answer, and why it is left out ("" if it is not)."""
    while messages and messages[-1]["role"] != ASSISTANT:
        messages = messages[:-1]  # nobody answered: nothing is learnt from it
    if not messages:
        return [], "no answer"
    if any(not message["content"].strip() for message in messages):
        return [], "empty turn"
    spoken = [message["role"] for message in messages]
    if spoken[0] == SYSTEM:
        spoken = spoken[1:]
    if spoken != [USER, ASSISTANT] * (len(spoken) // 2):
        return [], "roles do not take turns"
    return messages, ""
