"""The rounds of a run: refuse or sample, train, release, checkpoint, evaluate, tell the controller, record."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from client.models.tasks import Metrics
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from server.config.schema import RunConfig
from server.evaluation.metrics import Evaluate
from server.network.grid import answers
from server.run_folder.checkpoint import Checkpoint, Times, save_checkpoint
from server.run_folder.round_record import RoundRecord, released_values
from server.run_folder.telemetry import Telemetry
from strategies.controllers.controller import Controller, PublicSignals
from strategies.dp_fedavg import DpFedAvg
from strategies.private_training import ServerState


def run_rounds(
    strategy: DpFedAvg,
    grid: Grid,
    evaluate: Evaluate,
    config: RunConfig,
    telemetry: Telemetry,
    run_folder: Path,
    *,
    elapsed: Callable[[], float] = time.monotonic,
) -> str | None:
    """Run until the last planned round or until the budget refuses; the refusal in words, or None.

    A release is checkpointed before anything else happens, so that what fails after it (evaluation on workers, a
    controller) loses no round: :func:`finish_round` is done again when the run goes on.

    Args:
        elapsed: wall seconds that the run has taken, for the checkpoints.

    Raises:
        RoundFailed: a round could not be held; everything up to the last release is checkpointed.
    """
    while _state(strategy).round < config.rounds:
        if (refusal := strategy.refusal()) is not None:
            return refusal
        start = time.monotonic()
        round, _, _ = strategy.next_plan()
        telemetry.status("running", f"round {round} of {config.rounds}" if round else "histogram of thresholds")
        messages = list(strategy.configure_train(round, ArrayRecord(), ConfigRecord(), grid))
        strategy.aggregate_train(round, answers(grid, messages, config.engine.round_timeout))
        taken = Times(elapsed(), time.monotonic() - start)
        save_checkpoint(run_folder, Checkpoint.after(_state(strategy), strategy.release, strategy.ledger.head, taken))
        finish_round(strategy, evaluate, config, telemetry, start)
    return None


def finish_round(strategy: DpFedAvg, evaluate: Evaluate, config: RunConfig, telemetry: Telemetry, start: float) -> None:
    """What follows a release: evaluate on public data, tell the controller, record it all.

    ``start`` is when the round began, by ``time.monotonic``.
    """
    round, metrics = _state(strategy).round, None
    if round > 0 and (round % config.evaluation.every == 0 or round == config.rounds):
        metrics = evaluate(_state(strategy).served, "validation")
    _tell(strategy, None if metrics is None else metrics.loss)
    telemetry.round(record_of(strategy, strategy.controller, metrics, time.monotonic() - start, config))


def go_on(
    strategy: DpFedAvg, evaluate: Evaluate, config: RunConfig, telemetry: Telemetry, checkpoint: Checkpoint
) -> None:
    """Put a strategy where a checkpoint left it, and do what may have been missing behind its release."""
    strategy.restore(checkpoint.state, checkpoint.update, checkpoint.answers)
    round = checkpoint.state.round
    kept = telemetry.rewind(round if checkpoint.update is not None else -1)
    if checkpoint.update is None:
        return
    if kept and kept[-1].round == round:  # it was evaluated and recorded: the same loss gives the same plans
        _tell(strategy, kept[-1].validation_loss)
    else:
        finish_round(strategy, evaluate, config, telemetry, time.monotonic() - checkpoint.taken.round)


def _tell(strategy: DpFedAvg, loss: float | None) -> None:
    strategy.observe(PublicSignals(_state(strategy).round, loss, strategy.ledger.rho_spent))


def _state(strategy: DpFedAvg) -> ServerState:
    assert strategy.state is not None, "begin() or restore a checkpoint first"
    return strategy.state


class Trained(Protocol):
    """A strategy or a silo's training after a release."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def state(self) -> ServerState | None: ...
    @property
    def release(self) -> Release | None: ...


def record_of(
    training: Trained, controller: Controller[Any], metrics: Metrics | None, seconds: float, config: RunConfig
) -> RoundRecord:
    """What may be shown of the last release: released values and public ones."""
    state, release = training.state, training.release
    assert state is not None
    assert release is not None
    round = state.round
    noise_norm = release.plan.noise_norm(release.expected_units)
    update_norm = float(release.update.double().norm())
    bound = getattr(release.plan.clip, "bound", None)
    return RoundRecord(
        phase="round" if round else "histogram",
        round=round,
        rounds=config.rounds,
        epsilon_spent=training.ledger.spent(),
        epsilon_budget=config.privacy.epsilon,
        noise_multiplier=release.plan.effective_noise_multiplier,
        expected_cohort=release.expected_units,
        seconds=seconds,
        clip_bound=None if bound is None else float(bound),
        validation_loss=None if metrics is None else metrics.loss,
        validation_accuracy=None if metrics is None else metrics.accuracy,
        update_norm=update_norm if round else None,
        noise_norm=noise_norm if round else None,
        signal_estimate=math.sqrt(max(update_norm**2 - noise_norm**2, 0.0)) if round else None,
        extra=released_values(controller.released_values(state.controller)),
        not_private=training.ledger.not_private,
    )
