"""Conversations in the forms that people keep them in, read into one: a list of turns with a role and a text.

Forms, by the columns of a table:

- ``messages`` (OpenAI, TRL): a column of lists of ``{"role": ..., "content": ...}``;
- ShareGPT: ``conversations``, lists of ``{"from": "human" | "gpt" | "system", "value": ...}``;
- ``prompt`` and ``completion`` (or ``response``): texts, or lists of messages;
- Alpaca: ``instruction``, ``input`` (may be empty), ``output``; Dolly: ``instruction``, ``context``, ``response``;
- any other names: a column of lists in ``data.text-column``, or a question there and its answer in
  ``data.text-pair-column``.

A turn may say that it is not trained on: ``weight: 0`` (OpenAI), ``train: false`` (ShareGPT), ``training: false``
(Axolotl). It may call tools (``tool_calls``, or ``function_call``) and bring their results (roles ``tool``,
``function``, ``ipython``, ``observation``); a row may describe them (``tools``). ``developer`` is what ``system`` is
called now. What else a turn has is counted by its key.

A conversation is kept as one line of JSON, so that everything which works on texts works on conversations too. What has
another shape is refused, with the row. A conversation that cannot be trained on is left out by a rule of that
conversation alone, and counted by its reason.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from client.data.columns.tables import Columns, values_of

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), USER),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model"), ASSISTANT),
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("tool", "function", "ipython", "observation"), TOOL),
}
"""Names of roles in the sources, and in chat templates."""

Message = dict[str, Any]
"""``role`` and ``content``; where they are given ``tool_calls``, ``name``, ``tool_call_id``, ``reasoning_content``; in
the first turn ``tools``; ``train``, False where an answer is not trained on."""

_TRAINED = ("weight", "train", "training")
_KEPT = ("tool_calls", "name", "tool_call_id", "reasoning_content", "tools", "train")
_ORDER = re.compile("s?(ua(t+a)*)+")
_MOST_NAMES = 5
"""Roles and keys of a file that are counted by name; all others are counted together."""

_LISTS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "", "completion"), ("prompt", "", "response"), ("question", "", "answer"))
_INSTRUCTIONS = (("instruction", "input", "output"), ("instruction", "context", "response"))
FORMS = (
    "messages, conversations (lists of turns), prompt and completion, question and answer, instruction with input and "
    "output (Alpaca) or with context and response (Dolly); other names go into data.text-column (lists of turns, or "
    "the question) and data.text-pair-column (the answer)"
)


def to_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as one line of JSON; equal conversations give equal lines."""
    rows: list[list[Any]] = []
    for message in messages:
        more = {key: message[key] for key in _KEPT if key in message}
        rows.append([message["role"], message["content"], *([more] if more else [])])
    return json.dumps(rows, ensure_ascii=False)


def from_text(text: str) -> list[Message]:
    """Read a conversation from the line of :func:`to_text`."""
    return [{"role": row[0], "content": row[1], **(row[2] if len(row) > 2 else {})} for row in json.loads(text)]


def map_texts(text: str, change: Callable[[str], str]) -> str:
    """A conversation with ``change`` applied to the text of every turn, and to the texts in calls of tools."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [changed(each) for each in value]
        return {key: changed(each) for key, each in value.items()} if isinstance(value, dict) else value

    fixed = ("role", "tools", "tool_call_id")
    return to_text([{key: m[key] if key in fixed else changed(m[key]) for key in m} for m in from_text(text)])


def words(text: str) -> int:
    """Words, between blanks, of all turns."""
    return sum(len(message["content"].split()) for message in from_text(text))


class _Unusable(ValueError):
    """Why a conversation is left out."""


def read_column(
    table: Columns, text_column: str, pair_column: str, where: str
) -> tuple[list[str | None], Counter[str], Counter[str]]:
    """The conversation of every row, None for one that is left out; how many were, by reason; what else was seen.

    Args:
        table: as opened.
        text_column, pair_column: ``data.text-column`` and ``data.text-pair-column``.
        where: opens the messages.

    Raises:
        ValueError: no column of a known form, or a value of another shape, with its row.
    """
    question, context, answer = _columns(table, text_column, pair_column, where)
    given = [name if table.names.count(name) == 1 else "" for name in ("tools", SYSTEM) if name != question]
    values = [table.cells(name) if name else None for name in (question, context, answer, *given)]
    found: list[str | None] = []
    left_out, noted = Counter[str](), Counter[str]()
    for row in range(table.rows):
        first, middle, last, tools, system = (None if column is None else column[row] for column in values)
        at = f"{where}, row {row + 1}"
        text = None
        try:
            messages = _turns(first, question, at, USER, noted)
            if middle and messages:
                messages[-1]["content"] += f"\n\n{middle}"
            if answer:
                messages += _turns(last, answer, at, ASSISTANT, noted)
            if system and isinstance(system, str) and messages[:1] and messages[0]["role"] != SYSTEM:
                messages.insert(0, {"role": SYSTEM, "content": system})
            messages = _usable(messages)
            if tools := _objects(tools):
                messages[0]["tools"] = tools
            text = to_text(messages)
        except _Unusable as reason:
            left_out[str(reason)] += 1
        found.append(text)
    return found, _named(left_out), _named(noted)


def _named(counts: Counter[str]) -> Counter[str]:
    """The same with only the most frequent of the names that a file makes up, which may be as many as it has rows."""
    quoted = [what for what, _ in counts.most_common() if what.endswith("'")]
    for what in quoted[_MOST_NAMES:]:
        counts[f"{what.partition(chr(39))[0]}others"] += counts.pop(what)
    return counts


def _objects(value: Any) -> list[Any]:
    """Tools, or calls of them, which may be written as JSON in a text; none for what is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError:
            raise _Unusable("tools that are no JSON") from None
    if isinstance(value, dict):
        value = [value]
    return [_filled(each) for each in values_of(value)] if isinstance(value, list) else []


