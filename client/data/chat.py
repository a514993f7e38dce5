"""Conversations to tokens: rendered by a chat template, with the loss on every answer and on nothing else.

A template is the tokenizer's own, or ``model.chat-template``, or :data:`PLAIN_TEMPLATE` for a base model that has none.
What a model answers is where the template says so (``{% generation %}``, as TRL's training templates do). A template
that does not say it is asked twice for every answer: rendered up to the answer with the generation prompt, and with the
answer. What the second has more is the answer, its end-of-turn token included and the blank behind it not.

Rendered text is tokenised without special tokens, which the template writes itself: nothing is doubled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from client.data.conversations import ASSISTANT, Message, from_text

PLAIN_TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% elif message['role'] == 'user' %}{{ '### User:\n' + message['content'] + '\n\n' }}{% else %}{{ '### Assistant:\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"""  # noqa: E501
"""For base models, which have no template of their own."""

_CUT_PROMPT = 16
"""Tokens before an answer that are kept where the answer fills the rest: with them, the template's words before it."""


@dataclass(frozen=True)
class Rendered:
    """One conversation in tokens.

    Attributes:
        tokens: ids.
        weights: 1.0 on the tokens of answers, 0.0 elsewhere; as long as `tokens`.
    """

    tokens: list[int]
    weights: list[float]

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
        ValueError: the template cannot render it, or no answer is found in what it renders.
    """
    messages = from_text(text)
    try:
        found = (_marked if "endgeneration" in template else _compared)(tokenizer, messages, template)
    except (TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error
    if not any(found.weights):
        raise ValueError("the chat template renders no answer")
    stop = found.last_answer[1]
    if found.tokens[stop - 1] in tokenizer.all_special_ids or tokenizer.eos_token_id is None:
        return found
    # no end of turn: without one the model never learns to stop
    return Rendered([*found.tokens[:stop], tokenizer.eos_token_id], [*found.weights[:stop], 1.0])


def prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template: str) -> list[int]:
    """Tokens after which the model answers; ValueError if the template cannot render it."""
    try:
        text = _text(tokenizer, list(messages), template, add_generation_prompt=True)
    except (TemplateError, TypeError, KeyError) as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def cut(rendered: Rendered, longest: int, first: int | None) -> tuple[Rendered, bool, bool]:
    """At most `longest` tokens, and whether anything, and whether an answer was cut.

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
    short = Rendered([*tokens[:begins], *tokens[kept]], [*weights[:begins], *weights[kept]])
    return short, True, kept.stop < stop


def _text(tokenizer: Any, messages: list[Message], template: str, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))


def _marked(tokenizer: Any, messages: list[Message], template: str) -> Rendered:
    """Answers are where the template says so."""
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return Rendered(list(encoded["input_ids"]), [float(mark) for mark in encoded["assistant_masks"]])


def _compared(tokenizer: Any, messages: list[Message], template: str) -> Rendered:
    """Answers are what a conversation has more with them than without."""
    whole, spans = _text(tokenizer, messages, template), []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = _text(tokenizer, messages[:number], template, add_generation_prompt=True)
        after = _text(tokenizer, messages[: number + 1], template).rstrip()
        if not (whole.startswith(before) and whole.startswith(after) and len(after) > len(before)):
            raise ValueError(
                "the chat template renders a conversation's beginning differently once it goes on, so its answers "
                "cannot be found; give one that marks them by {% generation %} in model.chat-template"
            )
        spans.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
    weights = np.zeros(len(offsets))
    for start, stop in spans:
        weights[(offsets[:, 1] > np.maximum(start, offsets[:, 0])) & (offsets[:, 0] < stop)] = 1.0
    return Rendered(list(encoded["input_ids"]), weights.tolist())
