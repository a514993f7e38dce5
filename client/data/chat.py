"""Conversations to tokens: rendered by a chat template, with the loss on every answer and on nothing else.

A template is the tokenizer's own, or ``model.chat-template``, or :data:`PLAIN_TEMPLATE` for a base model that has none.
What a model answers is where the template says so (``{% generation %}``, as TRL's training templates do). A template
that does not say it is given marks in the answers' places: where they come out, the answers are. To an answer belong
its end-of-turn token, but not the blank behind it, and what the template puts between the generation prompt and the
answer, such as the empty thought of Qwen3.

Rendered text is tokenised without special tokens, which the template writes itself: nothing is doubled.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from client.data.conversations import ASSISTANT, TOOL, Message, from_text

PLAIN_TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% elif message['role'] == 'user' %}{{ '### User:\n' + message['content'] + '\n\n' }}{% elif message['role'] == 'tool' %}{{ '### Tool:\n' + message['content'] + '\n\n' }}{% else %}{{ '### Assistant:\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"""  # noqa: E501
"""For base models, which have no template of their own."""

_CUT_PROMPT = 16
"""Tokens before an answer that are kept where the answer fills the rest: with them, the template's words before it."""


@dataclass(frozen=True)
class Rendered:
    """One conversation in tokens.

    Attributes:
        tokens: ids.
        weights: 1.0 on the tokens of answers, 0.0 elsewhere; as long as `tokens`.
        tools_left_out: whether the template writes nothing of the tools that the conversation describes.
    """

    tokens: list[int]
    weights: list[float]
    tools_left_out: bool = False

    @property
    def last_answer(self) -> tuple[int, int]:
        """Index of the first token of the last answer, and of the one behind its last."""
        stop = max(index for index, weight in enumerate(self.weights) if weight) + 1
        start = stop
        while start and self.weights[start - 1]:
            start -= 1
        return start, stop


def template_of(tokenizer: PreTrainedTokenizerBase, override: str = "") -> str:
    """The chat template that is used; `override` is ``model.chat-template``."""
    own: Any = tokenizer.chat_template
    if isinstance(own, dict):  # several by name
        own = own.get("default")
    return override or own or PLAIN_TEMPLATE


