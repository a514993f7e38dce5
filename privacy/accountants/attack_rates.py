"""The best that any attacker can do against a committed run: rates of a membership test, its advantage, a posterior.

The attacker sees all that a run releases, may know every other unit, and tests whether one unit was there: ``fpr`` is
how often the test says so wrongly, ``tpr`` how often rightly. Where P and Q are what the run releases with the unit and
without it, and delta(eps) is the hockey-stick divergence of P from Q, delta'(eps) that of Q from P, every test has

    tpr <= e^eps fpr + delta(eps)      1 - fpr <= e^eps (1 - tpr) + delta'(eps)      for every eps >= 0

(Wasserman and Zhou 2010; the region of Kairouz, Oh, Viswanath 2015, arXiv 1311.0776). All eps together are the
trade-off function of Dong, Roth, Su 2019 (arXiv 1905.02383), the smallest 1 - tpr that a test at fpr = alpha can have:

    f(alpha) = sup_eps max(0, 1 - delta(eps) - e^eps alpha, e^-eps (1 - delta'(eps) - alpha)).

A test may also look for absence, which swaps P and Q; the worse of both is stated.

Guarantee: an upper bound on the attacker's success. Fewer eps, or larger deltas, only raise it, so a grid of eps and
the pessimistic discretisation of ``pld.py`` are sound. Nothing that is proven leans on this file.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from privacy import checks
from privacy.accountants import composition, pld, renyi, selection
from privacy.commitment import Commitment, FloorStep
from privacy.events import ReleaseEvent, Step

_POINTS = 2001
_LARGEST = 60.0  # a test that needs a larger eps is right nearly always
_NEGLIGIBLE = 1e-9  # delta beyond which no eps is looked at; also what sums over millions of losses may be rounded by
_DELTAS = np.logspace(-10.0, -0.5, 39)


@dataclass(frozen=True)
class AttackBound:
    """Upper bounds on how well any attacker tells a data set from its neighbour.

    Attributes:
        epsilons: all >= 0.
        deltas: at each epsilon the divergence of "with the unit" from "without", and that of "without" from "with".
        tight: whether they come of a privacy loss distribution, else of (epsilon, delta) pairs, whose bounds are valid
            but larger.
    """

    epsilons: Float64[np.ndarray, " points"]
    deltas: Float64[np.ndarray, "2 points"]
    tight: bool

    def true_positive_rate(self, fpr: float) -> float:
        """The largest true positive rate of a test whose false positive rate is ``fpr``, in (0, 1]."""
        checks.probability(fpr=fpr)
        grown = np.exp(self.epsilons)
        return max(
            min(1.0, float(np.min(forth + grown * fpr)), float(np.min(1.0 - (1.0 - back - fpr) / grown)))
            for forth, back in (self.deltas, self.deltas[::-1])
        )

    @property
    def advantage(self) -> float:
        """The largest difference between true and false positive rate, which is the total variation distance."""
        grown = np.exp(self.epsilons)
        return min(1.0, float(np.min((grown - 1.0 + self.deltas.sum(axis=0)) / (grown + 1.0))))

    def posterior(self, prior: float, fpr: float) -> float:
        """The largest probability that such a test is right when it says "there".

        Args:
            prior: probability that the unit was there, before anything was released; in (0, 1).
            fpr: false positive rate of the test.
        """
        if not 0.0 < prior < 1.0:
            raise ValueError(f"prior must lie between 0 and 1, got {prior!r}; 0.5 says that nothing is known before")
        found = prior * self.true_positive_rate(fpr)
        return found / (found + (1.0 - prior) * fpr)


def attack_bound(commitment: Commitment) -> AttackBound:
    """Bound every attack on all that a run with this commitment may release.

    In filter mode there is no valid loss distribution, and of a private sweep none is known: pairs there.

    Raises:
        ValueError: the commitment guarantees nothing.
    """
    if commitment.not_private is not None:
        raise ValueError(f"a run without a guarantee bounds no attack: {commitment.not_private}")
    order, rho, tuning = commitment.order, commitment.rho, commitment.tuning
    if order is not None and rho is not None:
        return bound_of_conversion(lambda delta: renyi.epsilon_of(rho, order, delta))
    if tuning is not None:
        return bound_of_conversion(lambda delta: selection.epsilon(tuning.tries, tuning.candidates, delta)[0])
    return bound_of_events(commitment.floor, suits=commitment.delta, adjacency=commitment.adjacency)


def bound_of_events(
    events: Sequence[Step | FloorStep | ReleaseEvent], *, suits: float, adjacency: str = "add_remove"
) -> AttackBound:
    """Bound attacks on a list of releases that was fixed in advance, by its privacy loss distribution.

    Args:
        suits: delta that the discretisation suits, see :func:`privacy.accountants.composition.curve`.
    """
    parts = [composition.merge_steps(part) for part in composition.parts(events)]
    if not parts[0] or any(multiplier == 0.0 for steps in parts for _, multiplier, _ in steps):
        return bound_of_pairs(() if parts[0] else [(0.0, 0.0)])
    found = [pld.compose(steps, adjacency, pld.refine(steps, suits, adjacency)[1]) for steps in parts]
    most = min(max(one.get_epsilon_for_delta(_NEGLIGIBLE) for one in found), _LARGEST)
    epsilons = np.linspace(0.0, most, _POINTS)
    # in public dp_accounting offers the larger of both directions alone
    both = [(distribution._pmf_remove, distribution._pmf_add) for distribution in found]
    deltas = np.max([[one.get_delta_for_epsilon(epsilons) for one in pair] for pair in both], axis=0)
    allowance = max(map(pld.rounding_error, parts))
    return AttackBound(epsilons, np.maximum(deltas, 0.0) + allowance + _NEGLIGIBLE, tight=True)


def bound_of_conversion(epsilon_at: Callable[[float], float]) -> AttackBound:
    """Bound attacks on what is (``epsilon_at(delta)``, delta)-private at every delta."""
    return bound_of_pairs((epsilon_at(float(delta)), float(delta)) for delta in _DELTAS)


def bound_of_pairs(pairs: Iterable[tuple[float, float]]) -> AttackBound:
    """Bound attacks on what is (epsilon, delta)-private for all these pairs at once; of no pair, by 1."""
    known = [(0.0, 1.0), *((epsilon, delta) for epsilon, delta in pairs if epsilon <= _LARGEST)]
    epsilons, deltas = np.array(known).T
    return AttackBound(epsilons, np.array([deltas, deltas]), tight=False)
