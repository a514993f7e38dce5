"""Treatments of sensitive spans: they are masked, or their tokens weigh more than the others.

Redaction replaces each span by a mask and merges consecutive equal masks. What is left is the public part of a record
under selective DP: neighbours have equal redacted texts by definition. What the detector missed stays readable and has
no protection at all.

ATDP's token weights: the loss of a sensitive token counts fully, that of the others a public constant.

    w(t) = 1 if t is sensitive or a function word, else w_other

Reference: Yu, Singh, Li, Cao, "ATDP" (2025), algorithm 1. Guarantee: the weights of a record are a function of that
record alone (the detector and the list of function words are public and fixed), and clipping comes afterwards; so a
weighted DP-SGD step costs exactly what an unweighted one does. Weights add no privacy and take none away.
Deviations: the paper sets w_other from the share alpha of sensitive tokens in the private data, and its function
tokens from counts over them; both are private statistics. Here w_other is a public constant (0.2, the value it quotes;
the formula, of a PUBLIC alpha below the share r that sensitive tokens are to have of the loss, is
alpha (1 - r) / (r (1 - alpha))), and the function words are a public list. And a record's loss is divided by the sum of
its weights (``client.models.tasks.CausalLM``), where the paper sums; clipping leaves little of the difference.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privacy import checks
from privacy.sensitive_text.detectors import STOP_WORDS, Span


@dataclass(frozen=True)
class Mask:
    """The text that replaces a removed span.

    Attributes:
        text: stands for every span, ``{tag}`` in it for why the span was removed: ``"<{tag}>"`` gives typed masks.
    """

    text: str = "<MASK>"

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"mask must have text, got {self.text!r}; a removed span would leave no trace")

    def of(self, span: Span) -> str:
        """The mask of one span."""
        return self.text.replace("{tag}", span.tag)


def redact_text(text: str, spans: Sequence[Span], mask: Mask | None = None) -> str:
    """``text`` without its sensitive spans.

    Spans with nothing but blanks between them and equal masks become one mask.

    Args:
        spans: ordered, without overlap, within the text.

    Raises:
        ValueError: spans that overlap or leave the text.
    """
    mask = Mask() if mask is None else mask
    parts: list[str] = []
    end, last = 0, ""
    for span in spans:
        if span.start < end or span.stop > len(text):
            raise ValueError(f"spans must be ordered within the text of {len(text)} characters, got {span} after {end}")
        between, this = text[end : span.start], mask.of(span)
        if not (last == this and not between.strip()):
            parts += [between, this]
        end, last = span.stop, this
    return "".join([*parts, text[end:]])


_WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)?")


@dataclass(frozen=True)
class TokenWeights:
    """The rule that turns spans into weights; public, and fixed before any data is read.

    Attributes:
        other: weight of a token that is neither sensitive nor a function word, in (0, 1].
        function_words: whether function words keep weight 1.
    """

    other: float = 0.2
    function_words: bool = True

    def __post_init__(self) -> None:
        checks.probability(other_weight=self.other, remedy="1 switches weighting off")

    def of(self, text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> NDArray[np.float32]:
        """The weight of every token of one record.

        Args:
            text: the record.
            offsets: characters ``(start, stop)`` of every token in `text`; empty for tokens that are none of it.
            spans: the sensitive spans of `text`.

        Returns:
            float32 ``[tokens]``. A token weighs 1 if it shares a character, blanks apart, with a sensitive span or
            with a function word.

        Raises:
            ValueError: an offset or a span outside the text.
        """
        marked = np.zeros(len(text) + 1, dtype=np.int64)
        words = [match.span() for match in _WORD.finditer(text) if match[0].casefold() in STOP_WORDS]
        for start, stop in [(span.start, span.stop) for span in spans] + (words if self.function_words else []):
            if stop > len(text):
                raise ValueError(f"span {start}..{stop} leaves the text of {len(text)} characters")
            marked[start] += 1
            marked[stop] -= 1
        counted = np.cumsum(marked[:-1]) > 0
        counted &= ~np.fromiter((letter.isspace() for letter in text), dtype=bool, count=len(text))
        before = np.concatenate([[0], np.cumsum(counted)])
        ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        if ends.size and (ends.min() < 0 or ends.max() > len(text)):
            raise ValueError(f"offsets must lie in [0, {len(text)}], got {ends.min()}..{ends.max()}")
        sensitive = before[ends[:, 1]] > before[ends[:, 0]]
        return np.where(sensitive, 1.0, self.other).astype(np.float32)
