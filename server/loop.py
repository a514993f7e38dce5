"""The rounds of a run: refuse or sample, train, release, evaluate, tell the controller, checkpoint, report."""

import math
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from torch import Tensor

from client.tasks import Metrics
from privacy.mechanism import Release
from server.checkpoint import save_checkpoint
from server.config import RunConfig
from server.evaluation import Evaluate
from server.telemetry import RoundRecord, Telemetry, released_values
from strategies.controller import PublicSignals
from strategies.dp_fedavg import DpFedAvg


def run_rounds(
    strategy: DpFedAvg, grid: Grid, evaluate: Evaluate, config: RunConfig, telemetry: Telemetry, run_folder: Path
) -> str | None:
    """Run until the last planned round or until the budget refuses; the refusal in words, or None.

    Raises:
        RoundFailed: a round could not be held; everything up to the round before is checkpointed.
    """
    state = strategy.state
    assert state is not None, "begin() or restore a checkpoint first"
    while state.round < config.rounds:
        if (refusal := strategy.refusal()) is not None:
            return refusal
        start = time.monotonic()
        round, _, sampling = strategy.next_plan()
        telemetry.status("running", f"round {round} of {config.rounds}" if round else "histogram of thresholds")
        messages = list(strategy.configure_train(round, ArrayRecord(), ConfigRecord(), grid))
        replies = list(grid.send_and_receive(messages, timeout=config.engine.round_timeout)) if messages else []
        strategy.aggregate_train(round, replies)
        state, release = strategy.state, strategy.release
        assert state is not None
        assert release is not None
        metrics = None
        if round > 0 and (round % config.evaluation.every == 0 or round == config.rounds):
            metrics = evaluate(state.served, "validation")
        loss = None if metrics is None else metrics.loss
        strategy.observe(PublicSignals(round, loss, strategy.ledger.rho_spent))
        state = strategy.state
        assert state is not None
        save_checkpoint(run_folder, state, strategy.ledger.head)
        seconds = time.monotonic() - start
        telemetry.round(_record(strategy, release, round, sampling.expected_units, metrics, seconds, config))
    return None


def _record(
    strategy: DpFedAvg,
    release: Release,
    round: int,
    expected_cohort: float,
    metrics: Metrics | None,
    seconds: float,
    config: RunConfig,
) -> RoundRecord:
    """What may be shown of a round: released values and public ones."""
    assert strategy.state is not None
    noise_norm = _noise_norm(release)
    update_norm = float(release.update.double().norm())
    bound = getattr(release.plan.clip, "bound", None)
    return RoundRecord(
        phase="round" if round else "histogram",
        round=round,
        rounds=config.rounds,
        epsilon_spent=strategy.ledger.spent(),
        epsilon_budget=config.privacy.epsilon,
        noise_multiplier=release.plan.effective_noise_multiplier,
        expected_cohort=expected_cohort,
        seconds=seconds,
        clip_bound=None if bound is None else float(bound),
        validation_loss=None if metrics is None else metrics.loss,
        validation_accuracy=None if metrics is None else metrics.accuracy,
        update_norm=update_norm if round else None,
        noise_norm=noise_norm if round else None,
        signal_estimate=math.sqrt(max(update_norm**2 - noise_norm**2, 0.0)) if round else None,
        extra=released_values(strategy.controller.released_values(strategy.state.controller)),
        not_private=strategy.ledger.not_private,
    )


def _noise_norm(release: Release) -> float:
    """Expected L2 norm of the noise in the released update: decoding is linear in the noise of every clip map."""
    scale: Tensor = release.update.new_full((release.plan.clip.dim,), release.plan.noise_multiplier).double()
    return float(release.plan.clip.decode(scale, release.expected_units).norm())
