"""What a run does about sensitive spans: nothing, token weights, or redaction; on texts, before they are tokens.

Both are functions of one record and a public detector. Redaction changes the texts of the training records, canaries
included; weights leave the texts alone and go with the tokens (:attr:`client.records.Records.token_weights`).
Validation and test texts are never touched, so that perplexities compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.annotators import check_detector, make_detector
from client.sources import Texts
from privacy import checks
from privacy.redaction import Mask, redacted
from privacy.token_weights import TokenWeights

USES = ("none", "weights", "redaction")


@dataclass(frozen=True)
class Sensitive:
    """The policy of a run.

    Attributes:
        use: ``"none"``, ``"weights"`` (ATDP) or ``"redaction"`` (the first phase of JFT).
        detector: see :func:`client.annotators.make_detector`; its name is checked also where it is not used.
        mask: what a redacted span reads, see :class:`privacy.redaction.Mask`.
        other_weight: weight of tokens that are neither sensitive nor function words.
    """

    use: str = "none"
    detector: str = "regex"
    mask: str = "<MASK>"
    other_weight: float = 0.2

    def __post_init__(self) -> None:
        checks.one_of(USES, data_sensitive=self.use)
        check_detector(self.detector)
        Mask(self.mask)
        TokenWeights(self.other_weight)


def redact(texts: Texts, policy: Sensitive) -> Texts:
    """`texts` with the sensitive spans of every record masked."""
    if policy.use != "redaction":
        return texts
    return replace(texts, texts=redacted_texts(texts.texts, policy))


def redacted_texts(texts: Sequence[str], policy: Sensitive) -> list[str]:
    """Each text by itself, masked."""
    found = make_detector(policy.detector).spans(texts)
    mask = Mask(policy.mask)
    return [redacted(text, spans, mask) for text, spans in zip(texts, found, strict=True)]


def token_weights(texts: Sequence[str], rows: Sequence[Any], policy: Sensitive) -> list[NDArray[np.float32]]:
    """The weight of every token of every record.

    Args:
        rows: per text, the characters ``(start, stop)`` of every token (a fast tokenizer's ``offset_mapping``).
    """
    found = make_detector(policy.detector).spans(texts)
    rule = TokenWeights(policy.other_weight)
    return [rule.of(text, offsets, spans) for text, offsets, spans in zip(texts, rows, found, strict=True)]
