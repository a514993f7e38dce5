"""The rounds of a private training: refuse or sample, train, release, checkpoint, evaluate, observe, record.

One loop for every kind of training: a server over clients, a client over its records, each private phase of several.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from client.models.tasks import Metrics
from privacy.mechanism import Release
from server import notice
from server.evaluation.best_round import BestRound
from server.evaluation.metrics import refuse_diverged
from server.run_folder.checkpoint import Checkpoint, Stopwatch, Times, check_room, load_checkpoint, save_checkpoint
from server.run_folder.errors import CannotResume
from server.run_folder.round_record import Presence, RoundRecord, released_values, validation_fields
from server.run_folder.telemetry import Telemetry
from strategies.controllers.controller import PublicSignals
from strategies.private_training import PrivateTraining
from strategies.server_update import ServerState

Evaluate = Callable[[Tensor, str], Metrics]
"""A function that measures a full adapter on a public split, ``"validation"`` or ``"test"``."""

Rounds = Callable[[int], bool]
"""A predicate: whether something is done behind the release of this round; 0 is an initial release."""


@dataclass
class Loop:
    """A private training, where it keeps its state, and what is done behind its releases.

    Attributes:
        folder: of the checkpoints.
        rounds: planned, without an initial release.
        epsilon: the run's target, for the records.
        evaluated, recorded, kept: behind which releases the validation loss is measured, a record written, a
            checkpoint made. With a record of 0 there is one of the model before the first release.
        noun: what people call a round.
        where: what the run's status says before the round.
        clock: of the run, or of the phase.
        offset, planned: rounds of the run before this training, and of the whole run; for the records.
        charged_before: releases of the run's ledger that belong to earlier trainings.
        presence: who was there in the last round, as far as everybody may know it.
        watched: told of every release once it is checkpointed; what it does changes nothing of the run.
        complete: given, perhaps twice, the served adapter once no release comes any more and the last one is
            checkpointed; nothing is measured of it before that, unless that costs something or chooses the best round.
        private: in place of ``evaluate`` on the validation set: releases what held-out units say of the served adapter
            and gives their estimate, None where it is not paid for. The model before the first release is not measured.
        best: the round whose adapter the run ends with, and how long it waits for a better one; None: the last round.
    """

    training: PrivateTraining
    evaluate: Evaluate
    telemetry: Telemetry
    folder: Path
    rounds: int
    epsilon: float
    evaluated: Rounds
    clock: Stopwatch
    recorded: Rounds = lambda round: True
    kept: Rounds = lambda round: True
    noun: str = "round"
    where: str = ""
    offset: int = 0
    planned: int = 0
    charged_before: int = 0
    presence: Callable[[], Presence | None] = lambda: None
    watched: Callable[[int, Release], None] = lambda round, release: None
    complete: Callable[[Tensor], None] = lambda served: None
    private: Callable[[], Metrics | None] | None = None
    best: BestRound | None = None
    ended_early: str = field(default="", init=False)
    """Why the run ended before its last round, though its budget paid for more."""
    _told: int = field(default=-1, init=False)
    """The last round of which there is a record; -1 before the first."""
    _charges_kept: int = field(default=0, init=False)
    _loss: float = field(default=math.nan, init=False)

    @property
    def state(self) -> ServerState:
        """The state of the training, which has begun."""
        assert self.training.state is not None, "begin() or go_on() first"
        return self.training.state

    def begin(self, start: Tensor) -> None:
        """Bring the training to its state before the first release, checkpoint that and record its metrics.

        Args:
            start: full adapter vector ``[size]``.
        """
        began = time.monotonic()
        metrics = None if self.private else self.evaluate(start, "validation")
        if metrics is not None:
            refuse_diverged(metrics, "before the first release")
        if metrics is not None and self.recorded(0):
            seconds, reason = time.monotonic() - began, self.training.ledger.not_private
            rounds = self.planned or self.rounds
            self.telemetry.round(
                RoundRecord.of_start(metrics, rounds=rounds, epsilon=self.epsilon, seconds=seconds, not_private=reason)
            )
        self.training.begin(start, PublicSignals(0, None if metrics is None else metrics.loss))
        head, records = self.training.ledger.head, self.telemetry.records()
        save_checkpoint(self.folder, Checkpoint.after(self.state, None, head, Times(), records))

    def go_on(self, start: Tensor) -> int:
        """Go back to the last checkpoint, and do what may have been missing behind its release.

        Args:
            start: an adapter of the run's form.

        Returns:
            How many releases the ledger holds of this training that the checkpoint does not: they stay spent.
        """
        first = self._form(start)
        checkpoint = load_checkpoint(self.folder, self.state)
        self.training.restore(checkpoint.state, checkpoint.update, checkpoint.answers)
        self.clock.before = checkpoint.taken
        round, released = self.state.round, checkpoint.update is not None
        self.telemetry.status("preparing", f"{self.where}resuming after {self.noun} {max(round, 0)}")
        kept = self.telemetry.rewind(self.offset + round if released else self.offset or -1)
        if released:
            last = kept[-1] if kept and kept[-1].phase != "start" else None
            recorded = last if last is not None and last.round == self.offset + round else None
            known = [record.validation_loss for record in kept if record.validation_loss is not None]
            self._loss = known[-1] if known else math.nan
            if self.best is not None:
                self.best.go_on(kept, self.offset + round, self.state.served)
            self._after_release(time.monotonic() - checkpoint.taken.round, recorded)
        return len(self.training.ledger.charges) - self.charged_before - (round - first)

    def skip(self, releases: int) -> None:
        """Count lost releases as done: every step of a phase is paid for by the committed step that was meant for it.

        Raises:
            CannotResume: the release was lost that the controller starts from.
        """
        if releases and self.state.round < 0:
            raise CannotResume(
                f"the run was interrupted in the first release of {self.where.rstrip(': ')}, which its controller "
                "starts from and which is spent: this run cannot go on"
            )
        self.training.state = replace(self.state, round=self.state.round + releases)

    def run(self) -> str | None:
        """Train until the last planned round or until the budget refuses; returns the refusal in words, or None.

        A release is checkpointed before anything else happens, so that what fails after it (evaluation on workers, a
        controller) loses no round.

        Raises:
            RoundFailed: a round could not be held; everything up to the last release is checkpointed.
        """
        self._charges_kept = len(self.training.ledger.charges)  # what is lost by now stays so
        with notice.protect(lambda: len(self.training.ledger.charges) > self._charges_kept):
            return self._run()

    def _run(self) -> str | None:
        refusal, unsaved = None, None
        while self.state.round < self.rounds and (refusal := self.training.refusal()) is None:
            if self.best is not None and self.best.has_ended:
                self.ended_early = f"ended early: {self.best.stale} evaluations in a row without a lower loss"
                break
            if unsaved is None:
                notice.end_if_given()
            start, number = time.monotonic(), self.training.next_release().round
            if self.recorded(number) or self.kept(number - 1):
                text = f"{self.noun} {number} of {self.rounds}" if number else "histogram of thresholds"
                self.telemetry.status("running", f"{self.where}{text}")
            if self.kept(number) or self.recorded(number):
                check_room(self.folder)  # before the charge: a release that cannot be kept is lost
            self.training.step()
            unsaved = self.state
            ends = self.state.round >= self.rounds or notice.is_given()
            if self.kept(self.state.round) or self.recorded(self.state.round) or ends:
                self._save(unsaved, time.monotonic() - start)
                unsaved = None
            assert self.training.release is not None
            self.watched(self.state.round, self.training.release)
            self._after_release(start, None)
        if unsaved is not None:  # the budget ended between two checkpoints
            self._save(unsaved, 0.0)
        if self._measures_first:
            self._tell_last()
        round, served = self.offset + self.state.round, self.state.served
        self.complete(served if self.best is None else self.best.chosen_adapter(round, served))
        self._tell_last()
        return refusal

    @property
    def _measures_first(self) -> bool:
        """Whether the last round is measured before the run completes: it costs something, or may be the best one."""
        return self.private is not None or self.best is not None

    def _tell_last(self) -> None:
        """Record the last round in any case."""
        round = self.state.round
        if self.training.release is not None and round > max(self._told, 0):
            metrics = self._measure()
            self._tell(metrics, 0.0)
            if self.best is not None and metrics is not None:
                self.best.take(self.offset + round, metrics.loss, self.state.served)

    def _measure(self) -> Metrics | None:
        """Measure the served adapter on what validates: public records, or held-out units, which is a release."""
        return self.evaluate(self.state.served, "validation") if self.private is None else self.private()

    def _form(self, start: Tensor) -> int:
        """Begin the training only for the form of its state; returns the round before the first release."""
        self.training.begin(start, PublicSignals(0, 1.0))
        return self.state.round

    def _save(self, state: ServerState, seconds: float) -> None:
        """Checkpoint a state as the last release left it, before the controller hears of that."""
        training, taken = self.training, replace(self.clock.times(), round=seconds)
        head, records = training.ledger.head, self.telemetry.records()
        save_checkpoint(self.folder, Checkpoint.after(state, training.release, head, taken, records))
        self._charges_kept = len(training.ledger.charges)

    def _after_release(self, start: float, recorded: RoundRecord | None) -> None:
        """Evaluate on public data where that is due, tell the controller, record it all.

        Args:
            start: when the round began, by ``time.monotonic``.
            recorded: what a record of this round holds already: the same loss gives the same plans.
        """
        round, metrics = self.state.round, None
        loss = None if recorded is None else recorded.validation_loss
        if round >= self.rounds and not self._measures_first:
            self.complete(self.state.served)
        if recorded is None and round > 0 and self.evaluated(round):
            metrics = self._measure()
            loss = None if metrics is None else metrics.loss
            if metrics is not None and round < self.rounds:
                refuse_diverged(metrics, f"after {self.noun} {round}")
        if self.private is not None and round > 0 and self.evaluated(round):  # of one that is lost, the one before
            self._loss = loss = self._loss if loss is None else loss
        self.training.observe(PublicSignals(round, loss, self.training.ledger.rho_spent))
        if recorded is not None:
            self._told = round
            return
        if self.recorded(round):
            self._tell(metrics, time.monotonic() - start)
        if self.best is not None and metrics is not None:
            self.best.take(self.offset + round, metrics.loss, self.state.served)

    def _tell(self, metrics: Metrics | None, seconds: float) -> None:
        self.telemetry.round(self._record(metrics, seconds))
        self._told = self.state.round

    def _record(self, metrics: Metrics | None, seconds: float) -> RoundRecord:
        """The record of the last release, of released and public values alone."""
        training, state, release = self.training, self.state, self.training.release
        assert release is not None
        noise_norm = release.plan.noise_norm(release.expected_units) * release.loudness
        update_norm = float(release.update.double().norm())
        bound = getattr(release.plan.clip, "bound", None)
        return RoundRecord(
            phase="round" if state.round else "histogram",
            round=self.offset + state.round,
            rounds=self.planned or self.rounds,
            epsilon_spent=training.ledger.epsilon_spent(),
            epsilon_budget=self.epsilon,
            noise_multiplier=release.plan.effective_noise_multiplier,
            expected_cohort=release.expected_units,
            seconds=seconds,
            clip_bound=None if bound is None else float(bound),
            **validation_fields(metrics),
            update_norm=update_norm if state.round else None,
            noise_norm=noise_norm if state.round else None,
            signal_estimate=math.sqrt(max(update_norm**2 - noise_norm**2, 0.0)) if state.round else None,
            extra=released_values(training.released_values()),
            not_private=training.ledger.not_private,
            presence=self.presence(),
        )
