"""Detection of a text's sensitive words (``detectors``), and what is done with them (``treatments``).

Public functions of one text at a time, applied before a record is a record: no guarantee of the ledger leans on them.
"""

from privacy.sensitive_text.detectors import (
    STOP_WORDS,
    TIERS,
    Detector,
    PatternDetector,
    Span,
    Tier,
    Word,
    tier_spans,
    without_overlap,
)
from privacy.sensitive_text.treatments import Mask, TokenWeights, redact_text

__all__ = [
    "STOP_WORDS",
    "TIERS",
    "Detector",
    "Mask",
    "PatternDetector",
    "Span",
    "Tier",
    "TokenWeights",
    "Word",
    "redact_text",
    "tier_spans",
    "without_overlap",
]
