"""Epsilon of a list of releases, by two accountants over dp_accounting.

| name | what it is | bound? |
|---|---|---|
| ``pld`` | privacy loss distribution, dp_accounting, pessimistic "connect the dots" discretisation | upper bound |
| ``rdp`` | Rényi differential privacy, dp_accounting | upper bound, 5-15% above PLD |

What takes Poisson sampling under which adjacency; the rest is refused by :class:`UnsupportedEvent`:

| rate | add_remove | replace_one |
|---|---|---|
| 1 (everyone) | pld rdp | pld; rdp at half the noise multiplier (a sum moves by twice the bound) |
| < 1 | pld rdp | pld |
| of records, units protected | pld (``mixture.py``) | |

dp_accounting's PLD doubles the sensitivity under replace-one by itself; its RDP accountant does not (measured: 2.166
for both adjacencies), so the half is taken here.

Every noise multiplier is reduced by a relative 1e-9 before accounting, so that rounding of the last digits of a
standard deviation, anywhere between a plan and the ledger, can never make a reported epsilon too small.

The lists accounted here must be fixed in advance (see ``commitment.py``): none of this is valid for noise that was
chosen on the way, except through the floor.
"""

import importlib.metadata
import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from privacy import checks
from privacy.accountants import pld, renyi
from privacy.commitment import ROUNDING, FloorStep
from privacy.errors import UnsupportedEvent
from privacy.events import (
    BufferedToeplitz,
    ExampleLevelPoisson,
    PartPoisson,
    Poisson,
    ReleaseEvent,
    Step,
    seen_by_one_unit,
)

COMPOSED = ("add_remove", "replace_one")
"""Adjacencies whose events are composed here; ``zero_out`` is accounted by the filter alone (``renyi.rho_of``)."""
ACCOUNTANTS = ("pld", "rdp")
"""Both give upper bounds."""


def epsilon(
    events: Iterable[Step | FloorStep | ReleaseEvent],
    delta: float,
    accountant: str = "pld",
    *,
    adjacency: str = "add_remove",
    interval: float | None = None,
) -> float:
    """Epsilon at ``delta`` of the composition of ``events``; infinite if one of them has no noise.

    Args:
        events: releases, floor steps or (sampling, effective noise multiplier, count) triples, of one unit.
        delta: in (0, 1).
        accountant: ``"pld"`` or ``"rdp"``.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
        interval: discretisation interval of the PLD accountant; None refines until epsilon stands still.

    Raises:
        UnsupportedEvent: the accountant cannot account such an event under this adjacency; the message says which can.
        ValueError: a bad delta, accountant or adjacency, or events of different units.
    """
    checks.one_of(ACCOUNTANTS, accountant=accountant)
    checks.one_of(COMPOSED, adjacency=adjacency)
    checks.probability(delta=delta)
    if len(apart := parts(events)) > 1:
        return max(epsilon(part, delta, accountant, adjacency=adjacency, interval=interval) for part in apart)
    steps = merge_steps(apart[0])
    if not steps:
        return 0.0
    if any(multiplier == 0.0 for _, multiplier, _ in steps):
        return math.inf
    if accountant != "pld" and any(isinstance(sampling, ExampleLevelPoisson) for sampling, _, _ in steps):
        raise UnsupportedEvent(
            f"the {accountant} accountant cannot account sampling of records where units are protected; use 'pld', "
            f"which needs a delta of at least {pld.SMALLEST_DELTA:g}"
        )
    if accountant == "rdp":
        return renyi.epsilon(steps, delta, adjacency)
    return pld.epsilon(steps, delta, adjacency, interval)


def tightest_bound(
    events: Sequence[Step | FloorStep | ReleaseEvent], delta: float, *, adjacency: str = "add_remove"
) -> tuple[float, str]:
    """The smaller of the PLD and the RDP epsilon, and which it is; both are bounds, so the smaller is one too."""
    by_pld = epsilon(events, delta, "pld", adjacency=adjacency), "pld"
    try:
        return min(by_pld, (epsilon(events, delta, "rdp", adjacency=adjacency), "rdp"))
    except UnsupportedEvent:
        return by_pld


