"""A run in phases, with and without noise, on one adapter and one ledger.

An interrupted phase without noise is trained again from its start, to the same adapter. One with noise continues
behind its last checkpoint: its loop is that of every private training (:mod:`server.runs.loop`).
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from torch import Tensor

from client.data.prepare import prepare
from client.data.prepared import PreparedData
from client.engine.engine import Engine
from client.engine.local_training import LocalTraining
from client.models.tasks import Metrics
from client.record_level.calibration import controller_of
from client.record_level.dp_sgd import refuse_votes
from client.record_level.training import info_of, private_training
from client.record_level.units import UnitIndex
from client.worker import make_engine
from privacy.commitment import Commitment
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from server.config.account import account_of
from server.config.load import ConfigError
from server.config.methods import methods
from server.evaluation.answers import adapter_answers
from server.run_folder import handed_on
from server.run_folder.checkpoint import Stopwatch, checkpoint_folder
from server.run_folder.errors import CannotResume
from server.run_folder.names import LEDGER_FILE
from server.run_folder.phase_progress import PhaseFolder, PhaseResult, charges_of, reopened_ledger
from server.run_folder.resume import Resumed, note_resumed, read_resumed
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Telemetry, read_metrics
from server.runs import guarantee
from server.runs.artefacts import Final, Outcome, measures, stamp_folders
from server.runs.assembly import data_spec, make_assembly
from server.runs.commitment import refuse_unplannable
from server.runs.lifecycle import Run
from server.runs.loop import Loop
from server.runs.phase_plan import (
    TEXTS,
    DpPhase,
    NonPrivatePhase,
    Phase,
    PhasesConfig,
    PlannedNoise,
    plan_noise,
)
from server.runs.public_data import train_without_noise

log = logging.getLogger(__name__)

RECORDED_EVERY = 10
"""Private steps between two records of a phase."""


class PhasesRun:
    """A run in phases that is ready to train: its data in every form that a phase reads, and an engine.

    Args:
        folder: of the run; what was calibrated for it is taken from there.

    Raises:
        ConfigError, ValueError: whatever cannot work, before anything is trained.
    """

    def __init__(self, config: PhasesConfig, folder: Path | None = None) -> None:
        self.config = config
        run = config.run
        spec = data_spec(run)
        self.data: dict[tuple[str, str], PreparedData] = {}
        for phase in config.phases:
            key = self.key(phase)
            if key not in self.data:
                self.data[key] = prepare(spec.replace(sensitive=key[0], detector=key[1]))
        self.plain = prepare(spec)
        self.test = self.plain.test
        sizes = {len(data.train) for data in self.data.values()} | {len(self.plain.train)}
        if len(sizes) > 1:
            raise ConfigError(f"the phases' texts must have equal numbers of records, got {sorted(sizes)}")
        self.index = {key: self._indexed(data) for key, data in self.data.items()}
        self.population = len(self._indexed(self.plain))
        self.planned = self._noise(folder)
        self.guarantee = guarantee.guarantee_of(config, self.planned)
        self.assembly = make_assembly(run, methods(run), self.plain, folder)
        for phase, multipliers in zip(config.private_phases, self.planned.multipliers, strict=True):
            site = config.record_level(phase, None)
            info = info_of(site, self.population, self.assembly.layout, multipliers, None)
            what = f"phase {phase.name!r}, controller = {phase.controller!r}"
            refuse_unplannable(controller_of(site), info, what, refuse_votes)

    def _noise(self, folder: Path | None) -> PlannedNoise:
        """Calibrate the noise, or take what was handed on in the run's folder."""
        config, tables = self.config, self.config.phase_tables()
        found = None if folder is None else handed_on.read_noise(folder, config.run, PlannedNoise.from_json, tables)
        if found is None or not found.is_of(config, self.population):
            found = plan_noise(config, self.population)
            if folder is not None:
                handed_on.write_noise(folder, config.run, found.to_json(), tables)
        return found

    @cached_property
    def engine(self) -> Engine:
        """The engine of all phases, on a base model of its own."""
        return make_engine(self.assembly.job.replace(prefix_cache_mb=0))

    def train(
        self,
        folder: Path,
        done: Sequence[PhaseResult] = (),
        telemetry: Telemetry | None = None,
        complete: Callable[[Tensor, Ledger | None], None] = lambda adapter, ledger: None,
    ) -> tuple[PhaseResult, ...]:
        """Run all phases, or those that an interrupted run in `folder` has left.

        The ledger of the private phases is made in `folder` and charged before any noise is drawn. The folder is the
        caller's (:func:`server.run_folder.progress.hold_folder`), who also checks that it is of these settings.

        Args:
            folder: exists.
            done: results of the first phases, all without noise, from a run with the same settings and data: such a
                phase gives the same adapter again.
            telemetry: of the run; None keeps one in `folder` without TensorBoard.
            complete: told, perhaps twice, the last phase's adapter before anything is measured of it.

        Raises:
            CannotResume, CorruptRun: why the run in `folder` cannot be resumed.
        """
        phases = self.config.phases
        if [phase.name for phase in phases[: len(done)] if isinstance(phase, NonPrivatePhase)] != [
            result.name for result in done
        ]:
            raise ValueError(f"done must be the first phases, without noise, got {[result.name for result in done]}")
        with ExitStack() as open_files:
            ledger = self.ledger(folder)
            if ledger is not None:
                open_files.enter_context(ledger)
            if telemetry is None:
                telemetry = open_files.enter_context(Telemetry(folder, tensorboard=False))
            results = list(done)
            if not done and not read_metrics(folder):
                telemetry.round(self._at_start())
            for number in range(len(done), len(phases)):
                start = results[-1].adapter if results else self.assembly.start
                last = number == len(phases) - 1
                told = (lambda adapter: complete(adapter, ledger)) if last else (lambda adapter: None)
                results.append(self._phase(number, start, folder, ledger, telemetry, told))
            complete(results[-1].adapter, ledger)
        return tuple(results)

    @property
    def commitment(self) -> Commitment:
        """The commitment of the private phases, of which there is one."""
        return self.planned.commitment(self.config, self.population, self.guarantee.not_private)

    def ledger(self, folder: Path) -> Ledger | None:
        """Make or find again the ledger of the private phases; None if no phase has noise."""
        if not self.planned.floor:
            return None
        commitment, account = self.commitment, account_of(self.config.run)
        ledger = reopened_ledger(folder, len(self.config.phases))
        if ledger is None:
            return debited_ledger(None, lambda: Ledger.create(folder / LEDGER_FILE, commitment), account, commitment)
        if ledger.commitment != commitment:
            ledger.close()
            raise CannotResume(
                f"the ledger in {folder} is committed to other releases than these phases plan; go back to the "
                "settings and the code of its start"
            )
        return debited_ledger(ledger, lambda: ledger, account, commitment)

    def evaluate(self, adapter: Tensor, split: str) -> Metrics:
        """Measure a full adapter on the public validation records, or on the test set."""
        return self.engine.evaluate(adapter, self.test if split == "test" else self.plain.validation)

    def _at_start(self) -> RoundRecord:
        """Measure the model before the first phase and make its record."""
        began, run = time.monotonic(), self.config.run
        metrics = self.evaluate(self.assembly.start, "validation")
        return RoundRecord.of_start(
            metrics,
            rounds=sum(phase.steps for phase in self.config.private_phases),
            epsilon=run.privacy.epsilon,
            seconds=time.monotonic() - began,
            not_private=self.guarantee.not_private,
        )

    def _phase(
        self,
        number: int,
        adapter: Tensor,
        folder: Path,
        ledger: Ledger | None,
        telemetry: Telemetry,
        complete: Callable[[Tensor], None],
    ) -> PhaseResult:
        """Train the phase of this number (from 0) from `adapter` on; what `folder` holds of it is not done again."""
        phase, place = self.config.phases[number], PhaseFolder(folder, number + 1)
        stamp_folders(self.guarantee.to_json(), folder, place.path)
        if (kept := place.result(phase.name, self.assembly.layout.size)) is not None:
            log.info("phase %s: done before", phase.name)
            return kept
        clock = Stopwatch()
        where = f"phase {number + 1} of {len(self.config.phases)}, {phase.name!r}: "
        if isinstance(phase, NonPrivatePhase):
            telemetry.status("running", f"{where}training without noise")
            adapter = self._without_noise(phase, adapter)
        else:
            assert ledger is not None
            adapter = self._private(number, adapter, ledger, place, telemetry, clock, where, complete)
        complete(adapter)
        taken = clock.times()
        loss = self.evaluate(adapter, "validation").loss
        result = PhaseResult(phase.name, taken.run, taken.processor, loss, adapter)
        place.finish(result)
        log.info("phase %s: %.0f s, validation loss %.4f", phase.name, taken.run, loss)
        return result

    def _without_noise(self, phase: NonPrivatePhase, adapter: Tensor) -> Tensor:
        self.engine.train_factors("both")
        records = self.data[self.key(phase)].train
        return train_without_noise(self.engine, adapter, records, LocalTraining.of(phase), self.config.run.seed)

    def _private(
        self,
        number: int,
        adapter: Tensor,
        ledger: Ledger,
        place: PhaseFolder,
        telemetry: Telemetry,
        clock: Stopwatch,
        where: str,
        complete: Callable[[Tensor], None],
    ) -> Tensor:
        private = self.config.private_phases
        before = sum(isinstance(phase, DpPhase) for phase in self.config.phases[:number])
        phase, charged_before = private[before], self.planned.releases(before)
        # every phase draws its batches under a secret of its own
        training = private_training(
            self.config.record_level(phase, self.guarantee.not_private),
            self.engine,
            self.index[self.key(phase)],
            ledger,
            self.planned.multipliers[before],
            place.sampler(len(ledger.charges) - charged_before),
        )
        reads = training.controller.reads_validation
        loop = Loop(
            training,
            self.evaluate,
            telemetry,
            place.path,
            phase.steps,
            self.config.run.privacy.epsilon,
            evaluated=lambda step: reads,
            clock=clock,
            recorded=lambda step: step > 0 and (step % RECORDED_EVERY == 0 or step == phase.steps),
            noun="step",
            where=where,
            offset=sum(earlier.steps for earlier in private[:before]),
            planned=sum(each.steps for each in private),
            charged_before=charged_before,
            complete=complete,
        )
        if checkpoint_folder(place.path) is None:
            loop.begin(adapter)
            lost = len(ledger.charges) - charged_before
        else:
            lost = loop.go_on(adapter)
        loop.skip(lost)
        loop.run()
        served: Tensor = loop.state.served
        return served

    def key(self, phase: Phase) -> tuple[str, str]:
        """The settings that a phase's text depends on: its use and its detector.

        The original text depends on no detector.
        """
        use = TEXTS[phase.text]
        return use, "regex" if use == "none" else self.config.detector_of(phase)

    def _indexed(self, data: PreparedData) -> UnitIndex:
        run = self.config.run
        grouped = run.privacy.unit == "group"
        return UnitIndex.of(data.train, grouped=grouped, most=run.site.records_per_unit, seed=run.seed)


