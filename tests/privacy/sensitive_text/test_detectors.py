"""Tiers on annotations, the regex detector, redaction, and token weights as functions of one record."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.sensitive_text.detectors import (
    ENTITIES,
    PATTERNS,
    STOP_WORDS,
    TIERS,
    PatternDetector,
    Span,
    Word,
    tier_spans,
    without_overlap,
)
from privacy.sensitive_text.treatments import Mask, TokenWeights, redact_text

WORDS = [  # "Ann met him in Rome at noon"
    Word(0, 3, "PERSON", "nsubj", "PROPN"),
    Word(4, 7, "", "ROOT", "VERB"),
    Word(8, 11, "", "dobj", "PRON"),
    Word(12, 14, "", "prep", "ADP"),
    Word(15, 19, "GPE", "pobj", "PROPN"),
    Word(20, 22, "", "prep", "ADP"),
    Word(23, 27, "TIME", "pobj", "NOUN"),
]


@pytest.mark.parametrize(
    ("tier", "tags"),
    [
        ("low-entity", ["PERSON", "GPE"]),
        ("high-entity", ["PERSON", "GPE", "TIME"]),
        ("low-contextual", ["PERSON", "PRON", "GPE", "TIME"]),
        ("high-contextual", ["PERSON", "VERB", "PRON", "GPE", "TIME"]),
    ],
)
def test_each_tier_flags_what_the_policy_lists(tier: str, tags: list[str]) -> None:
    assert [span.tag for span in tier_spans(WORDS, TIERS[tier])] == tags


def test_roles_count_where_nothing_else_does_and_tiers_contain_each_other() -> None:
    subject = [Word(0, 5, "", "csubjpass", "NOUN"), Word(6, 9, "", "ROOT", "NOUN")]
    assert tier_spans(subject, TIERS["high-entity"]) == ()
    assert tier_spans(subject, TIERS["low-contextual"]) == (Span(0, 5, "SUBJ"),)
    assert [span.tag for span in tier_spans(subject, TIERS["high-contextual"])] == ["SUBJ", "ROOT"]
    order = list(TIERS.values())
    for lower, higher in pairwise(order):
        assert lower.entities <= higher.entities
        assert set(lower.roles) <= set(higher.roles)
        assert lower.parts_of_speech <= higher.parts_of_speech
    assert len(ENTITIES) == 18


TEXTS = {
    "write to a.b-c@mail.example.org today": ["a.b-c@mail.example.org"],
    "call +44 20 7946 0958 or (020) 794 6095": ["+44 20 7946 0958", "(020) 794 6095"],
    "on 3rd of June 1999 , on 2020-01-31 , in march": ["3rd of June 1999", "2020-01-31"],
    "born May 4 , 1980 and in May he may": ["May 4 , 1980"],  # a function word too: missed, whatever it means
    "room 101 has 2048 beds": ["2048"],
    "my ID is 341752.": ["ID", "341752"],
    "narrative secret_id=7Q0ZK2M4PA": ["7Q0ZK2M4PA"],
    "as the United States of America said. In Rome it is so": ["United States of America", "Rome"],
    "The end": [],
    "Zu Österreich gehört": ["Zu"],
}


@pytest.mark.parametrize("text", TEXTS)
def test_patterns_find_what_they_are_for(text: str) -> None:
    (spans,) = PatternDetector().spans([text])
    assert [text[span.start : span.stop] for span in spans] == TEXTS[text]


def test_a_pattern_left_out_is_missed_and_named() -> None:
    kept = tuple(name for name in PATTERNS if name not in ("number", "identifier"))
    detector = PatternDetector(kept)
    assert detector.spans(["my id is 341752 secret_id=7Q0ZK2M4PA"]) == [()]
    assert detector.name == "regex:-number,-identifier"
    assert PatternDetector().name == "regex"
    assert not any(PatternDetector().name.startswith(tier) for tier in TIERS)
    with pytest.raises(ValueError, match="patterns must be some of email"):
        PatternDetector(("names",))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.text(alphabet=" aZé9-./@'(\n=_", max_size=40), st.text(max_size=20))
def test_spans_are_ordered_within_the_text_and_of_one_record_alone(text: str, other: str) -> None:
    alone, beside = PatternDetector().spans([text]), PatternDetector().spans([other, text, other])
    assert beside[1] == alone[0]
    ends = [0, *(end for span in alone[0] for end in (span.start, span.stop)), len(text)]
    assert ends == sorted(ends)
    redact_text(text, alone[0])


@pytest.mark.parametrize("piece", ["1 ", "a.", "Aa ", "A-", "1a"])
def test_long_texts_are_read_to_their_end(piece: str) -> None:
    """Forty thousand characters; a pattern that backtracks over them would not come back."""
    text = piece * 20000
    [spans] = PatternDetector().spans([text])
    [behind] = PatternDetector().spans([text + " 2001-02-03"])
    assert behind[-1].stop == len(text) + len(" 2001-02-03")
    assert all(span.stop <= len(text) for span in spans)


def test_masks_are_merged_over_blanks_and_may_name_the_kind() -> None:
    text = "Ann Smith , of Rome 1999 x"
    spans = [Span(0, 3, "PERSON"), Span(4, 9, "PERSON"), Span(15, 19, "GPE"), Span(20, 24, "DATE")]
    assert redact_text(text, spans) == "<MASK> , of <MASK> x"
    assert redact_text(text, spans, Mask("<{tag}>")) == "<PERSON> , of <GPE> <DATE> x"
    assert redact_text(text, spans, Mask("_")) == "_ , of _ x"
    assert redact_text(text, []) == text
    for wrong in ([Span(4, 9, "A"), Span(0, 3, "A")], [Span(20, 99, "A")]):
        with pytest.raises(ValueError, match="ordered within the text of 26"):
            redact_text(text, wrong)
    with pytest.raises(ValueError, match="mask must have text"):
        Mask(" ")


def test_overlaps_are_joined_under_the_first_tag() -> None:
    spans = [Span(5, 9, "B"), Span(0, 6, "A"), Span(0, 3, "C"), Span(9, 11, "D")]
    assert without_overlap(spans) == (Span(0, 9, "A"), Span(9, 11, "D"))


TEXT = "The nurse saw Ann in Rome"
OFFSETS = [(0, 0), (0, 3), (3, 9), (9, 13), (13, 15), (15, 17), (17, 20), (20, 25), (0, 0)]


def test_weights_are_one_on_spans_and_function_words_and_a_constant_elsewhere() -> None:
    spans = [Span(14, 17, "PERSON"), Span(21, 25, "GPE")]
    weights = TokenWeights(0.25).of(TEXT, OFFSETS, spans)
    assert weights.dtype == np.float32
    # <s> The | nurse| saw| A|nn| in| Rome </s>; both pieces of a name count
    assert weights.tolist() == [0.25, 1, 0.25, 0.25, 1, 1, 1, 1, 0.25]
    assert TokenWeights(0.25, function_words=False).of(TEXT, OFFSETS, spans).tolist()[1] == 0.25
    assert TokenWeights(1.0).of(TEXT, OFFSETS, []).tolist() == [1.0] * 9


def test_the_blank_in_front_of_a_token_makes_it_neither_sensitive_nor_not() -> None:
    # a span over "Ann " with its blank must not reach the next token, which begins with that blank
    weights = TokenWeights(0.25, function_words=False).of("Ann ran", [(0, 3), (3, 7)], [Span(0, 4, "PERSON")])
    assert weights.tolist() == [1, 0.25]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.text(alphabet="abT 9@.", min_size=1, max_size=15), min_size=2, max_size=4), st.data())
def test_a_neighbour_changes_no_other_records_weights(texts: list[str], data: st.DataObject) -> None:
    """Add, remove or replace one record: the weights of all others stay as they are, to the last bit."""
    rule, detector = TokenWeights(0.2), PatternDetector()

    def all_weights(dataset: list[str]) -> list[list[float]]:
        found = detector.spans(dataset)
        return [
            rule.of(text, [(i, i + 1) for i in range(len(text))], spans).tolist()
            for text, spans in zip(dataset, found, strict=True)
        ]

    changed = data.draw(st.integers(0, len(texts) - 1))
    whole = all_weights(texts)
    others = whole[:changed] + whole[changed + 1 :]
    assert all_weights(texts[:changed] + texts[changed + 1 :]) == others
    replaced = all_weights([*texts[:changed], "My ID is 341752.", *texts[changed + 1 :]])
    assert replaced[:changed] + replaced[changed + 1 :] == others


def test_impossible_weights_are_refused() -> None:
    for other in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="other_weight must be in"):
            TokenWeights(other)
    with pytest.raises(ValueError, match="leaves the text of 25 characters"):
        TokenWeights().of(TEXT, OFFSETS, [Span(20, 30, "X")])
    with pytest.raises(ValueError, match=r"offsets must lie in \[0, 25\]"):
        TokenWeights().of(TEXT, [(20, 26)], [])


def test_function_words_are_public_and_plain() -> None:
    assert STOP_WORDS > {"the", "of", "he", "was", "and"}
    assert not STOP_WORDS & {"patient", "hospital", "diabetes", "secret"}
    assert json.dumps(sorted(STOP_WORDS)).islower()
