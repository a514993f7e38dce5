"""What a policy calls sensitive: spans of a text, and the tiers that decide by a word's annotations.

A detector is a public, fixed function of ONE text: it learns nothing from the data it looks at and does not change
while a run goes on. Only then are token weights made from its spans a per-record function, and only then does
redaction by it have the guarantee of selective DP, which holds against everything but what the detector misses.

The four tiers are those of JFT and ATDP, in terms of spaCy's annotations (OntoNotes entity types, dependency labels,
universal parts of speech). The annotator itself is :mod:`client.annotators`; here is only what each tier makes of it.

References: Shi, Shea, Chen, Zhang, Jia, Yu, "Just Fine-tune Twice: Selective Differential Privacy for Large Language
Models" (EMNLP 2022, arXiv 2204.07667); Yu, Singh, Li, Cao, "ATDP" (2025). Deviation: ATDP says person, organisation,
date and location for the lowest tier; "location" is read as GPE (countries, cities), as JFT's published policy does.
"""

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
        """What reports call it, with everything that decides its answers (tier, model and its version)."""
        ...

    def spans(self, texts: Sequence[str]) -> list[tuple[Span, ...]]:
        """For each text by itself: its sensitive spans, ordered, without overlap."""
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
        """Why the word is sensitive; its entity before its part of speech before its role. None if it is not."""
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
"""The four tiers, each containing the one before; they need an annotator (:mod:`client.annotators`)."""


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