def run_phases(run: Run, config: PhasesConfig) -> None:
    """Run a training in phases from configuration to artefacts."""
    run.status("preparing data, model and noise")
    ready = PhasesRun(config, run.folder)
    log.info("%s", ready.guarantee.sentence)
    run.note_start(ready.plain, phases=config.phase_tables())
    if run.resumes:
        charges = charges_of(run.folder)
        unreleased = sum(charge.released_at is None for charge in charges)
        note_resumed(run.folder, Resumed(len(charges), time.time(), unreleased, tuple(run.changes)))

    def keep(adapter: Tensor, ledger: Ledger | None) -> None:
        if run.kept is None:
            statement = guarantee.phases_statement(config, ready.guarantee, ledger)
            run.keep(Final(adapter, ready.assembly.layout, ready.assembly.spec), statement, ready.plain)

    results = ready.train(run.folder, telemetry=run.telemetry, complete=keep)
    adapter, labels = results[-1].adapter, ready.plain.label_names
    assert run.kept is not None
    final = run.kept.adapter
    outcome = Outcome(
        data=ready.plain,
        measures=measures(
            lambda split: ready.evaluate(adapter, split),
            None,
            lambda: adapter_answers(config.run, ready.test, *final, run.telemetry),
            labels,
        ),
        rounds_done=sum(phase.steps for phase in config.private_phases),
        seconds=sum(result.seconds for result in results),
        stopped=None,
        dimension=ready.assembly.layout.dim,
        further={
            "phases": [result.to_json() for result in results],
            "population": ready.population,
            "guarantee": ready.guarantee.sentence,
            "resumed": [asdict(resumed) for resumed in read_resumed(run.folder)],
        },
    )
    run.finish(outcome, f"{len(results)} phases done")
