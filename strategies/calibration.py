"""The commitment of a controller's run to (epsilon, delta), and the noise of every round that keeps it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from privacy.accountants.calibration import filter_commitment, floor_commitment
from privacy.commitment import Commitment, FloorStep
from privacy.events import NoiseShares, Poisson, ReleaseEvent
from strategies.controllers.controller import Controller


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
) -> tuple[Commitment, tuple[float, ...]]:
    """Calibrate, and commit: the commitment, and the effective noise multiplier of rounds 1..T.

    The controller's initial release is part of the target. Nothing is written or sampled here.

    Args:
        controller: gives the initial release and the shape of the noise over the rounds.
        sampling: of every round.
        rounds: T.
        epsilon, delta: the target.
        mode: ``"floor"`` or ``"filter"``.
        extra: further releases that the target must pay for.
        noise_shares: how the clients make the noise together, which only a filter accounts; None if the server adds it.

    Raises:
        ValueError: no noise keeps the target.
    """
    initial, profile = controller.initial(sampling), controller.profile(rounds)
    steps = list(extra)
    if initial is not None:
        event = ReleaseEvent("histogram", 0, initial.sampling, initial.components)
        steps.append(FloorStep("histogram", initial.sampling, event.effective_noise_multiplier))
    commit = filter_commitment if mode == "filter" else floor_commitment
    if noise_shares is not None:
        commit = partial(filter_commitment, adjacency="zero_out", noise_shares=noise_shares)
    commitment, z = commit(epsilon, delta, sampling, rounds, extra=steps, profile=profile)
    return commitment, tuple(z * share for share in profile)
