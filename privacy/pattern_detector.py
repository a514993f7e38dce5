"""The detector that needs no model: regular expressions, under its own name ``regex``.

It is none of the four tiers of :mod:`privacy.detectors` and is never called one: it knows how secrets are written, not
what words mean. It flags more than names (every capitalised word that is no function word, so most first words of a
sentence) and less than entities (no name in lower case).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from privacy.detectors import Span, without_overlap
from privacy.stop_words import STOP_WORDS

_MONTH = (
    "(?:January|February|March|April|May|June|July|August|September|October|November|December"
    "|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_CAPITALISED = r"[A-Z][A-Za-z'’]*(?:-[A-Za-z]+)*"

PATTERNS = {
    "email": r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}(?!\w)",
    "phone": r"(?<!\w)(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)|\d{2,4})(?:[ .-]\d{2,4}){2,3}(?!\w)",
    "date": (
        r"(?<!\w)(?:\d{1,4}([-/.])\d{1,2}\1\d{1,4}"
        rf"|{_DAY} (?:of )?{_MONTH}\.?(?:\s?,?\s\d{{4}})?"
        rf"|{_MONTH}\.? (?:{_DAY}(?:\s?,?\s\d{{4}})?|\d{{4}}))(?!\w)"
    ),
    "number": r"\d{4,}",
    "identifier": r"(?<![A-Za-z0-9])(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{5,}(?![A-Za-z0-9])",
    "capitalised": rf"(?<!\w){_CAPITALISED}(?: (?:(?:of|the|de|van|von|and|&) )?{_CAPITALISED})*(?!\w)",
}
"""Names and expressions, the surer ones first: where two start together, the longer span keeps its tag."""


@dataclass(frozen=True)
class PatternDetector:
    """Emails, phone numbers, dates, numbers of four digits or more, identifiers of letters and digits, capitals.

    Attributes:
        patterns: keys of :data:`PATTERNS`; leave some out to see what a detector that misses them is worth.
    """

    patterns: tuple[str, ...] = tuple(PATTERNS)

    def __post_init__(self) -> None:
        unknown = [name for name in self.patterns if name not in PATTERNS]
        if unknown or not self.patterns:
            raise ValueError(f"patterns must be some of {', '.join(PATTERNS)}, got {', '.join(self.patterns)!r}")

    @property
    def name(self) -> str:
        """``"regex"``, with what was left out."""
        left_out = [f"-{name}" for name in PATTERNS if name not in self.patterns]
        return ":".join(["regex", *(",".join(left_out),) * bool(left_out)])

    def spans(self, texts: Sequence[str]) -> list[tuple[Span, ...]]:
        """The spans of each text. Overlapping matches are joined."""
        return [self._spans(text) for text in texts]

    def _spans(self, text: str) -> tuple[Span, ...]:
        found = []
        for name in self.patterns:
            for match in re.finditer(PATTERNS[name], text):
                start = match.start()
                if name == "capitalised":
                    start = _first_name(text, start, match.end())
                if start < match.end():
                    found.append(Span(start, match.end(), name.upper()))
        return without_overlap(found)


def _first_name(text: str, start: int, stop: int) -> int:
    """Where the function words that a capitalised run opens with are over ("The United States", "In March")."""
    for word in re.finditer(r"\S+", text[start:stop]):
        if word[0].casefold() not in STOP_WORDS:
            return start + word.start()
    return stop
