"""The second test set of SST-2: no phrase of a test sentence is left for training."""

import pytest

from simulations.benchmarks.papers.sst2_sentences import split, whole_sentences

WHOLE = "a quite long sentence that holds some other phrases inside it"
OTHER = "the second of them shares some other phrases with the first one"
TEXTS = [WHOLE, "some other phrases", OTHER, "holds some other phrases inside it and more", "that holds some", WHOLE]
PART = "long sentence that holds some other phrases inside"


def test_a_whole_sentence_is_no_part_of_a_longer_text() -> None:
    assert whole_sentences([*TEXTS, PART]) == [0, 2, 3], "the part of eight words is none, the second copy neither"


def test_no_part_of_a_test_sentence_is_trained_on() -> None:
    for seed in range(6):
        test, left = split([*TEXTS, PART], count=1, seed=seed)
        (row,) = test
        sentence = [*TEXTS, PART][row]
        assert not any(f" {[*TEXTS, PART][each]} " in f" {sentence} " for each in left), "not even itself, twice"
        assert left, "what has only words in common stays"
    test, left = split([*TEXTS, PART], count=3, seed=0)
    assert (test, left) == ([0, 2, 3], [])


def test_too_few_sentences_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 whole sentences, 4 were asked for"):
        split([*TEXTS, PART], count=4)
