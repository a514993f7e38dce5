"""Lower bounds from one run: every canary is in or out by its own fair coin, and the auditor guesses the coins.

The game. m canaries, independent fair coins S_i; the mechanism runs once on the data plus the canaries with S_i = 1;
the auditor gives each canary a score, guesses "in" for the ``guesses_in`` largest and "out" for the ``guesses_out``
smallest (both numbers fixed in advance), and abstains on the rest. r guesses, v of them right.

Bound for any (eps, delta)-DP mechanism (add/remove one canary). Steinke, Nasr and Jagielski, "Privacy auditing with one
(1) training run", arXiv:2305.08846v1, NeurIPS 2023:
    P[V >= v] <= P[B >= v] + 2 m delta max_{1<=i<=v} P[v - i <= B < v] / i,   B ~ Binomial(r, e^eps / (1 + e^eps)).
Bound for a mu-GDP mechanism. Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy in one run",
arXiv:2410.22235v1, ICML 2025. Let p_i be the chance of exactly i right guesses, R_j = sum_{i>=j} (i/m) p_i and
H_j = sum_{i>=j} ((r - i)/m) p_i. For a trade-off function f, with fbar = 1 - f, R_j <= fbar(H_{j-1}). Starting from
P[V >= v] = alpha placed at i = v and walking down to j = 0, the smallest H and R consistent with these inequalities are
found; if R_0 + H_0 = sum_i (r/m) p_i would have to exceed r/m, the outcome had probability below alpha, and f is
refuted. For mu-GDP fbar^-1(x) = Phi(Phi^-1(x) - mu).

What they prove: with probability at least 1 - alpha over the coins and the mechanism the returned number is at most the
true parameter. They need one run, but they cannot be tight: with m in the hundreds expect about 1 at a true epsilon of
4 (table in docs/results/guarantee.md). Publish them as "consistent with", never as a proof of privacy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom

from privacy import checks
from privacy.audit.bounds import finite_scores, gdp_epsilon, open_unit_interval
from privacy.randomness.rng import simulation_generator


def inclusion(canaries: int, seed: int) -> NDArray[np.bool_]:
    """The auditor's coins: [canaries] independent fair bits. The mechanism under audit must not see the seed."""
    checks.integer_at_least(1, canaries=canaries)
    coins: NDArray[np.bool_] = simulation_generator(seed, "one-run inclusion").random(canaries) < 0.5
    return coins


def guess(scores: ArrayLike, guesses_in: int, guesses_out: int) -> NDArray[np.int8]:
    """Guess +1 ("in") for the largest scores, -1 ("out") for the smallest, 0 for the rest; ties by position."""
    values = finite_scores("scores", scores)
    checks.integer_at_least(0, guesses_in=guesses_in, guesses_out=guesses_out)
    if not 1 <= guesses_in + guesses_out <= values.size:
        raise ValueError(
            f"guesses_in + guesses_out must be in [1, {values.size}] (the number of canaries), "
            f"got {guesses_in} + {guesses_out}"
        )
    order = np.argsort(values, kind="stable")
    guesses = np.zeros(values.size, dtype=np.int8)
    guesses[order[values.size - guesses_in :]] = 1
    guesses[order[:guesses_out]] = -1
    return guesses


def one_run_p_value(correct: int, guesses: int, canaries: int, *, epsilon: float, delta: float) -> float:
    """Upper limit of the chance of at least ``correct`` right guesses if the mechanism is (epsilon, delta)-DP."""
    _check_counts(correct, guesses, canaries)
    checks.non_negative(epsilon=epsilon)
    checks.fraction(delta=delta)
    success = float(expit(epsilon))
    tail = float(binom.sf(correct - 1, guesses, success))
    if delta == 0 or correct == 0:
        return min(tail, 1.0)
    i = np.arange(1, correct + 1)
    widest = float(np.max((binom.sf(correct - i - 1, guesses, success) - tail) / i))
    return min(tail + 2 * canaries * delta * max(widest, 0.0), 1.0)


