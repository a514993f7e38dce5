"""One silo's run, from configuration to artefacts: the same folder as a federation's, and the same way of going on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from client.models.tasks import Metrics
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.training import private_training, record_level_engine
from privacy.ledger.ledger import Ledger
from server.config.schema import RunConfig
from server.evaluation.rouge import adapter_rouge
from server.run_folder.checkpoint import Checkpoint, Times, checkpoint_folder, load_checkpoint, save_checkpoint
from server.run_folder.names import CONFIG_FILE, LEDGER_FILE
from server.run_folder.provenance import write_environment
from server.run_folder.resume import Resumed, check_same_run, note_resumed, write_origin
from server.run_folder.telemetry import Telemetry
from server.runs.artefacts import RunResult, write_artefacts
from server.runs.assembly import make_sampler
from server.runs.guarantee import TRUST, not_covered
from server.runs.loop import record_of
from server.runs.public_data import PublicTraining, spanned
from server.runs.record_level_assembly import RecordLevelAssembly, assemble_record_level
from strategies.controllers.controller import PublicSignals

Evaluate = Callable[[Tensor, str], Metrics]


@dataclass(frozen=True)
class _Run:
    """What the steps of a run need."""

    ready: RecordLevelAssembly
    training: PrivateSgd
    evaluate: Evaluate
    telemetry: Telemetry
    folder: Path

    @property
    def config(self) -> RunConfig:
        return self.ready.assembly.config

    @property
    def round(self) -> int:
        return int(self.training.state.round)

    def due(self) -> bool:
        """Whether the step just done is evaluated and recorded."""
        return self.round > 0 and (self.round % self.config.evaluation.every == 0 or self.round == self.config.rounds)


def run_record_level(
    config: RunConfig, folder: Path, telemetry: Telemetry, ledger: Ledger | None = None, *, other_code: bool = False
) -> None:
    """Train one silo.

    Args:
        config: with ``config.alone``.
        folder: of the run, exists.
        telemetry: of the run.
        ledger: of the run that goes on, held; None starts one.
        other_code: go on although the code has changed.
    """
    started = time.monotonic()
    telemetry.status("preparing", "preparing data, model and noise")
    ready = assemble_record_level(config)
    assembly = ready.assembly
    changes = (
        []
        if ledger is None
        else check_same_run(config, assembly.data.folder.name, assembly.commitment, folder, ledger, other_code)
    )
    (folder / CONFIG_FILE).write_text(config.to_toml())
    write_environment(folder)
    public = PublicTraining.of(assembly)
    engine = record_level_engine(assembly.job, config.silo.gradients)
    inside = spanned(assembly, engine)
    if ledger is None:
        write_origin(folder, config, assembly.data.folder.name)
    with ledger or Ledger.create(folder / LEDGER_FILE, assembly.commitment) as ledger:
        data = assembly.data
        splits = {"validation": data.validation.select(np.arange(public.used, len(data.validation))), "test": data.test}

        def evaluate(adapter: Tensor, split: str) -> Metrics:
            return engine.evaluate(adapter, splits[split])

        multipliers, sampler = assembly.setting.noise_multipliers, make_sampler(config, folder)
        training = private_training(ready.silo, engine, ready.index, ledger, multipliers, sampler)
        run = _Run(ready, inside.around(training), evaluate, telemetry, folder)
        before = 0.0
        if checkpoint_folder(folder) is not None:
            before = _go_on(run, changes)
        else:
            _begin(run, public, inside.start)

        def elapsed() -> float:
            return before + time.monotonic() - started

        refusal = _steps(run, elapsed)
        _finish(run, elapsed, refusal)
    telemetry.status("stopped-budget" if refusal else "completed", refusal or f"{config.rounds} steps done")


def _begin(run: _Run, public: PublicTraining, start: Tensor) -> None:
    if run.config.public.warm_start_epochs:
        run.telemetry.status("preparing", "warm start on public records")
    start = public.warm_start(start)
    run.training.begin(start, PublicSignals(0, run.evaluate(start, "validation").loss))
    save_checkpoint(run.folder, Checkpoint.after(run.training.state, None, run.training.ledger.head, Times()))


def _go_on(run: _Run, changes: list[str]) -> float:
    """Back to where the last checkpoint left the run; the seconds it had taken."""
    training = run.training
    training.begin(run.ready.assembly.start, PublicSignals(0, 1.0))  # only for the form of a state
    first = run.round
    checkpoint = load_checkpoint(run.folder, training.state)
    round = checkpoint.state.round
    run.telemetry.status("preparing", f"resuming after step {max(round, 0)}")
    lost = len(training.ledger.charges) - (round - first)
    note_resumed(run.folder, Resumed(round, time.time(), lost, tuple(changes)))
    training.restore(checkpoint.state, checkpoint.update, checkpoint.answers)
    kept = run.telemetry.rewind(round if checkpoint.update is not None else -1)
    if checkpoint.update is not None:
        told = kept[-1].validation_loss if kept and kept[-1].round == round else None
        _after(run, checkpoint.taken.round, told)
    return checkpoint.taken.run


def _steps(run: _Run, elapsed: Callable[[], float]) -> str | None:
    """Step until all are done, or until the budget refuses; the refusal in words, or None."""
    training, config = run.training, run.config
    while run.round < config.rounds:
        if (refusal := training.refusal()) is not None:
            if run.round > 0 and not run.due():  # the last step is told of, wherever it fell
                metrics = run.evaluate(training.state.served, "validation")
                run.telemetry.round(record_of(training, training.planner.controller, metrics, 0.0, config))
            return refusal
        start = time.monotonic()
        if run.round % config.silo.checkpoint_every == 0:
            run.telemetry.status("running", f"step {run.round + 1} of {config.rounds}")
        training.step()
        if run.due() or run.round % config.silo.checkpoint_every == 0:
            taken = Times(elapsed(), time.monotonic() - start)
            save_checkpoint(run.folder, Checkpoint.after(training.state, training.release, training.ledger.head, taken))
        _after(run, time.monotonic() - start)
    return None


def _after(run: _Run, seconds: float, told: float | None = None) -> None:
    """What follows a release: evaluate where that is due, tell the controller, record.

    ``told`` is the validation loss that a record of this step holds already.
    """
    training, metrics = run.training, None
    if told is None and run.due():
        metrics = run.evaluate(training.state.served, "validation")
        told = metrics.loss
    training.observe(PublicSignals(run.round, told, training.ledger.rho_spent))
    if metrics is not None or run.round == 0:
        run.telemetry.round(record_of(training, training.planner.controller, metrics, seconds, run.config))


def _finish(run: _Run, elapsed: Callable[[], float], refusal: str | None) -> None:
    run.telemetry.status("running", "evaluating on the test set")
    state, assembly = run.training.state, run.ready.assembly
    validation, test = run.evaluate(state.served, "validation"), run.evaluate(state.served, "test")
    test_records, layout, spec = assembly.data.test, assembly.layout, assembly.spec
    rouge = adapter_rouge(run.config, test_records, state.served, layout, spec, run.telemetry)
    result = RunResult(validation, test, run.round, elapsed(), refusal, rouge)
    write_artefacts(
        run.folder,
        assembly,
        state,
        run.training.ledger,
        result,
        trust_model=TRUST,
        not_covered=not_covered(run.config, steered=assembly.methods.steered),
    )
