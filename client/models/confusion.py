"""Readings of a confusion matrix by class: plain counts in, shares out.

A matrix holds how many records of the class of its row were taken for the class of its column. Shares are those of
scikit-learn: macro-F1 is the mean of F1 over the classes that occur among the labels or among the answers.
"""

from collections.abc import Sequence

Confusion = Sequence[Sequence[int]]


def recalls(confusion: Confusion) -> list[float | None]:
    """The share of each class's records that were recognised. None for a class without records."""
    return [row[number] / sum(row) if sum(row) else None for number, row in enumerate(confusion)]


def precisions(confusion: Confusion) -> list[float | None]:
    """The share of the answers naming each class that were right. None for a class that no answer names."""
    answered = [sum(column) for column in zip(*confusion, strict=True)]
    return [row[number] / answered[number] if answered[number] else None for number, row in enumerate(confusion)]


def f1_scores(confusion: Confusion) -> list[float | None]:
    """Harmonic mean of precision and recall of every class; None for a class that does not occur at all."""
    answered = [sum(column) for column in zip(*confusion, strict=True)]
    both = [sum(row) + answered[number] for number, row in enumerate(confusion)]
    return [2 * row[number] / both[number] if both[number] else None for number, row in enumerate(confusion)]


def macro_f1(confusion: Confusion) -> float:
    """Mean of F1 over the classes that occur.

    Raises:
        ValueError: the matrix counts no record.
    """
    scores = [score for score in f1_scores(confusion) if score is not None]
    if not scores:
        raise ValueError("macro-F1 needs at least one record, the confusion matrix counts none")
    return sum(scores) / len(scores)
