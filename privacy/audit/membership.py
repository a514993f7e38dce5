"""Membership inference against a model that is there already, and the bound on epsilon that follows from it.

Some units were trained on (members), others of the same distribution were held out. An attack gives every unit a
score, larger meaning "member". Three things are made of the scores of one attack:

- AUC and TPR at a small FPR with intervals (``privacy/audit/roc.py``): statistics of the attack, no bound on epsilon.
- Exchangeability. A model that never saw the members must not tell them from the others, or members and others differ
  in themselves and every number of an attack is about that. Its scores must have an AUC whose interval holds 1/2, and
  pass the two-sample test of Kolmogorov and Smirnov, which also sees that one side is more spread out than the other.
- A lower bound on epsilon. Slots of one member and one held-out unit each; a fair coin says which of the two the
  attacker is shown, and it guesses the coins. Whether the unit shown was trained on is then an independent fair coin,
  which is the game of Steinke, Nasr and Jagielski (arXiv:2305.08846v1, NeurIPS 2023; ``privacy/audit/one_run.py``),
  with one difference: as many units are trained on whatever the coin says, so a coin exchanges one unit for another,
  two steps of adding or removing. The bound is therefore that for groups of two, stated for one unit added or removed.
  Score and number of guesses are chosen on the first half of the slots; the bound is taken on the second half.

What the bound proves: if units are exchangeable and the training is (eps, delta)-DP for one unit added or removed, then
P[bound <= eps] >= 1 - alpha. It is far from tight; ``ceiling`` says what it would be if every guess were right.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import ks_2samp

from privacy import checks
from privacy.audit.bounds import finite_scores, open_unit_interval
from privacy.audit.one_run import epsilon_lower_one_run, guess, one_run_p_value
from privacy.audit.roc import Interval, auc, tpr_at_fpr
from privacy.randomness.rng import simulation_generator

Floats = NDArray[np.float64]
Sides = tuple[ArrayLike, ArrayLike]
"""Scores of members, and of units that were held out."""

FALSE_POSITIVE_RATES = (0.01, 0.001)

SHARES = ((0.5, 0.5), (0.25, 0.25), (0.1, 0.1), (0.25, 0.0), (0.1, 0.0))
"""Shares of the slots that are guessed "member" and "held out"; fixed, so that choosing among them is no peeking."""

LEAST_SLOTS = 20
"""With fewer the bound could not reach 1 if every guess were right."""

_POINTS = 200


@dataclass(frozen=True)
class Attack:
    """The success of one score in telling members from others.

    Attributes:
        tpr: by false positive rate.
        curve: false and true positive rate of the thresholds, from the strictest to the loosest.
    """

    auc: Interval
    tpr: dict[float, Interval]
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Exchangeability:
    """Whether a model that saw none of them takes members and others for alike.

    Attributes:
        auc: of its scores, with an interval at level 1 - alpha.
        p_value: of the two-sample Kolmogorov-Smirnov test.
    """

    auc: Interval
    p_value: float
    alpha: float

    @property
    def holds(self) -> bool:
        """Whether neither test sees a difference."""
        return self.auc.lower <= 0.5 <= self.auc.upper and self.p_value >= self.alpha


@dataclass(frozen=True)
class MembershipBound:
    """The outcome of the game on the second half of the slots.

    Attributes:
        score: the attack that did best on the first half.
        slots: of the second half; ``guesses`` of them were guessed, ``correct`` rightly.
        epsilon_lower: for one unit added or removed, at ``delta``.
        ceiling: what it would be if all of these guesses were right.
    """

    score: str
    slots: int
    guesses: int
    correct: int
    delta: float
    alpha: float
    epsilon_lower: float
    ceiling: float


def attack(members: ArrayLike, others: ArrayLike, *, alpha: float = 0.05) -> Attack:
    """The statistics of one attack's scores, each with a 1 - alpha interval; units are taken as independent.

    Raises:
        ValueError: no scores, or some are not finite.
    """
    inside, outside = finite_scores("members", members), finite_scores("others", others)
    tpr = {fpr: tpr_at_fpr(inside, outside, fpr=fpr, alpha=alpha) for fpr in FALSE_POSITIVE_RATES}
    return Attack(auc(inside, outside, alpha=alpha), tpr, _curve(inside, outside))


def exchangeability(members: ArrayLike, others: ArrayLike, *, alpha: float = 0.01) -> Exchangeability:
    """The check by scores of a model that was trained on neither. It fails one time in about 1 / alpha by chance."""
    inside, outside = finite_scores("members", members), finite_scores("others", others)
    p_value = float(ks_2samp(inside, outside).pvalue)
    return Exchangeability(auc(inside, outside, alpha=alpha), p_value, alpha)


def membership_bound(
    attacks: Mapping[str, Sides], *, delta: float, steps: int = 2, alpha: float = 0.05, seed: int = 0
) -> MembershipBound | None:
    """The bound by the best of several attacks on the same units; None with fewer than 2 * LEAST_SLOTS slots.

    Args:
        attacks: scores by the attack's name, of the same units in the same order.
        delta: of the guarantee.
        steps: of the guarantee's neighbours that exchanging a unit takes: 2 of add or remove, 1 of replace.
        seed: of the coins and of who meets whom; the model under attack must not depend on it.

    Raises:
        ValueError: no attack, attacks on different numbers of units, or scores that are not finite.
    """
    checks.not_empty(attacks=attacks)
    checks.integer_at_least(1, steps=steps)
    open_unit_interval(alpha=alpha)
    scores = {name: (finite_scores(name, a), finite_scores(name, b)) for name, (a, b) in attacks.items()}
    sizes = {(len(inside), len(outside)) for inside, outside in scores.values()}
    if len(sizes) != 1:
        raise ValueError(f"attacks must score the same units, got {sorted(sizes)} members and others")
    count = min(*sizes.pop())
    if count < 2 * LEAST_SLOTS:
        return None
    draws = simulation_generator(seed, "membership slots")
    shown, coins = _shown(scores, count, draws)
    half = count // 2

    def bound(name: str, share: tuple[float, float], part: slice) -> MembershipBound:
        values, truth = shown[name][part], coins[part]
        members, others = (int(part * len(values)) for part in share)
        marks = guess(values, members, others)
        correct, made = int(((marks == 1) & truth).sum() + ((marks == -1) & ~truth).sum()), members + others
        lower, ceiling = (
            epsilon_lower_one_run(right, made, len(values), delta=delta, alpha=alpha, steps=steps)
            for right in (correct, made)
        )
        return MembershipBound(name, len(values), made, correct, delta, alpha, lower, ceiling)

    def promise(choice: tuple[str, tuple[float, float]]) -> tuple[float, float]:
        found = bound(*choice, slice(half))
        by_chance = one_run_p_value(found.correct, found.guesses, found.slots, epsilon=0.0, delta=0.0)
        return found.epsilon_lower, -by_chance

    best = max(((name, share) for name in shown for share in SHARES), key=promise)
    return bound(*best, slice(half, None))


def _shown(
    scores: Mapping[str, tuple[Floats, Floats]], count: int, draws: np.random.Generator
) -> tuple[dict[str, Floats], NDArray[np.bool_]]:
    """Scores of the units that the attacker is shown, one per slot, and the coins: whether they are members'."""
    inside, outside = next(iter(scores.values()))
    members, others = draws.permutation(len(inside))[:count], draws.permutation(len(outside))[:count]
    coins = draws.random(count) < 0.5
    return {name: np.where(coins, a[members], b[others]) for name, (a, b) in scores.items()}, coins


def _curve(inside: Floats, outside: Floats) -> tuple[tuple[float, float], ...]:
    """Rates at thresholds between all scores, thinned so that the small rates keep every step."""
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]
    true = 1 - np.searchsorted(np.sort(inside), thresholds, side="left") / len(inside)
    false = 1 - np.searchsorted(np.sort(outside), thresholds, side="left") / len(outside)
    kept = np.unique(np.concatenate([[0], np.geomspace(1, len(thresholds), _POINTS).astype(np.int64) - 1]))
    return tuple((float(false[at]), float(true[at])) for at in kept)
