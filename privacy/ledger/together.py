"""The cost of several runs on the same data together, from what each of them commits to.

Two bounds are given. *Added up*: epsilons and deltas simply add (basic composition, Dwork, Rothblum, Vadhan 2010),
whatever the runs were. *Composed*: the privacy loss distribution of all committed releases at once, at the largest
delta of the runs; it is tighter and can be had of runs in floor mode under add-remove that protect one population;
other runs are added to it. Both count whole commitments: when a run stopped may depend on what it released.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from privacy.accountants import composition
from privacy.commitment import Commitment, FloorStep


class Priced(Protocol):
    """A run with what it guarantees; :class:`Price` says what each value is."""

    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def floor(self) -> tuple[FloorStep, ...] | None: ...
    @property
    def population(self) -> int | None: ...


@dataclass(frozen=True)
class Price:
    """The guarantee of a run as others can be added to it.

    Attributes:
        epsilon: infinite where nothing is guaranteed.
        floor: committed releases; None where they cannot be composed with others.
        population: units that the ledger counts.
    """

    epsilon: float
    delta: float
    floor: tuple[FloorStep, ...] | None = None
    population: int | None = None


def price_of(commitment: Commitment, not_private: str | None, epsilon: float) -> Price:
    """The price of a run by what it commits to; ``epsilon`` is what it guarantees where it is private."""
    alone = commitment.mode == "floor" and commitment.tuning is None  # a law over runs has no loss distribution here
    composes = alone and commitment.adjacency == "add_remove" and not not_private
    return Price(epsilon, commitment.delta, commitment.floor if composes else None, commitment.population)


def add_up(runs: Sequence[Priced]) -> tuple[float, float]:
    """The sums of epsilons and of deltas."""
    return sum(run.epsilon for run in runs), sum(run.delta for run in runs)


def compose(runs: Sequence[Priced]) -> tuple[float, float] | None:
    """The bound by privacy loss distributions, some seconds of work.

    Runs that have none, and other populations, add up. None where no run has one.
    """
    alike: dict[int | None, list[Priced]] = {}
    for run in runs:
        if run.floor is not None:
            alike.setdefault(run.population, []).append(run)
    if not alike or not math.isfinite(add_up(runs)[0]):
        return None
    epsilon, delta = add_up([run for run in runs if run.floor is None])
    for same in alike.values():
        largest = max(run.delta for run in same)
        epsilon += composition.tightest_bound([step for run in same for step in run.floor or ()], largest)[0]
        delta += largest
    return epsilon, delta


def least_bound(runs: Sequence[Priced]) -> tuple[float, float]:
    """The smaller of the two bounds, as (epsilon, delta)."""
    found, sums = compose(runs), add_up(runs)
    return sums if found is None or found[0] > sums[0] else found


def how(runs: Sequence[Priced], found: tuple[float, float]) -> str:
    """Say which of the two a bound is."""
    if found == add_up(runs):
        return "epsilons and deltas added up"
    whole = all(run.floor is not None for run in runs) and len({run.population for run in runs}) == 1
    return "composed by privacy loss distributions" + ("" if whole else " where they can be, the others added up")