def render(tokenizer: PreTrainedTokenizerBase, text: str, template: str) -> Rendered:
    """Tokens of one conversation, uncut.

    Args:
        text: as :func:`client.data.conversations.to_text` makes it.
        template: of :func:`template_of`.

    Raises:
        NotRendered: what the template leaves out.
        ValueError: the template cannot render it, or no answer is found in what it renders.
    """
    messages = from_text(text)
    trained = [message.pop("train", True) for message in messages if message["role"] == ASSISTANT]
    tools = {"tools": messages[0].pop("tools")} if "tools" in messages[0] else {}
    try:
        found = (_marked if "endgeneration" in template else _found)(tokenizer, messages, template, trained, tools)
        left_out = _tools_left_out(tokenizer, messages, template, tools)
    except (TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error
    if not any(found.weights):
        raise ValueError("the chat template renders no answer")
    found = replace(found, tools_left_out=left_out)
    start, stop = found.last_answer
    if tokenizer.eos_token_id is None or _ends(tokenizer, found.tokens[start:stop]):
        return found
    # no end of turn: without one the model never learns to stop
    return Rendered([*found.tokens[:stop], tokenizer.eos_token_id], [*found.weights[:stop], 1.0], left_out)


def _ends(tokenizer: Any, tokens: list[int]) -> bool:
    """Whether a text ends in a special token, blanks left aside: TRL's template for Qwen marks the line's end too."""
    last = next((token for token in reversed(tokens) if tokenizer.decode([token]).strip()), None)
    return last in tokenizer.all_special_ids


def prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template: str) -> list[int]:
    """Tokens after which the model answers; ValueError if the template cannot render it."""
    try:
        text = _text(tokenizer, list(messages), template, add_generation_prompt=True)
    except (TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def cut(rendered: Rendered, longest: int, first: int | None) -> tuple[Rendered, bool, bool]:
    """Cut to at most `longest` tokens, and tell whether anything, and whether an answer was cut.

    What is behind the last answer goes first, then the conversation's beginning, its first token (`first`, if that
    begins every text) excepted. Only where the last answer alone is too long does it lose its end.
    """
    tokens, weights = rendered.tokens, rendered.weights
    if len(tokens) <= longest:
        return rendered, False, False
    start, stop = rendered.last_answer
    begins = 1 if tokens[0] == first and start else 0
    room = longest - begins
    before = min(start - begins, max(room - (stop - start), min(_CUT_PROMPT, room // 2)))
    kept = slice(start - before, min(stop, start - before + room))
    short = replace(rendered, tokens=[*tokens[:begins], *tokens[kept]], weights=[*weights[:begins], *weights[kept]])
    return short, True, kept.stop < stop


def cut_pair(pair: Sequence[Rendered], longest: int, first: int | None) -> tuple[list[Rendered], bool, bool]:
    """Cut two texts with one prompt to at most `longest` tokens each, and tell as :func:`cut` does.

    What is behind the answers goes first; then the beginning of the prompt, as much of both; then the answers' ends.
    """
    ends = [max((i + 1 for i, weight in enumerate(each.weights) if weight), default=0) for each in pair]
    kept = [
        replace(each, tokens=each.tokens[:end], weights=each.weights[:end])
        for each, end in zip(pair, ends, strict=True)
    ]
    excess = max(ends) - longest
    if excess <= 0:
        return kept, False, False
    start = min(each.weights.index(1.0) for each in kept)
    begins = 1 if start and all(each.tokens[0] == first for each in kept) else 0
    stop = begins + min(excess, max(0, start - begins - min(_CUT_PROMPT, longest // 2)))
    short = [
        replace(
            each,
            tokens=[*each.tokens[:begins], *each.tokens[stop:]][:longest],
            weights=[*each.weights[:begins], *each.weights[stop:]][:longest],
        )
        for each in kept
    ]
    return short, True, stop - begins < excess


class NotRendered(ValueError):
    """A template leaves out what a conversation holds; the text says what, and quotes nothing of it."""


def _tools_left_out(tokenizer: Any, messages: list[Message], template: str, tools: dict[str, Any]) -> bool:
    """Whether a template leaves out the tools that are described; calls and results it must not leave out."""
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    results = [message["content"].strip() for message in messages if message["role"] == TOOL]
    if calls or results:
        whole = _text(tokenizer, messages, template, **tools)
        if any(name not in whole for name in calls):
            raise NotRendered("whose calls of tools the chat template leaves out")
        if any(result not in whole and json.dumps(result)[1:-1] not in whole for result in results):
            raise NotRendered("whose results of tools the chat template leaves out")
    return bool(tools) and _text(tokenizer, messages, template, **tools) == _text(tokenizer, messages, template)


def _text(tokenizer: Any, messages: list[Message], template: str, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))


def _marked(
    tokenizer: Any, messages: list[Message], template: str, trained: list[bool], tools: dict[str, Any]
) -> Rendered:
    """Answers are where the template says so."""
    encoded = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},  # else a log tells the length of a record
        **tools,
    )
    masks = np.array(encoded["assistant_masks"], dtype=np.float64)
    if not all(trained):
        answer = np.cumsum(np.diff(masks, prepend=0.0) > 0)  # the number of each token's answer, from 1
        if answer[-1] != len(trained):
            raise NotRendered("whose answers the chat template does not mark one by one, as their weights need")
        masks *= np.array([True, *trained])[answer]
    return Rendered(list(encoded["input_ids"]), masks.tolist())


def _found(
    tokenizer: Any, messages: list[Message], template: str, trained: list[bool], tools: dict[str, Any]
) -> Rendered:
    """Answers are where a mark in their place comes out, with their end of turn and what opens them."""
    whole = _text(tokenizer, messages, template, **tools)
    end_of_turn, spans = _end_of_turn(tokenizer), []
    contents = _contents(tokenizer, messages, template, whole, tools)
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    for number, wanted in zip(answers, trained, strict=True):
        if not wanted:
            continue
        before = _text(tokenizer, messages[:number], template, add_generation_prompt=True, **tools)
        after = _text(tokenizer, messages[: number + 1], template, **tools).rstrip()
        if "tool_calls" in messages[number]:  # which stand before or behind the answer's text
            if not (whole.startswith(before) and whole.startswith(after)):
                raise NotRendered("whose calls of tools cannot be told from the other turns")
            spans.append((len(before), len(after)))
            continue
        start, stop = contents[number]
        if whole.startswith(before):  # what lies between is the model's to write, such as an empty thought
            start = min(start, len(before))
        if ends := end_of_turn.match(whole, stop):
            stop = ends.end()
        elif whole.startswith(after):
            stop = max(stop, len(after))
        spans.append((start, stop))
    encoded = tokenizer(
        whole, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
    weights = np.zeros(len(offsets))
    for start, stop in spans:
        weights[(offsets[:, 1] > np.maximum(start, offsets[:, 0])) & (offsets[:, 0] < stop)] = 1.0
    return Rendered(list(encoded["input_ids"]), weights.tolist())


def _contents(
    tokenizer: Any, messages: list[Message], template: str, whole: str, tools: dict[str, Any]
) -> dict[int, tuple[int, int]]:
    """Where the text of every answer begins and ends in the rendered conversation, by the number of its message."""
    marks = {
        number: f"answer{number}of{hashlib.sha256(whole.encode()).hexdigest()[:16]}"
        for number, message in enumerate(messages)
        if message["role"] == ASSISTANT and message["content"].strip()
    }
    marked = [{**message, "content": marks.get(number, message["content"])} for number, message in enumerate(messages)]
    pieces = re.split("|".join(marks.values()) or "(?!)", _text(tokenizer, marked, template, **tools))
    for tidied in (str, str.strip):
        texts = [tidied(messages[number]["content"]) for number in marks]
        if len(pieces) == len(texts) + 1 and "".join(map("".join, zip_longest(pieces, texts, fillvalue=""))) == whole:
            bounds = list(accumulate(map(len, chain(*zip(texts, pieces[1:], strict=True))), initial=len(pieces[0])))
            return {number: (bounds[2 * at], bounds[2 * at + 1]) for at, number in enumerate(marks)}
    raise ValueError(
        "the chat template changes what answers say, or leaves one out, so they cannot be found in what it renders; "
        "give one that marks them by {% generation %} in model.chat-template"
    )


def _end_of_turn(tokenizer: Any) -> re.Pattern[str]:
    """Tokens of the tokenizer's own up to its end of text, else the first of them, behind blanks or none."""
    known = sorted((re.escape(str(token)) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
    one, end = "|".join(known) or "(?!)", re.escape(tokenizer.eos_token or "") or "(?!)"
    return re.compile(rf"\s*(?:(?:{one})*?{end}|(?:{one}))")
