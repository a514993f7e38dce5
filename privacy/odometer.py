"""Epsilon of the part of a committed floor that a run has consumed, cheaply enough to be asked every round.

The loss distribution of each step is discretised once, fully consumed steps stay composed, and one self-composition
per call remains (tens of milliseconds).

What the value means: it bounds a run that was going to stop there anyway. If the moment of stopping was chosen from
released values, the guarantee is that of the whole commitment.
"""

import functools
import math
from collections.abc import Sequence

from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from privacy import accountants, loss_distributions
from privacy.commitment import FloorStep
from privacy.errors import UnsupportedEvent


class FloorOdometer:
    """Epsilon of ``used[i]`` releases of each committed step ``i``; every step must have noise."""

    def __init__(self, floor: Sequence[FloorStep], delta: float, adjacency: str) -> None:
        """Choose the accountant (PLD where it bounds every step, else RDP) and the PLD's discretisation.

        Raises:
            UnsupportedEvent: no accountant bounds the floor.
        """
        self._floor = tuple(floor)
        self._delta = delta
        self._adjacency = adjacency
        self._interval: float | None = None  # None: the RDP accountant
        try:
            self.total = accountants.epsilon(floor, delta, adjacency=adjacency)
        except UnsupportedEvent:
            self.total = accountants.epsilon(floor, delta, "rdp", adjacency=adjacency)
        else:
            if math.isfinite(self.total):
                _, self._interval = loss_distributions.refine(accountants.merged(floor), delta, adjacency)
            else:
                self.total = accountants.epsilon(floor, delta, "rdp", adjacency=adjacency)
        self._complete: set[int] = set()
        self._composed: PrivacyLossDistribution | None = None

    def epsilon(self, used: Sequence[int]) -> float:
        """Upper bound on epsilon at delta; 0 before the first release."""
        steps = {
            index: (step.sampling, step.noise_multiplier, count)
            for index, (step, count) in enumerate(zip(self._floor, used, strict=True))
            if count
        }
        if not steps:
            return 0.0
        if self._interval is None:
            return accountants.epsilon(steps.values(), self._delta, "rdp", adjacency=self._adjacency)
        if any(used[index] < self._floor[index].count for index in self._complete):
            self._complete, self._composed = set(), None
        partial: list[PrivacyLossDistribution] = []
        for index in steps.keys() - self._complete:
            part = loss_distributions.compose(accountants.merged([steps[index]]), self._adjacency, self._interval)
            if used[index] == self._floor[index].count:
                self._complete.add(index)
                self._composed = part if self._composed is None else self._composed.compose(part)
            else:
                partial.append(part)
        whole = partial if self._composed is None else [self._composed, *partial]
        total = functools.reduce(PrivacyLossDistribution.compose, whole)
        allowance = loss_distributions.rounding(list(steps.values()))
        return min(self.total, loss_distributions.epsilon_of(total, self._delta, allowance))
