"""Calibration of a run: a target (epsilon, delta) becomes a commitment and the noise of every round that keeps it; what
a controller is told.

The one road: runs over clients, over records and in phases calibrate here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from privacy.accountants.calibration import filter_commitment, floor_commitment
from privacy.commitment import Commitment, FloorStep
from privacy.events import Correlation, Json, NoiseShares, Poisson, ReleaseEvent
from strategies.adapter.layout import AdapterLayout
from strategies.aggregations.aggregation import Adapters, Aggregation
from strategies.controllers.controller import Controller, RunInfo


class Calibrated(NamedTuple):
    """The commitment of a run, and the effective noise multiplier of rounds 1..T."""

    commitment: Commitment
    multipliers: tuple[float, ...]

    def to_json(self) -> Json:
        return {"commitment": self.commitment.to_json(), "multipliers": list(self.multipliers)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Calibrated":
        """Rebuild the calibration from its ``to_json``; KeyError, TypeError or ValueError for anything else."""
        return Calibrated(Commitment.from_json(data["commitment"]), tuple(map(float, data["multipliers"])))


def calibrate(
    controller: Controller[Any],
    sampling: Poisson,
    rounds: int,
    *,
    epsilon: float,
    delta: float,
    mode: str,
    extra: Sequence[FloorStep] = (),
    noise_shares: NoiseShares | None = None,
    correlation: Correlation | None = None,
    not_private: str | None = None,
    apart: Sequence[FloorStep] = (),
) -> Calibrated:
    """Calibrate a run, and commit to the result.

    The controller's initial release is part of the target; nothing is written or sampled.

    Args:
        controller: gives the initial release and the shape of the noise over the rounds.
        mode: ``"floor"`` or ``"filter"``.
        extra: further releases that the target must pay for.
        noise_shares: how the clients make the noise together, which only a filter accounts; None if the server adds it.
        correlation: of the noise over the rounds, which only a floor with cyclic ``sampling`` accounts; None if none.
        not_private: why the run gives no guarantee, or None.
        apart: releases on units that are in no round, which the target pays for by themselves (floor mode).

    Raises:
        ValueError: no noise keeps the target.
    """
    profile, steps = controller.profile(rounds), [*extra, *initial_step(controller, sampling)]
    commit = filter_commitment if mode == "filter" else floor_commitment
    if noise_shares is not None:
        commit = partial(filter_commitment, adjacency="zero_out", noise_shares=noise_shares)
    if correlation is not None:
        commit = partial(floor_commitment, correlation=correlation)
    commitment, z = commit(epsilon, delta, sampling, rounds, extra=steps, profile=profile)
    floor = (*commitment.floor, *apart)
    return Calibrated(replace(commitment, floor=floor, not_private=not_private), tuple(z * share for share in profile))


def given_noise(
    controller: Controller[Any], sampling: Poisson, rounds: int, noise_multiplier: float
) -> tuple[tuple[FloorStep, ...], tuple[float, ...]]:
    """The steps of a run whose noise is not calibrated but given, and the multiplier of each of its rounds."""
    multipliers = tuple(noise_multiplier * share for share in controller.profile(rounds))
    steps = [FloorStep("round", sampling, one, len(list(same))) for one, same in groupby(multipliers)]
    return (*initial_step(controller, sampling), *steps), multipliers


def initial_step(controller: Controller[Any], sampling: Poisson) -> tuple[FloorStep, ...]:
    """The step that is paid for the controller's initial release, if it has one."""
    initial = controller.initial(sampling)
    if initial is None:
        return ()
    event = ReleaseEvent("histogram", 0, initial.sampling, initial.components)
    return (FloorStep("histogram", initial.sampling, event.effective_noise_multiplier),)


def run_info(
    aggregation: Aggregation,
    adapters: Adapters,
    layout: AdapterLayout,
    rounds: int,
    sampling: Poisson,
    multipliers: tuple[float, ...],
    order: int | None,
) -> RunInfo:
    """Describe a run to its controller, from what it trains and the noise that was calibrated for it."""
    layouts = tuple(aggregation.part(adapters, round).layout(layout).blocks() for round in range(1, rounds + 1))
    layouts = layouts[:1] if len(set(layouts)) == 1 else layouts
    return RunInfo(rounds, layouts, sampling, multipliers, order)
