"""Detectors of what a policy calls sensitive: spans of a text, found by an annotator's tiers or by regular expressions.

A detector is a public, fixed function of ONE text: it learns nothing from the data it looks at and does not change
while a run lasts. Only then are token weights made from its spans a per-record function, and only then does
redaction by it have the guarantee of selective DP, which holds against everything but what the detector misses.

The four tiers are those of JFT and ATDP, in terms of spaCy's annotations (OntoNotes entity types, dependency labels,
universal parts of speech). The annotator itself is ``client.data.sensitive``; here is only what each tier makes of it.
References: Shi, Shea, Chen, Zhang, Jia, Yu, "Just Fine-tune Twice: Selective Differential Privacy for Large Language
Models" (EMNLP 2022, arXiv 2204.07667); Yu, Singh, Li, Cao, "ATDP" (2025). Deviation: ATDP says person, organisation,
date and location for the lowest tier; "location" is read as GPE (countries, cities), as JFT's published policy does.

The detector that needs no model, ``regex``, is none of the four tiers and is never called one: it knows how secrets are
written, not what words mean. It flags more than names (every capitalised word that is no function word, so most first
words of a sentence) and less than entities (no name in lower case).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from privacy import checks


@dataclass(frozen=True, order=True)
class Span:
    """Characters ``start`` to ``stop`` (exclusive) of a text, and why they are sensitive, such as ``"PERSON"``."""

    start: int
    stop: int
    tag: str

    def __post_init__(self) -> None:
        checks.integer_at_least(0, start=self.start)
        checks.integer_at_least(self.start + 1, stop=self.stop)
        if not self.tag:
            raise ValueError("tag must not be empty, got ''; say why the span is sensitive")


@dataclass(frozen=True)
class Word:
    """One word as an annotator sees it.

    Attributes:
        start, stop: its characters, stop exclusive.
        entity: type of the named entity it is part of, or "".
        dependency: its syntactic role, such as ``"nsubj"``, or "".
        part_of_speech: its universal part of speech, such as ``"PROPN"``, or "".
    """

    start: int
    stop: int
    entity: str = ""
    dependency: str = ""
    part_of_speech: str = ""


class Detector(Protocol):
    """A public function from one text to its sensitive spans."""

    @property
    def name(self) -> str:
        """The name in reports, with everything that decides its answers (tier, model and its version)."""
        ...

    def spans(self, texts: Sequence[str]) -> list[tuple[Span, ...]]:
        """Find each text's sensitive spans, ordered, without overlap, each text by itself."""
        ...


ENTITIES = frozenset(
    "PERSON NORP FAC ORG GPE LOC PRODUCT EVENT WORK_OF_ART LAW LANGUAGE "
    "DATE TIME PERCENT MONEY QUANTITY ORDINAL CARDINAL".split()
)
"""The 18 types of OntoNotes 5."""


@dataclass(frozen=True)
class Tier:
    """A policy: a word is sensitive if ANY of its annotations is listed.

    Attributes:
        entities: types of named entities.
        roles: parts of dependency labels; ``"subj"`` means nsubj, csubj, nsubjpass.
        parts_of_speech: universal parts of speech.
    """

    entities: frozenset[str]
    roles: tuple[str, ...] = ()
    parts_of_speech: frozenset[str] = frozenset()

    def tag(self, word: Word) -> str | None:
        """The reason for which the word is sensitive; its entity before its part of speech before its role. None if it
        is not.
        """
        if word.entity in self.entities:
            return word.entity
        if word.part_of_speech in self.parts_of_speech:
            return word.part_of_speech
        return next((role.upper() for role in self.roles if role in word.dependency.lower()), None)


_SUBJECTS_OBJECTS = ("subj", "obj")
_NAMES = frozenset({"PROPN", "PRON"})

TIERS = {
    "low-entity": Tier(frozenset({"PERSON", "ORG", "DATE", "GPE"})),
    "high-entity": Tier(ENTITIES),
    "low-contextual": Tier(ENTITIES, _SUBJECTS_OBJECTS, _NAMES),
    "high-contextual": Tier(ENTITIES, (*_SUBJECTS_OBJECTS, "root"), _NAMES | {"VERB"}),
}
"""The four tiers, each containing the one before; they need an annotator (``client.data.sensitive``)."""


def tier_spans(words: Iterable[Word], tier: Tier) -> tuple[Span, ...]:
    """The sensitive words of a text under a tier, one span each. `words` in order, without overlap."""
    found = ((word, tier.tag(word)) for word in words)
    return tuple(Span(word.start, word.stop, tag) for word, tag in found if tag)


def without_overlap(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in order, overlapping ones joined under the tag of the one that starts first (of those, the longest)."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if joined and span.start < joined[-1].stop:
            last = joined.pop()
            span = Span(last.start, max(last.stop, span.stop), last.tag)
        joined.append(span)
    return tuple(joined)


STOP_WORDS = frozenset(
    """
    a an the
    this that these those each every either neither some any all both few many much more most several such no other
    another own same
    i you he she it we they me him her us them my your his its our their mine yours hers ours theirs
    myself yourself himself herself itself ourselves themselves who whom whose which what
    am is are was were be been being have has had having do does did doing will would shall should may might must can
    could
    about above across after against along among around as at before behind below beneath beside between beyond by
    despite down during except for from in inside into like near of off on onto out outside over past per since
    through throughout to toward towards under until up upon via with within without
    and but or nor so yet if because although though while whereas unless than whether when where why how
    not never also too very just only even still then there here now again once ever almost already
    """.split()
)
"""Articles, determiners, pronouns, auxiliaries, prepositions, conjunctions, and the commonest adverbs; lower case.

ATDP keeps the weight of "frequent function tokens" at 1. Counted on the private texts, which words are frequent would
itself be a private statistic; a fixed public list of the closed word classes is not.
"""


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