def epsilon_lower_one_run(
    correct: int, guesses: int, canaries: int, *, delta: float, alpha: float, steps: int = 1
) -> float:
    """Largest epsilon up to which (epsilon, delta)-DP is refuted at level alpha; 0 if none is.

    All guesses right out of r, delta = 0: ln(alpha^(1/r) / (1 - alpha^(1/r))), the ceiling of the method.

    Args:
        steps: of neighbours that one coin moves: k of them are (k epsilon, delta sum_{j<k} e^(j epsilon))-DP.
    """
    _check_counts(correct, guesses, canaries)
    checks.integer_at_least(1, steps=steps)
    open_unit_interval(alpha=alpha)

    def excess(epsilon: float) -> float:
        together = delta * float(np.exp(epsilon * np.arange(steps)).sum())
        if together >= 1:
            return 1 - alpha
        return one_run_p_value(correct, guesses, canaries, epsilon=steps * epsilon, delta=together) - alpha

    # With delta > 0 the p-value need not be monotone, so walk up to the first epsilon that is not refuted.
    step, refuted = 0.05, 0.0
    if excess(0.0) > 0:
        return 0.0
    while excess(refuted + step) <= 0:
        refuted += step
        if refuted > 700:  # e^eps overflows soon after; only reachable with alpha or the counts near machine limits
            return refuted
    return float(brentq(excess, refuted, refuted + step, xtol=1e-9))


def gdp_refuted(correct: int, guesses: int, canaries: int, *, mu: float, alpha: float) -> bool:
    """Whether at least ``correct`` right guesses has probability below alpha under every mu-GDP mechanism."""
    _check_counts(correct, guesses, canaries)
    checks.non_negative(mu=mu)
    open_unit_interval(alpha=alpha)
    right = alpha * correct / canaries
    wrong = alpha * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        needed = max(wrong, float(ndtr(ndtri(min(right, 1.0)) - mu)))
        if needed == wrong:
            break  # neither number can change any more
        right, wrong = right + i / (guesses - i) * (needed - wrong), needed
    return right + wrong > guesses / canaries


def mu_lower_one_run(correct: int, guesses: int, canaries: int, *, alpha: float) -> float:
    """Largest mu refuted at level alpha, to 1e-6; 0 if none is."""
    if not gdp_refuted(correct, guesses, canaries, mu=0.0, alpha=alpha):
        return 0.0
    low, high = 0.0, 1.0
    while gdp_refuted(correct, guesses, canaries, mu=high, alpha=alpha):
        low, high = high, 2 * high
        if high > 1e3:
            return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if gdp_refuted(correct, guesses, canaries, mu=middle, alpha=alpha) else (low, middle)
    return low


@dataclass(frozen=True)
class OneRunAudit:
    """Outcome of the game. ``epsilon_lower`` holds for any mechanism, the other two for a Gaussian trade-off curve."""

    canaries: int
    guesses: int
    correct: int
    delta: float
    alpha: float
    epsilon_lower: float
    mu_lower: float
    epsilon_lower_gdp: float


def audit_one_run(
    scores: ArrayLike, included: ArrayLike, *, guesses_in: int, guesses_out: int, delta: float, alpha: float = 0.05
) -> OneRunAudit:
    """Play the guessing game with these scores against the coins and bound the privacy parameters.

    scores: [canaries], larger meaning "in". included: [canaries] bool, from ``inclusion``.
    guesses_in, guesses_out: fixed before the scores are seen; a quarter of the canaries each is a fair default.
    """
    coins = np.asarray(included, dtype=bool)
    marks = guess(scores, guesses_in, guesses_out)
    if coins.shape != marks.shape:
        raise ValueError(f"included must have one entry per score {marks.shape}, got shape {coins.shape}")
    correct = int(((marks == 1) & coins).sum() + ((marks == -1) & ~coins).sum())
    made, canaries = guesses_in + guesses_out, marks.size
    mu = mu_lower_one_run(correct, made, canaries, alpha=alpha)
    return OneRunAudit(
        canaries=canaries,
        guesses=made,
        correct=correct,
        delta=delta,
        alpha=alpha,
        epsilon_lower=epsilon_lower_one_run(correct, made, canaries, delta=delta, alpha=alpha),
        mu_lower=mu,
        epsilon_lower_gdp=gdp_epsilon(mu, delta),
    )


def _check_counts(correct: int, guesses: int, canaries: int) -> None:
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise ValueError(
            f"need 0 <= correct <= guesses <= canaries and guesses >= 1, got {correct}, {guesses}, {canaries}"
        )
