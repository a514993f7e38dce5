"""The payments that a commitment covers: the rules of floor mode and of filter mode (``commitment.py``), and what is
spent.

A budget is a value in memory; ``ledger.py`` makes it durable. :meth:`Budget.price` decides without changing anything,
:meth:`Budget.take` spends. Replaying the ledger through the same two calls gives the same state.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from privacy.accountants import composition, pld, renyi, selection
from privacy.commitment import ROUNDING, Commitment, FloorStep, Tuning
from privacy.errors import BudgetExceeded
from privacy.events import CyclicPoisson, ReleaseEvent


@dataclass(frozen=True)
class Price:
    """The cost of one release: the committed step it consumes (floor mode) or its Rényi divergence (filter mode)."""

    step: int | None = None
    rho: float | None = None


class Budget(Protocol):
    """The rules of one mode."""

    def price(self, event: ReleaseEvent) -> Price:
        """Price the event against the commitment; BudgetExceeded with the reason if that does not pay for it."""

    def take(self, price: Price) -> None:
        """Spend the price of one release;"""

    def epsilon_spent(self) -> float:
        """Upper bound on the epsilon spent, for a run that was going to stop here anyway."""

    def worst_case(self) -> float:
        """Epsilon of the whole commitment."""


class FloorBudget:
    """A fixed list of steps; a release consumes the next unused step of its label and must be dominated by it.

    Labels may be consumed in any order, even one chosen from released values: the composition of a fixed set of
    dominating pairs does not depend on the order, and by induction on the steps left neither does what it dominates.
    """

    def __init__(self, commitment: Commitment) -> None:
        self._commitment = commitment
        self._floor = commitment.floor
        self._used = [0] * len(commitment.floor)
        self._odometers: list[FloorOdometer] = []

    def price(self, event: ReleaseEvent) -> Price:
        _check_population(event, self._commitment)
        index = self._next_index(event.label)
        if index is None:
            raise BudgetExceeded(
                f"all committed releases labelled {event.label!r} are used; the run must stop, or commit to more"
            )
        step = self._floor[index]
        if event.noise_shares is not None:
            raise BudgetExceeded("noise made by the clients is accounted by a filter; commit to one")
        self._check_turn(event, step)
        if event.sampling.rate > step.sampling.rate:
            raise BudgetExceeded(
                f"the event samples {event.sampling}, more than the committed {step.sampling}; sample as committed"
            )
        if event.effective_noise_multiplier < step.noise_multiplier * (1.0 - ROUNDING):
            raise BudgetExceeded(
                f"effective noise multiplier {event.effective_noise_multiplier:.6g} of {event.label!r} is below the "
                f"committed floor {step.noise_multiplier:.6g}; add noise or drop a query"
            )
        return Price(step=index)

    def _check_turn(self, event: ReleaseEvent, step: FloorStep) -> None:
        """Whose turn it is, and how the noise hangs together, is as committed: no unit is asked more often."""
        turn = sum(self._used)  # a floor with cyclic sampling has one step, so every charge is a turn
        committed = replace(step.sampling, turn=turn) if isinstance(step.sampling, CyclicPoisson) else step.sampling
        if type(event.sampling) is not type(committed) or replace(event.sampling, rate=committed.rate) != committed:
            raise BudgetExceeded(
                f"the event samples {event.sampling}, not {committed}, as committed; sample as committed"
            )
        made, due = event.correlation, step.correlation
        # Where the noise starts may differ: that costs nothing.
        if (made and replace(made, since=0)) != due:
            raise BudgetExceeded(f"the noise of {event.label!r} is correlated as {made}, committed is {due}")

    def take(self, price: Price) -> None:
        if price.step is None:
            raise ValueError("a charge in floor mode must consume a step")
        self._used[price.step] += 1

    def epsilon_spent(self) -> float:
        used = dict(zip(map(id, self._floor), self._used, strict=True))
        return max(one.epsilon([used[id(step)] for step in one.floor]) for one in self._prepared())

    def worst_case(self) -> float:
        return max(one.total for one in self._prepared())

    def steps_left(self, label: str) -> int:
        """The number of releases of ``label`` that are still paid for."""
        return sum(step.count - used for step, used in zip(self._floor, self._used, strict=True) if step.label == label)

    def _next_index(self, label: str) -> int | None:
        for index, step in enumerate(self._floor):
            if step.label == label and self._used[index] < step.count:
                return index
        return None

    def _prepared(self) -> "list[FloorOdometer]":
        """One odometer for each part of the population, see :func:`privacy.accountants.composition.parts`."""
        if not self._odometers:
            delta, adjacency = self._commitment.delta, self._commitment.adjacency
            self._odometers = [FloorOdometer(part, delta, adjacency) for part in composition.parts(self._floor)]
        return self._odometers


class TunedBudget(FloorBudget):
    """The floor of one candidate of a private sweep: what it may release, at the price of the whole sweep.

    Tuning and training are one event, and all of it is spent before the first candidate begins.
    """

    def __init__(self, commitment: Commitment, tuning: Tuning) -> None:
        super().__init__(commitment)
        self._total, _ = selection.epsilon(tuning.tries, tuning.candidates, commitment.delta)

    def epsilon_spent(self) -> float:
        return self._total

    def worst_case(self) -> float:
        return self._total


class FilterBudget:
    """A Rényi filter at one committed order: a release is paid for while the divergences add up to at most rho."""

    def __init__(self, commitment: Commitment, order: int, rho: float) -> None:
        self._commitment = commitment
        self._order = order
        self._budget = rho
        self.rho_spent = 0.0

    def price(self, event: ReleaseEvent) -> Price:
        _check_population(event, self._commitment)
        if isinstance(event.sampling, CyclicPoisson):
            raise BudgetExceeded("cyclic sampling is accounted over a whole run, by a floor; commit to one")
        if event.noise_shares != self._commitment.noise_shares:
            raise BudgetExceeded(
                "the noise must be made by whom the commitment says, server or clients alike; it is not"
            )
        rho = renyi.rho_of(event.sampling, event.effective_noise_multiplier, self._order, self._commitment.adjacency)
        if not self.rho_spent + rho <= self._budget:
            raise BudgetExceeded(
                f"Rényi divergence {rho:.6g} of {event.label!r} exceeds the "
                f"{max(0.0, self._budget - self.rho_spent):.6g} left of {self._budget:.6g} at order {self._order}; "
                "add noise or stop"
            )
        return Price(rho=rho)

    def take(self, price: Price) -> None:
        if price.rho is None:
            raise ValueError("a charge in filter mode must spend a Rényi divergence")
        self.rho_spent += price.rho

    def epsilon_spent(self) -> float:
        return renyi.epsilon_of(self.rho_spent, self._order, self._commitment.delta)

    def worst_case(self) -> float:
        return renyi.epsilon_of(self._budget, self._order, self._commitment.delta)


def budget_of(commitment: Commitment) -> Budget:
    """The unspent budget of a commitment."""
    if commitment.tuning is not None:
        return TunedBudget(commitment, commitment.tuning)
    if commitment.order is None or commitment.rho is None:
        return FloorBudget(commitment)
    return FilterBudget(commitment, commitment.order, commitment.rho)


def check_affordable(commitment: Commitment) -> None:
    """Raise ValueError if a commitment costs more than the epsilon it states."""
    cost = budget_of(commitment).worst_case()
    # A filter's rho was computed from epsilon by the formula that now computes epsilon from rho, up to rounding.
    if cost > commitment.epsilon * (1.0 + (0.0 if commitment.order is None else 1e-12)):
        raise ValueError(
            f"the committed releases cost epsilon {cost:.6g} at delta {commitment.delta:g}, more than the committed "
            f"{commitment.epsilon:.6g}; raise the target, or the noise (privacy.accountants.calibrate finds it)"
        )


class FloorOdometer:
    """Epsilon of the part of a committed floor that a run has consumed, cheaply enough to be asked every round.

    The loss distribution of each step is discretised once, fully consumed steps stay composed, and one self-composition
    per call remains (tens of milliseconds). The value bounds a run that was going to stop there anyway. If the moment
    of stopping was chosen from released values, the guarantee is that of the whole commitment.
    """

    def __init__(self, floor: Sequence[FloorStep], delta: float, adjacency: str) -> None:
        """Choose the accountant (PLD, or RDP where delta is too small for it) and the PLD's discretisation.

        Raises:
            UnsupportedEvent: no accountant bounds the floor.
        """
        self.floor = tuple(floor)
        self._delta = delta
        self._adjacency = adjacency
        self._interval: float | None = None  # None: the RDP accountant
        self.total = composition.epsilon(floor, delta, adjacency=adjacency)
        if math.isfinite(self.total):
            _, self._interval = pld.refine(composition.merge_steps(floor), delta, adjacency)
        else:
            self.total = composition.epsilon(floor, delta, "rdp", adjacency=adjacency)
        self._complete: set[int] = set()
        self._composed: PrivacyLossDistribution | None = None

    def epsilon(self, used: Sequence[int]) -> float:
        """Upper bound on epsilon at delta of ``used[i]`` releases of each step ``i``; 0 before the first release."""
        steps = {
            index: replace(step, count=count)
            for index, (step, count) in enumerate(zip(self.floor, used, strict=True))
            if count
        }
        if not steps:
            return 0.0
        if self._interval is None:
            return composition.epsilon(steps.values(), self._delta, "rdp", adjacency=self._adjacency)
        if any(used[index] < self.floor[index].count for index in self._complete):
            self._complete, self._composed = set(), None
        partial: list[PrivacyLossDistribution] = []
        for index in steps.keys() - self._complete:
            part = pld.compose(composition.merge_steps([steps[index]]), self._adjacency, self._interval)
            if used[index] == self.floor[index].count:
                self._complete.add(index)
                self._composed = part if self._composed is None else self._composed.compose(part)
            else:
                partial.append(part)
        whole = partial if self._composed is None else [self._composed, *partial]
        total = functools.reduce(PrivacyLossDistribution.compose, whole)
        allowance = pld.rounding_error(composition.merge_steps(steps.values()))
        return min(self.total, pld.epsilon_of(total, self._delta, allowance))


def _check_population(event: ReleaseEvent, commitment: Commitment) -> None:
    if event.unit != commitment.unit or event.sampling.population != commitment.population:
        raise BudgetExceeded(
            f"this ledger protects {commitment.population} of unit {commitment.unit!r}, the event samples from "
            f"{event.sampling.population} of unit {event.unit!r}; charge it to the ledger of that unit"
        )
