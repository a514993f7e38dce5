"""Sensitive spans out of a text: each replaced by a mask, consecutive equal masks merged into one.

What is left is the public part of a record under selective DP: neighbours have equal redacted texts by definition.
What the detector missed stays readable and has no protection at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from privacy.detectors import Span


@dataclass(frozen=True)
class Mask:
    """How a removed span reads.

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


TYPED = Mask("<{tag}>")


def redacted(text: str, spans: Sequence[Span], mask: Mask | None = None) -> str:
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
