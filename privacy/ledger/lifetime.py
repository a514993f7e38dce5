"""A budget for many runs: its terms, and what a run's whole commitment costs at one Rényi order (``account.py``)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from privacy import checks
from privacy.accountants import composition, renyi, selection
from privacy.commitment import ADJACENCIES, Commitment, FloorStep
from privacy.errors import UnsupportedEvent
from privacy.events import ReleaseEvent

RULES = ("renyi", "sum")
HIGHEST_ORDER: Final = 63


@dataclass(frozen=True)
class Terms:
    """The purpose and the limits of an account; fixed when it is made.

    Attributes:
        data: what its owner calls the data set.
        unit, adjacency: as in a commitment.
        epsilon, delta: of all runs together.
        rule: ``"renyi"`` or ``"sum"``.
        order: of the ``renyi`` rule, an integer from 2 to 63; None with ``sum``.
    """

    data: str
    unit: str
    epsilon: float
    delta: float
    adjacency: str = "add_remove"
    rule: str = "renyi"
    order: int | None = None

    def __post_init__(self) -> None:
        checks.one_of(ADJACENCIES, adjacency=self.adjacency)
        checks.one_of(RULES, rule=self.rule)
        checks.positive(epsilon=self.epsilon)
        checks.probability(delta=self.delta)
        if self.unit not in ("client", "record") and not self.unit.partition("group:")[2]:
            raise ValueError(f"unit must be client, record or group:COLUMN, got {self.unit!r}")
        if self.rule == "sum" and self.order is not None:
            raise ValueError(f"order must be left out with rule 'sum', got {self.order}")
        if self.rule == "renyi":
            checks.integer_at_least(2, order=self.order or 0)
            if self.rho <= 0.0 or (self.order or 0) > HIGHEST_ORDER:
                raise ValueError(
                    f"order must reach epsilon {self.epsilon:g} at delta {self.delta:g} and be at most "
                    f"{HIGHEST_ORDER}, got {self.order}; leave it out, or take rule 'sum'"
                )

    @property
    def rho(self) -> float:
        """The Rényi divergence at the order that converts to (epsilon, delta)."""
        assert self.order is not None, "of the renyi rule"
        return renyi.rho_budget(self.epsilon, self.order, self.delta)


def best_order(epsilon: float, delta: float) -> int:
    """The order at which most Gaussian releases fit a lifetime, whatever their noise: it depends on nothing private.

    The divergence of a Gaussian release is proportional to the order, so the budget is best where its ratio to the
    order is largest.
    """
    return max(range(2, HIGHEST_ORDER + 1), key=lambda order: renyi.rho_budget(epsilon, order, delta) / order)


def divergence(commitment: Commitment, order: int) -> float:
    """Upper bound on the Rényi divergence of all that a commitment may release, at an integer order.

    A floor dominates its run step by step; where the population has two parts, a unit is in one of them. One unit sees
    correlated noise as it is composed by the ``rdp`` accountant. A filter bounds the divergence at its own order and
    so, divergences growing with the order, at every lower one. Tuning and training are bounded together
    (:mod:`privacy.accountants.selection`).

    Raises:
        UnsupportedEvent: no bound is known, in words with a remedy.
    """
    if commitment.tuning is not None:
        curve = selection.divergences(commitment.tuning.tries, commitment.tuning.candidates)
        return float(curve[selection.ORDERS.index(order)])
    if commitment.order is not None and commitment.rho is not None:
        if commitment.order < order:
            raise UnsupportedEvent(
                f"its filter bounds the divergence up to order {commitment.order}, the account's is {order}; take "
                "privacy.mode = 'floor'"
            )
        return commitment.rho
    return _summed(commitment.floor, order, commitment.adjacency)


def used_divergence(commitment: Commitment, charged: Sequence[ReleaseEvent], order: int) -> float:
    """Upper bound on the Rényi divergence of what was charged of a commitment; infinite where none is known.

    A filter adds up the releases that were made, each chosen after seeing those before, and so bounds a run that ended
    early whatever ended it. Candidates of a private sweep have no cost of their own, and buffered noise none of a part.
    """
    if commitment.tuning is not None:
        return math.inf
    try:
        return _summed(charged, order, commitment.adjacency) if charged else 0.0
    except UnsupportedEvent:
        return math.inf


def _summed(events: Iterable[FloorStep | ReleaseEvent], order: int, adjacency: str) -> float:
    return max(
        sum(
            count * renyi.rho_of(sampling, multiplier, order, adjacency)
            for sampling, multiplier, count in composition.merge_steps(part)
        )
        for part in composition.parts(events)
    )


def louder_floor(commitment: Commitment, order: int, rho: float) -> tuple[FloorStep, ...]:
    """The floor with just so much more noise in every step that it costs at most ``rho``."""

    def louder(scale: float) -> tuple[FloorStep, ...]:
        return tuple(replace(step, noise_multiplier=scale * step.noise_multiplier) for step in commitment.floor)

    low, high = 1.0, 1e4
    for _ in range(40):
        scale = math.sqrt(low * high)
        fits = divergence(replace(commitment, floor=louder(scale)), order) <= rho
        low, high = (low, scale) if fits else (scale, high)
    return louder(high)
