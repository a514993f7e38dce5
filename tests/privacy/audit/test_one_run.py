"""One-run bounds: against an independent library, closed forms, and coverage against mechanisms of known privacy."""

import math

import numpy as np
import pytest
from scipy import stats

from privacy.audit import one_run
from privacy.audit.bounds import gdp_epsilon, gdp_mu

# (canaries, guesses, correct, delta, alpha, epsilon by _epsilon_one_run, epsilon by _epsilon_one_run_fdp), computed
# once with jax-privacy 2.0.0 (jax_privacy.auditing; eps_lo = 0), which is no dependency of this project. The last
# column is at delta 1e-5 where the row's delta is 0.
ORACLE = [
    (300, 60, 50, 1e-5, 0.05, 1.011925801987755, 1.673682536889072),
    (1000, 500, 330, 1e-5, 0.05, 0.5039753382725872, 0.8860250168734625),
    (1000, 100, 100, 0.0, 0.05, 3.492965346169885, 5.5490279999429415),
    (5000, 1000, 800, 1e-3, 0.01, 0.0, 1.0409957669181598),
    (200, 200, 120, 1e-5, 0.05, 0.1588325592234226, 0.33246487529458524),
]


@pytest.mark.parametrize(("canaries", "guesses", "correct", "delta", "alpha", "steinke", "gaussian"), ORACLE)
def test_agrees_with_jax_privacy(
    canaries: int, guesses: int, correct: int, delta: float, alpha: float, steinke: float, gaussian: float
) -> None:
    bound = one_run.epsilon_lower_one_run(correct, guesses, canaries, delta=delta, alpha=alpha)
    assert bound == pytest.approx(steinke, abs=1e-5)
    mu = one_run.mu_lower_one_run(correct, guesses, canaries, alpha=alpha)
    assert gdp_epsilon(mu, delta or 1e-5) == pytest.approx(gaussian, abs=2e-5)


def test_p_value_agrees_with_jax_privacy() -> None:
    assert one_run.one_run_p_value(330, 500, 1000, epsilon=0.3, delta=1e-5) == pytest.approx(
        0.000374344054615338, rel=1e-9
    )


def test_pure_dp_is_the_binomial_tail_and_all_right_is_the_ceiling() -> None:
    expected = stats.binom.sf(59, 100, 1 / (1 + math.exp(-0.2)))
    assert one_run.one_run_p_value(60, 100, 100, epsilon=0.2, delta=0.0) == pytest.approx(expected)
    per_guess = 0.05 ** (1 / 40)
    ceiling = math.log(per_guess / (1 - per_guess))
    assert one_run.epsilon_lower_one_run(40, 40, 40, delta=0.0, alpha=0.05) == pytest.approx(ceiling, abs=1e-8)


def test_chance_level_guesses_prove_nothing() -> None:
    assert one_run.epsilon_lower_one_run(250, 500, 1000, delta=1e-5, alpha=0.05) == 0
    assert one_run.mu_lower_one_run(250, 500, 1000, alpha=0.05) == 0
    assert one_run.mu_lower_one_run(0, 1, 1, alpha=0.05) == 0


def gaussian_audit(mu: float, canaries: int, share: float, *stream: int, alpha: float = 0.1) -> one_run.OneRunAudit:
    """Every canary is released with its own unit noise: a mu-GDP mechanism whose canaries do not interfere."""
    coins = one_run.inclusion(canaries, 1_000 * stream[0] + stream[-1])
    scores = np.random.default_rng([3, *stream]).standard_normal(canaries) + mu * coins
    k = int(share * canaries)
    return one_run.audit_one_run(scores, coins, guesses_in=k, guesses_out=k, delta=1e-5, alpha=alpha)


@pytest.mark.run
@pytest.mark.parametrize("mu", [0.0, 0.5, 1.7])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_coverage_on_a_gaussian_mechanism(mu: float, share: float) -> None:
    experiments, alpha = 100, 0.1
    audits = [gaussian_audit(mu, 100, share, run, alpha=alpha) for run in range(experiments)]
    limit = stats.binom.isf(1e-3, experiments, alpha) / experiments
    assert np.mean([audit.mu_lower > mu for audit in audits]) <= limit
    assert np.mean([audit.epsilon_lower > gdp_epsilon(mu, 1e-5) for audit in audits]) <= limit


@pytest.mark.run
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_coverage_is_tight_on_randomised_response(epsilon: float) -> None:
    """The worst mechanism for the bound of Steinke et al.: each coin is released, flipped with chance 1/(1 + e^eps)."""
    experiments, alpha, wrong = 400, 0.1, []
    for run in range(experiments):
        correct = int(np.random.default_rng([5, run]).binomial(200, 1 / (1 + math.exp(-epsilon))))
        wrong.append(one_run.one_run_p_value(correct, 200, 200, epsilon=epsilon, delta=0.0) <= alpha)
    assert 0.04 <= np.mean(wrong) <= stats.binom.isf(1e-3, experiments, alpha) / experiments


def test_the_gaussian_form_is_tighter_on_a_gaussian_mechanism_and_grows_with_leakage() -> None:
    medians = {}
    for epsilon in (2, 8):
        audits = [gaussian_audit(gdp_mu(epsilon, 1e-5), 1000, 0.1, 9, run, alpha=0.05) for run in range(7)]
        medians[epsilon] = (
            np.median([audit.epsilon_lower for audit in audits]),
            np.median([audit.epsilon_lower_gdp for audit in audits]),
        )
        assert medians[epsilon][0] < medians[epsilon][1] < epsilon
    # The project's table has .29 (.37) and 2.32 (3.28) at m = 1000 with one-sided guesses; two-sided ones do better.
    assert medians[2][0] > 0.29
    assert medians[8][1] > 3.28


def test_guess_takes_the_extremes_and_abstains_on_the_rest() -> None:
    assert one_run.guess([0.1, 5.0, -2.0, 0.0], 1, 1).tolist() == [0, 1, -1, 0]
    assert one_run.guess([0.1, 5.0, -2.0, 0.0], 2, 0).tolist() == [1, 1, 0, 0]
    assert one_run.guess([1.0, 2.0], 1, 1).tolist() == [-1, 1]


def test_inclusion_is_fair_and_reproducible() -> None:
    coins = one_run.inclusion(10_000, 1)
    assert abs(coins.mean() - 0.5) < 0.02
    assert np.array_equal(coins, one_run.inclusion(10_000, 1))
    assert not np.array_equal(coins, one_run.inclusion(10_000, 2))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="0 <= correct <= guesses <= canaries"):
        one_run.epsilon_lower_one_run(11, 10, 20, delta=0.0, alpha=0.05)
    with pytest.raises(ValueError, match="guesses_in"):
        one_run.guess([1.0, 2.0], 2, 1)
    with pytest.raises(ValueError, match=r"included .*score"):
        one_run.audit_one_run([1.0, 2.0], [True], guesses_in=1, guesses_out=0, delta=1e-5)
    with pytest.raises(ValueError, match="scores must be"):
        one_run.guess([math.nan, 1.0], 1, 0)
