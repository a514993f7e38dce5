"""From a target (epsilon, delta) to the commitment of a run and the noise of every round."""

import json
from dataclasses import replace
from typing import Any

from privacy.commitment import Commitment
from privacy.contribution import Plan
from privacy.events import Poisson
from server.config.load import ConfigError
from server.config.schema import RunConfig
from strategies.calibration import calibrate
from strategies.controllers.controller import Controller, PublicSignals, RunInfo
from strategies.plugins import place


def round_sampling(config: RunConfig) -> Poisson:
    """How the cohort of a round is drawn."""
    return Poisson(config.sampling_rate, config.clients)


def not_private_reason(config: RunConfig) -> str | None:
    """Why the configured run gives no guarantee, or None."""
    reasons = []
    if config.privacy.noise == "insecure-zero":
        reasons.append("no noise is added (privacy.noise = insecure-zero)")
    if config.privacy.seeded_cohorts:
        reasons.append("cohorts can be foretold (privacy.seeded-cohorts = true)")
    if not reasons and config.privacy.non_private:
        reasons.append("privacy.non-private = true")
    return "; ".join(reasons) or None


def commit(config: RunConfig, controller: Controller[Any]) -> tuple[Commitment, tuple[float, ...]]:
    """Calibrate, and commit: the commitment, and the effective noise multiplier of rounds 1..T.

    The controller's initial release is part of the target. Nothing is written or sampled here.

    Raises:
        ConfigError: no noise keeps the target, or the controller cannot work at the noise that does.
    """
    sampling, privacy = round_sampling(config), config.privacy
    try:
        commitment, multipliers = calibrate(
            controller,
            sampling,
            config.rounds,
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            mode=privacy.mode,
            noise_shares=config.noise_shares,
        )
    except ValueError as error:
        raise ConfigError(f"privacy.epsilon = {privacy.epsilon:g}: {error}") from error
    initial = controller.initial(sampling)
    try:  # its queries must leave the update some budget; the layout is not known yet and does not matter to that
        state = controller.init(
            RunInfo(config.rounds, ((1,),), sampling, multipliers, commitment.order), PublicSignals(0, None)
        )
        plan = controller.plan(state, 0 if initial else 1)
        _refuse_unsendable(plan)
        if config.noise_shares is not None:
            config.noise_shares.grid_bits([part.noise_multiplier for part in plan.components()])
    except ValueError as error:
        raise ConfigError(f"strategy.controller = {config.strategy.controller!r}: {error}") from error
    except Exception as error:
        if ":" not in config.strategy.controller:
            raise
        raise ConfigError(  # whatever a controller of the user's own raises
            f"strategy.controller = {config.strategy.controller!r}: {type(error).__name__}: {error}{place(error)}"
        ) from error
    return replace(commitment, not_private=not_private_reason(config)), multipliers


def _refuse_unsendable(plan: Plan) -> None:
    """ValueError if nodes, which are sent a plan as JSON, could not rebuild it: every reply would fail, charged."""
    try:
        Plan.from_json(json.loads(json.dumps(plan.to_json())), plan.clip.arrays())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"its plan cannot be sent to the nodes: {type(error).__name__}: {error}; plan with the clip maps of "
            "privacy/clipping/norms.py and the queries of privacy/queries.py"
        ) from error
