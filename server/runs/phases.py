"""A recipe's run: phase after phase on one adapter and one ledger, and what it leaves behind."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from client.data.prepare import prepare
from client.data.spec import PreparedData
from client.engine.engine import Engine
from client.engine.local_training import LocalTraining
from client.models.base import load_base
from client.models.lora import adapter_layout, initial_adapter
from client.record_level.training import controller_of, private_training, setting_of
from client.record_level.units import UnitIndex
from client.worker import Job, make_engine
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError
from server.evaluation.rouge import adapter_rouge
from server.run_folder.errors import CannotResume
from server.run_folder.names import LEDGER_FILE
from server.run_folder.phase_progress import PhaseFolder, PhaseResult, Watch, reopened_ledger
from server.run_folder.progress import owned
from server.runs.assembly import data_spec, lora_spec
from server.runs.guarantee import guarantee_of
from server.runs.phase_artefacts import PhasesResult, stamp, write_phases_artefacts
from server.runs.phase_config import PhasesConfig
from server.runs.phase_plan import TEXTS, DpPhase, NonPrivatePhase, Phase, plan_noise
from server.runs.record_level_assembly import refuse_unplannable
from strategies.adapter.layout import AdapterLayout
from strategies.adapter.trainable import TrainedSubset
from strategies.controllers.controller import PublicSignals

log = logging.getLogger(__name__)


class PhasesRun:
    """A recipe, its data in every form that a phase reads, and an engine.

    Raises:
        ConfigError, ValueError: whatever cannot work, before anything is trained.
    """

    def __init__(self, config: PhasesConfig) -> None:
        self.config = config
        recipe, run = config.recipe, config.run
        spec = data_spec(run)
        self.data: dict[tuple[str, str], PreparedData] = {}
        for phase in recipe.phases:
            key = self._key(phase)
            if key not in self.data:
                self.data[key] = prepare(spec.but(sensitive=key[0], detector=key[1]))
        self.plain = prepare(spec)
        self.test = self.plain.test
        sizes = {len(data.train) for data in self.data.values()} | {len(self.plain.train)}
        if len(sizes) > 1:
            raise ConfigError(f"the phases' texts must have equal numbers of records, got {sorted(sizes)}")
        self.index = {key: self._indexed(data) for key, data in self.data.items()}
        self.population = len(self._indexed(self.plain))
        self.planned = plan_noise(recipe, self.population)
        self.promise = guarantee_of(recipe, self.planned)
        model, _ = load_base(run.model.name, run.model.task, self.plain.num_labels)
        self.spec = lora_spec(run, model, TrainedSubset())
        self.layout: AdapterLayout = adapter_layout(model, self.spec)
        self.start = initial_adapter(self.layout, model, run.seed)
        for phase, multipliers in zip(recipe.private, self.planned.multipliers, strict=True):
            silo = recipe.silo(phase, None)
            setting = setting_of(silo, self.population, self.layout, multipliers, None)
            refuse_unplannable(controller_of(silo), setting, f"phase {phase.name!r}, controller = {phase.controller!r}")
        job = Job(
            model=run.model.name,
            task=run.model.task,
            num_labels=self.plain.num_labels,
            spec=self.spec,
            local=run.local,
            data=str(self.plain.folder),
            seed=run.seed,
            sequential=run.engine.sequential,
            precision=run.engine.precision,
            token_budget=run.engine.token_budget,
            prefix_cache_mb=0,
        )
        self.engine: Engine = make_engine(job)

    def train(self, folder: Path, done: Sequence[PhaseResult] = ()) -> PhasesResult:
        """Run all phases, or those that a run broken off in `folder` has left.

        The ledger of the private phases is made in `folder` and charged before any noise is drawn. Whether the folder
        is of these settings is for the caller to check, see :func:`server.run_folder.resume.check_origin`.

        Args:
            folder: exists.
            done: results of the first phases, all without noise, from a run with the same settings and data: such a
                phase gives the same adapter again.

        Raises:
            CannotResume, CorruptRun: why the run in `folder` cannot go on.
        """
        phases = self.config.recipe.phases
        if [phase.name for phase in phases[: len(done)] if isinstance(phase, NonPrivatePhase)] != [
            result.name for result in done
        ]:
            raise ValueError(f"done must be the first phases, without noise, got {[result.name for result in done]}")
        with owned(folder), ExitStack() as open_files:
            ledger = self._ledger(folder)
            if ledger is not None:
                open_files.enter_context(ledger)
            results = list(done)
            for number in range(len(done), len(phases)):
                results.append(self._phase(number, results[-1].adapter if results else self.start, folder, ledger))
            adapter = results[-1].adapter
            result = PhasesResult(
                self.promise,
                self.planned,
                tuple(results),
                self.engine.evaluate(adapter, self.test),
                self.engine.evaluate(adapter, self.plain.validation),
                adapter,
                self.spec,
                self.layout.dim,
                self.population,
                self.plain.label_names,
                adapter_rouge(self.config.run, self.test, adapter, self.layout, self.spec),
            )
            write_phases_artefacts(folder, self.config, result, self.layout, ledger)
        return result

    def _ledger(self, folder: Path) -> Ledger | None:
        """Made, or found again; None if no phase has noise."""
        if not self.planned.floor:
            return None
        commitment = self.planned.commitment(self.config.recipe, self.population, self.promise.not_private)
        ledger = reopened_ledger(folder, len(self.config.recipe.phases))
        if ledger is None:
            return Ledger.create(folder / LEDGER_FILE, commitment)
        if ledger.commitment != commitment:
            ledger.close()
            raise CannotResume(
                f"the ledger in {folder} is committed to other releases than these phases plan; go back to the "
                "settings and the code of its start"
            )
        return ledger

    def _phase(self, number: int, adapter: Tensor, folder: Path, ledger: Ledger | None) -> PhaseResult:
        """The phase of this number (from 0) from `adapter` on; what `folder` holds of it is not done again."""
        phase, place = self.config.recipe.phases[number], PhaseFolder(folder, number + 1)
        stamp(self.promise, folder, place.path)
        if (kept := place.result(phase.name, self.layout.size)) is not None:
            log.info("phase %s: done before", phase.name)
            return kept
        watch = Watch()
        if isinstance(phase, NonPrivatePhase):
            adapter = self._ordinary(phase, adapter)
        else:
            assert ledger is not None
            adapter = self._private(number, adapter, ledger, place, watch)
        taken = watch.times()
        loss = self.engine.evaluate(adapter, self.plain.validation).loss
        result = PhaseResult(phase.name, taken.run, taken.processor, loss, adapter)
        place.finish(result)
        log.info("phase %s: %.0f s, validation loss %.4f", phase.name, taken.run, loss)
        return result

    def _ordinary(self, phase: NonPrivatePhase, adapter: Tensor) -> Tensor:
        local = LocalTraining.of(phase)
        self.engine.train_factors("both")
        records = self.data[self._key(phase)].train
        (change,) = self.engine.train_all(adapter, [records], local, [self.config.recipe.seed])
        start = self.layout.trainable(adapter)
        return self.layout.with_trainable(adapter, start + change.to(start))

    def _private(self, number: int, adapter: Tensor, ledger: Ledger, place: PhaseFolder, watch: Watch) -> Tensor:
        before = sum(isinstance(phase, DpPhase) for phase in self.config.recipe.phases[:number])
        phase = self.config.recipe.private[before]
        charged = len(ledger.charges) - self.planned.releases(before)
        # every phase draws its batches under a secret of its own
        training = private_training(
            self.config.recipe.silo(phase, self.promise.not_private),
            self.engine,
            self.index[self._key(phase)],
            ledger,
            self.planned.multipliers[before],
            place.sampler(charged),
        )
        reads = training.planner.controller.reads_validation

        def observe() -> None:
            training.observe(self._public(training.state.adapter, training.state.round, reads, ledger))

        training.begin(adapter, self._public(adapter, 0, reads, ledger))
        watch.before = place.go_on(training, charged, observe)
        while training.state.round < phase.steps:
            training.step()
            place.save(training, watch.times())
            observe()
        served: Tensor = training.state.served
        return served

    def _public(self, adapter: Tensor, step: int, reads: bool, ledger: Ledger) -> PublicSignals:
        loss = self.engine.evaluate(adapter, self.plain.validation).loss if reads or not step else None
        return PublicSignals(step, loss, ledger.rho_spent)

    def _key(self, phase: Phase) -> tuple[str, str]:
        """What of the data's settings a phase's text depends on; the original text on no detector."""
        use = TEXTS[phase.text]
        return use, "regex" if use == "none" else self.config.recipe.detector_of(phase)

    def _indexed(self, data: PreparedData) -> UnitIndex:
        recipe = self.config.recipe
        return UnitIndex.of(data.train, grouped=recipe.unit != "record", most=recipe.records_per_unit, seed=recipe.seed)
