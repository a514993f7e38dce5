"""AUC and TPR at a small FPR: against scipy, closed forms and coverage by simulation."""

import numpy as np
import pytest
from scipy import stats

from privacy.audit import roc


def draw(mu: float, n: int, m: int, *stream: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([31, *stream])
    return rng.normal(mu, 1, n), rng.normal(0, 1, m)


def test_auc_is_the_mann_whitney_statistic_ties_included() -> None:
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 5, 70), rng.integers(1, 7, 110)
    expected = stats.mannwhitneyu(inside, outside).statistic / (70 * 110)
    assert roc.auc(inside, outside).estimate == pytest.approx(expected, abs=1e-12)


def test_auc_interval_covers() -> None:
    truth, missed = stats.norm.cdf(1 / np.sqrt(2)), 0
    for run in range(300):
        interval = roc.auc(*draw(1.0, 60, 90, run), alpha=0.1)
        missed += not interval.lower <= truth <= interval.upper
    assert 0.04 <= missed / 300 <= 0.16


def test_perfect_separation_has_an_exact_interval() -> None:
    interval = roc.auc(np.arange(30) + 100.0, np.arange(50), alpha=0.05)
    assert (interval.estimate, interval.upper) == (1.0, 1.0)
    assert interval.lower == pytest.approx(0.025 ** (1 / 30))
    assert roc.auc([1.0], [2.0]).estimate == 0


def test_tpr_at_fpr_estimate_and_coverage() -> None:
    fpr, truth, missed = 0.05, stats.norm.sf(stats.norm.isf(0.05) - 1.5), 0
    for run in range(200):
        interval = roc.tpr_at_fpr(*draw(1.5, 150, 300, run), fpr=fpr, alpha=0.1)
        assert interval.lower <= interval.estimate <= interval.upper
        missed += not interval.lower <= truth <= interval.upper
    assert missed / 200 <= 0.16
    assert roc.tpr_at_fpr(*draw(1.5, 20_000, 20_000, 1), fpr=fpr).estimate == pytest.approx(truth, abs=0.02)


def test_agrees_with_jax_privacy() -> None:
    """0.2 at FPR 1% and 0.4775 at 10%: jax-privacy 2.0.0, CanaryScoreAuditor.tpr_at_given_fpr, computed once."""
    inside = 1.3 * stats.norm.ppf((np.arange(400) + 0.5) / 400) + 1.2
    outside = stats.norm.ppf((np.arange(500) + 0.5) / 500)
    assert roc.tpr_at_fpr(inside, outside, fpr=0.01).estimate == pytest.approx(0.2)
    assert roc.tpr_at_fpr(inside, outside, fpr=0.1).estimate == pytest.approx(0.4775)


def test_too_few_non_members_say_nothing_from_below() -> None:
    assert roc.tpr_at_fpr([5.0] * 10, [0.0, 0.1, 0.2], fpr=0.01).lower == 0


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="fpr must be strictly between"):
        roc.tpr_at_fpr([1.0], [0.0], fpr=0.0)
    with pytest.raises(ValueError, match="scores_out"):
        roc.auc([1.0], [])
