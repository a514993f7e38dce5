"""Shares per class against scikit-learn's definitions, by hand."""

import pytest

from client.models.confusion import f1_scores, macro_f1, precisions, recalls

CONFUSION = [[8, 2, 0, 0], [1, 3, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0]]  # the last class does not occur


def test_shares_of_every_class() -> None:
    assert recalls(CONFUSION) == [0.8, 0.75, 0.0, None]
    assert precisions(CONFUSION) == [8 / 9, 0.3, None, None]
    assert f1_scores(CONFUSION) == [16 / 19, 6 / 14, 0.0, None]


def test_macro_f1_is_the_mean_over_classes_that_occur() -> None:
    assert macro_f1(CONFUSION) == pytest.approx((16 / 19 + 6 / 14) / 3)
    with pytest.raises(ValueError, match="counts none"):
        macro_f1([[0, 0], [0, 0]])


def test_it_is_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    pairs = [(i, j) for i, row in enumerate(CONFUSION) for j, count in enumerate(row) for _ in range(count)]
    truth, answers = zip(*pairs, strict=True)
    assert macro_f1(CONFUSION) == pytest.approx(metrics.f1_score(truth, answers, average="macro"))