def curve(
    events: Sequence[Step | FloorStep | ReleaseEvent],
    deltas: Sequence[float],
    *,
    suits: float,
    adjacency: str = "add_remove",
) -> list[tuple[float, float]]:
    """Pairs (delta, epsilon) that hold all at once, by PLD.

    The discretisation is the one that suits the delta ``suits``; all values are upper bounds.
    """
    for delta in deltas:
        checks.probability(delta=delta)
    if len(apart := parts(events)) > 1:
        curves = [curve(part, deltas, suits=suits, adjacency=adjacency) for part in apart]
        return [max(pairs) for pairs in zip(*curves, strict=True)]
    steps = merge_steps(events)
    _, interval = pld.refine(steps, suits, adjacency)
    return [(delta, pld.epsilon(steps, delta, adjacency, interval)) for delta in deltas]


Listed = TypeVar("Listed", bound=Step | FloorStep | ReleaseEvent)


def parts(events: Iterable[Listed]) -> list[list[Listed]]:
    """The events that one unit can be in, by the part of the population that it is in; one list where all are asked.

    The run costs what the most expensive list costs (proof: :class:`privacy.events.PartPoisson`). Events that ask
    everybody are in both lists. Where events are of several splits, a unit may be in a part of each: one list of all.
    """
    pairs = [(event, _sampling(event)) for event in events]
    kinds = {(by.split, by.held_out) for _, by in pairs if isinstance(by, PartPoisson)}
    if len(kinds) != 2 or len({split for split, _ in kinds}) != 1:
        return [[event for event, _ in pairs]]
    return [
        [event for event, by in pairs if not isinstance(by, PartPoisson) or by.held_out is out] for out in (False, True)
    ]


def _sampling(event: Step | FloorStep | ReleaseEvent) -> Poisson:
    return event[0] if isinstance(event, tuple) else event.sampling


def merge_steps(events: Iterable[Step | FloorStep | ReleaseEvent]) -> tuple[Step, ...]:
    """Equal steps counted together, in order of first appearance, at the noise multiplier that is accounted.

    Releases of cyclic sampling are what one unit sees of them, entry by entry: one entry for a whole run counts
    ceil(T / groups), T entries of one release count T. All releases that share buffered Toeplitz noise must be one
    floor step; single events of them are refused.

    Raises:
        UnsupportedEvent: one release of buffered Toeplitz noise by itself.
    """
    counts: dict[tuple[Poisson, float], int] = {}
    for event in events:
        sampling, multiplier, count = _seen(event)
        key = (sampling, multiplier * (1.0 - ROUNDING))
        counts[key] = counts.get(key, 0) + count
    units = {(sampling.unit, sampling.population) for sampling, _ in counts}
    if len(units) > 1:
        raise ValueError(f"events must all protect one unit of one population, got {sorted(units)}; account them apart")
    return tuple((sampling, multiplier, count) for (sampling, multiplier), count in counts.items())


def version(accountant: str) -> str:
    """Name and version of the library behind an accountant, for reports."""
    checks.one_of(ACCOUNTANTS, accountant=accountant)
    return f"dp_accounting {importlib.metadata.version('dp-accounting')} ({accountant.upper()})"


def _seen(event: Step | FloorStep | ReleaseEvent) -> Step:
    """What one unit sees of it."""
    if isinstance(event, FloorStep):
        return event.seen_by_one_unit
    if isinstance(event, ReleaseEvent):
        if isinstance(event.correlation, BufferedToeplitz):
            raise UnsupportedEvent(
                f"{event.label!r} of round {event.round} shares its buffered Toeplitz noise with all releases of "
                "its run; account the run's floor step"
            )
        event = event.sampling, event.effective_noise_multiplier, 1
    sampling, multiplier, count = event
    checks.non_negative(noise_multiplier=multiplier)
    checks.integer_at_least(1, count=count)
    return seen_by_one_unit(sampling, multiplier, count)