def _filled(value: Any) -> Any:
    """The same without the keys that Arrow adds to objects, as None."""
    if isinstance(value, list):
        return [_filled(each) for each in value]
    return {key: _filled(each) for key, each in value.items() if each is not None} if isinstance(value, dict) else value


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


def _turns(value: Any, column: str, at: str, role: str, noted: Counter[str]) -> list[Message]:
    """The turns in one cell: a text is a turn of `role`, a list is turns with roles of their own."""
    if value is None:
        return [{"role": role, "content": ""}]
    if isinstance(value, str):
        return [{"role": role, "content": str(value)}]
    if not isinstance(value, list):
        raise ValueError(f"{at}: {column!r} holds {type(value).__name__}, not a text or a list of turns")
    return [_turn(turn, f"{at}: turn {number + 1} of {column!r}", noted) for number, turn in enumerate(value)]


def _turn(turn: Any, at: str, noted: Counter[str]) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"{at} is {type(turn).__name__}; a turn has 'role' and 'content', or 'from' and 'value'")
    given = {key: value for key, value in turn.items() if value is not None}
    role_key, content_key = ("from", "value") if "from" in given else ("role", "content")
    if role_key not in given or not {content_key, "tool_calls", "function_call"} & set(turn):
        raise ValueError(
            f"{at} has {', '.join(turn) or 'nothing'}; it needs 'role' and 'content', or 'from' and 'value'"
        )
    role = str(given.pop(role_key)).strip()
    if role.lower() not in ROLES:
        raise _Unusable(f"with a turn of the unknown role '{role[:20]}'")
    message: Message = {"role": ROLES[role.lower()], "content": _content(given.pop(content_key, None))}
    calls = _objects(given.pop("tool_calls", None))
    if call := _objects(given.pop("function_call", None)):
        calls += [{"type": "function", "function": call[0]}]
    if calls:
        message["tool_calls"] = [_call(each) for each in calls]
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in given:
            message[key] = str(given.pop(key))
    for key in _TRAINED:
        if key in given:
            message |= _trained(given.pop(key), key, message["role"], noted)
    noted.update(f"turns have a key that is not used: '{str(key)[:20]}'" for key in given)
    return message


def _trained(value: Any, key: str, role: str, noted: Counter[str]) -> dict[str, bool]:
    """Whether an answer is trained on, by what its author says; nothing where he says nothing new."""
    said = str(value).lower()
    if said not in ("0", "1", "0.0", "1.0", "true", "false"):
        raise _Unusable(f"with a {key} that is neither 0 nor 1")
    if role != ASSISTANT:
        if said in ("1", "1.0", "true"):
            noted[f"turns of role {role} are marked for training ({key}); only answers are trained on"] += 1
        return {}
    if said in ("1", "1.0", "true"):
        return {}
    noted[f"answers are not trained on, as their {key} says"] += 1
    return {"train": False}


def _call(call: Any) -> Any:
    """A call of a tool with its arguments as an object, which templates write; OpenAI has them as a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Unusable("with a call of a tool that has no name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return call
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _content(content: Any) -> str:
    """A text, or the texts of OpenAI's parts; nothing for a turn that only calls a tool."""
    if content is None:
        return ""
    if isinstance(content, str):
        return str(content)
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        if kind != "text":
            raise _Unusable(f"with a part that is no text: '{str(kind)[:20]}'")
        texts.append(part if isinstance(part, str) else str(part.get("text") or ""))
    return "".join(texts)


def _usable(messages: list[Message]) -> list[Message]:
    """The conversation up to its last answer; _Unusable if it cannot be trained on."""
    while messages and messages[-1]["role"] != ASSISTANT:
        messages = messages[:-1]  # nobody answered: nothing is learnt from it
    if not messages:
        raise _Unusable("no answer")
    if any(not message["content"].strip() and "tool_calls" not in message for message in messages):
        raise _Unusable("empty turn")
    if not _ORDER.fullmatch("".join(message["role"][0] for message in messages)):
        raise _Unusable("roles do not take turns")
    if all(message.get("train") is False for message in messages if message["role"] == ASSISTANT):
        raise _Unusable("no answer that is to be trained on")
    return messages
