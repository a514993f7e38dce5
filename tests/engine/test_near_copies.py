"""Near-copies: planted copies are counted, common language is not taken for memory, against a slow comparison."""

import numpy as np
import pytest

from simulations.audit.near_copies import WORDS, compare_texts


def sentences(count: int, seed: int, words: int = 50) -> list[str]:
    draws = np.random.default_rng(seed)
    return [" ".join(f"w{number}" for number in draws.integers(words, size=20)) for _ in range(count)]


def slowly(texts: list[str], among: list[str]) -> int:
    """Texts that share a run of words, by strings."""
    theirs = {tuple(words[i : i + WORDS]) for words in map(str.split, among) for i in range(len(words) - WORDS + 1)}
    return sum(any(tuple(words[i : i + WORDS]) in theirs for i in range(13)) for words in map(str.split, texts))


def test_planted_copies_are_found_and_common_words_are_not() -> None:
    private, unseen, texts = sentences(200, 1), sentences(200, 2), sentences(100, 3)
    texts[:10] = private[:10]
    texts[10] = f"Before: {private[20].upper()} and behind"
    found = compare_texts(texts, private, unseen)
    assert (found.private, found.unseen) == (11, 0)
    assert (found.copies, found.unseen_copies) == (10, 0)
    assert found.longest == 20
    assert found.difference == pytest.approx(0.11)
    assert found.difference > found.within
    assert "more than chance" in found.sentence


@pytest.mark.parametrize("words", [2, 3, 50])
def test_counts_are_those_of_a_slow_comparison(words: int) -> None:
    private, unseen, texts = (sentences(60, seed, words) for seed in (1, 2, 3))
    found = compare_texts(texts, private, unseen)
    assert found.private == slowly(texts, private)
    assert found.unseen == slowly(texts, unseen)


def test_language_of_everybody_is_no_memory() -> None:
    common = ["the patient was seen in the clinic on a monday and went home"] * 50
    found = compare_texts(common, common, common)
    assert found.private == found.unseen == 50
    assert found.difference == 0
    assert "no more than chance" in found.sentence
