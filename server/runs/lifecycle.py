"""The life of every kind of run: own its folder, note what it starts with, end with artefacts and a status."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from safetensors.torch import save_file

from client.data.prepared import PreparedData
from client.models.tasks import Metrics
from privacy import durable
from privacy.audit.in_run import observe
from privacy.commitment import Commitment
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from server.config.account import account_of
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.evaluation.answers import adapter_answers
from server.evaluation.best_round import BestRound
from server.evaluation.metrics import Evaluate, on_server, on_workers
from server.evaluation.private import last_measured
from server.evaluation.started_from import keep_start
from server.network.grid import roster
from server.run_folder.canaries import canaries_of, canary_note, note_seen
from server.run_folder.checkpoint import Stopwatch, checkpoint_folder
from server.run_folder.data_facts import write_facts
from server.run_folder.names import (
    CANARIES_FILE,
    LEDGER_FILE,
    PUBLIC_START_FILE,
    RESULTS_FILE,
    ROSTER_FILE,
    SOURCE_FILE,
    write_config,
)
from server.run_folder.origin import check_origin, write_origin
from server.run_folder.progress import hold_folder
from server.run_folder.provenance import write_environment
from server.run_folder.resume import Resumed, check_same_run, claim_ledger, note_resumed, refuse_ended
from server.run_folder.seal import STARTED, write_seal
from server.run_folder.telemetry import Telemetry, read_metrics
from server.run_folder.verify import read_object, run_lineage, traces, verify_run
from server.runs.artefacts import Final, Kept, Outcome, keep_adapter, measures, write_results
from server.runs.assembly import Assembly, CommittedAssembly, connected_nodes
from server.runs.loop import Loop
from server.runs.public_data import public_start


@dataclass
class Run:
    """A run in its folder, from its start to its artefacts.

    Attributes:
        folder: of the run; this process owns it.
        ledger: held, of the resumed run; None where the run is new, or of a kind without a ledger of the server.
        other_code: resume although the code has changed.
        clock: time that the run has taken.
        changes: differences of the code since the start, in words.
        results: results.json of a run that ended without some of them, which are what is left to do; None of any other.
        kept: what is paid for, once it is written.
    """

    config: RunConfig
    folder: Path
    telemetry: Telemetry
    ledger: Ledger | None = None
    resumes: bool = False
    other_code: bool = False
    clock: Stopwatch = field(default_factory=Stopwatch)
    changes: list[str] = field(default_factory=list)
    results: Mapping[str, Any] | None = None
    kept: Kept | None = None

    def status(self, message: str) -> None:
        """Say in the run's status what it prepares."""
        self.telemetry.status("preparing", message)

    def note_start(
        self, data: PreparedData, commitment: Commitment | None = None, phases: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Note what the run starts with; a resumed run compares it with what it started with.

        Args:
            commitment: of the ledger; None where the server holds none.
            phases: tables of a run in phases.

        Raises:
            CannotResume, CorruptRun: it cannot be the same run.
        """
        config, name = self.config, str(data.meta["digest"])
        if not self.resumes:
            durable.write(self.folder / SOURCE_FILE, f"{data.meta['source']}\n", mode=0o600)
        if self.ledger is not None and commitment is not None:
            self.changes = check_same_run(config, name, commitment, self.folder, self.ledger, self.other_code)
        elif self.resumes:
            self.changes = check_origin(self.folder, config, data=name, other_code=self.other_code, phases=phases)
        else:
            write_origin(self.folder, config, name, phases)
        write_config(self.folder, config)
        write_facts(self.folder, config, data)
        write_environment(self.folder)

    @contextmanager
    def hold_ledger(self, commitment: Commitment) -> Iterator[Ledger]:
        """Hold the ledger of the run, which is made where the run is new, and paid for by the account of its data.

        Raises:
            AccountRefused, CorruptRun: the account does not pay, or is not what it was.
        """
        account = account_of(self.config)
        with debited_ledger(
            self.ledger, lambda: Ledger.create(self.folder / LEDGER_FILE, commitment), account, commitment
        ) as ledger:
            yield ledger

    def train(self, loop: Loop, start: Callable[[], Any], form: Any) -> str | None:
        """Begin or resume a training and run it to its end; returns why the budget refused, or None.

        Args:
            loop: with a training whose checkpoints lie in the run's folder.
            start: the adapter that a new run begins with; not called for a resumed run.
            form: an adapter of the run's form.
        """
        if checkpoint_folder(self.folder) is not None:
            lost = loop.go_on(form)
            note_resumed(self.folder, Resumed(loop.state.round, time.time(), lost, tuple(self.changes)))
        else:
            if self.config.public.warm_start_epochs:
                self.status("warm start on public records")
            first = start()
            if self.config.public.warm_start_epochs:
                with durable.open_replacement(self.folder / PUBLIC_START_FILE) as draft:
                    save_file({"adapter": first.contiguous()}, draft)
            self.status("first evaluation")
            loop.begin(first)
        return loop.run()

    def canary_watcher(self, population: int) -> Callable[[int, Release], None]:
        """Make the function that notes how canaries show in every release; with none it does nothing."""

        def noted(round: int, release: Release) -> None:
            canaries = canaries_of(self.config, self.folder, population)
            if canaries is not None and (seen := observe(canaries, release, round, population)) is not None:
                note_seen(self.folder, seen)

        return noted

    def keep(self, adapter: Final, statement: Mapping[str, Any], data: PreparedData, note: str = "") -> None:
        """Write what is paid for, before anything is done with it. Nothing is written where the run had ended before.

        Args:
            statement: what the run guarantees.
            note: a sentence for the card.
        """
        planted = canary_note(self.config)
        if planted:
            statement = {**statement, "canaries": planted}
        statement = run_lineage(self.folder, dict(statement))
        notes = " ".join(filter(None, [note, planted]))
        self.kept = Kept(adapter, statement, data.label_names, notes)
        if self.results is None:
            if planted:
                durable.write(self.folder / CANARIES_FILE, planted + "\n")
            keep_adapter(self.folder, self.config, self.kept)

    def finish(self, outcome: Outcome, done: str) -> None:
        """Measure what is kept, write what the run leaves behind, then say that it has ended.

        Args:
            done: the status of a run that the budget did not stop.
        """
        assert self.kept is not None, "keep() comes first"
        self.telemetry.status("running", "evaluating on the test set")
        missing = write_results(self.folder, self.config, self.kept, outcome, self.results)
        lacks = "".join(f"; {name} is missing ({reason})" for name, reason in missing.items())
        stopped = outcome.stopped
        self.telemetry.status("stopped-budget" if stopped else "completed", (stopped or done) + lacks)


@contextmanager
def open_run(
    config: RunConfig, folder: Path, *, resume: bool, other_code: bool = False, ledger: bool = True
) -> Iterator[Run]:
    """Hold a run's folder and telemetry. A failure is noted in its status before it is raised again.

    Args:
        folder: exists.
        other_code: although the code has changed.
        ledger: whether the server keeps the ledger in the folder and finds it again by :func:`claim_ledger`.

    Raises:
        ConfigError: the folder already holds a run and this is another.
        CannotResume, CorruptRun: it has ended, or see :func:`server.run_folder.resume.claim_ledger`.
    """
    with ExitStack() as stack:
        stack.enter_context(hold_folder(folder))
        if resume:
            refuse_ended(folder)
            if not ledger:
                verify_run(folder)
        # Whoever holds the ledger owns the folder, so it comes before anything is written there.
        held = stack.enter_context(claim_ledger(folder)) if resume and ledger else None
        if not resume and (found := traces(folder)):
            what = f"already holds a run ({found[0]}), which is never overwritten"
            raise ConfigError(f"run-folder = {str(folder)!r} {what}")
        results = read_object(folder / RESULTS_FILE)
        if results is not None:  # the files that are written once more may differ until the run has ended again
            write_seal(folder, STARTED)
        telemetry = stack.enter_context(Telemetry(folder))
        try:
            if not resume:
                keep_start(config, folder)
            yield Run(config, folder, telemetry, held, resume, other_code, results=results)
        except (KeyboardInterrupt, SystemExit):  # `lacquer stop`, or whoever ends the process
            telemetry.status("failed", "stopped from outside")
            raise
        except BaseException as error:
            telemetry.status("failed", durable.full_disk(error, folder) or f"{type(error).__name__}: {error}")
            raise


def connect_nodes(run: Run, grid: Grid) -> int | tuple[int, ...]:
    """Wait for those who train: the node of every client in a deployment, the number of workers in a simulation."""
    config = run.config
    if config.is_deployed:
        run.status("waiting for nodes")
        return roster(run.folder / ROSTER_FILE, grid, config.nodes, of_many=bool(config.data.nodes), tell=run.status)
    run.status("waiting for workers")
    return connected_nodes(grid, config.clients if config.simulation.clients_per_node else config.engine.workers)


def connect_trainers(run: Run, assembly: Assembly, grid: Grid, used: int) -> tuple[int | tuple[int, ...], Evaluate]:
    """Wait for those who train, and make the evaluation on public data.

    Args:
        used: number of the first validation records that are left out of it.

    Returns:
        the node of every client in a deployment, the number of workers in a simulation; and the evaluation.
    """
    config, data, workers = run.config, assembly.data, connect_nodes(run, grid)
    splits = {"validation": (used, len(data.validation)), "test": (0, len(data.test))}
    if not isinstance(workers, int):
        return workers, on_server(assembly.job, data, splits)
    tokens = {part: data.predicted_tokens(part, *rows) for part, rows in splits.items()}
    timeout = config.engine.round_timeout
    return workers, on_workers(grid, min(workers, 64), assembly.job.to_json(), splits, timeout, tokens)


def best_round(config: RunConfig, folder: Path) -> BestRound | None:
    """The chooser of the round that a run ends with; None where that is the last one."""
    asked = config.evaluation
    if asked.keep == "last" and not asked.patience:
        return None
    return BestRound(folder, keeps=asked.keep == "best", patience=asked.patience)


def ending_words(loop: Loop) -> str:
    """Say how a run ended that no budget stopped."""
    done, best = loop.ended_early or f"{loop.rounds} {loop.noun}s done", loop.best
    kept = f"; {loop.noun} {best.round} is kept, which had the lowest validation loss" if best and best.keeps else ""
    return done + kept


def training_outcome(run: Run, assembly: CommittedAssembly, loop: Loop, stopped: str | None) -> Outcome:
    """The outcome of a private training, with what is to be measured of it on public data."""
    assert run.kept is not None, "the loop has told of its end"
    final, start, data = run.kept.adapter, public_start(run.folder), assembly.data
    kept = loop.best.round if loop.best is not None and loop.best.keeps else 0

    def evaluate(split: str) -> Metrics:
        if split == "validation" and loop.private is not None:  # what held-out units said of it, and was paid for
            return last_measured(read_metrics(run.folder), kept)
        return loop.evaluate(final.vector, split)

    return Outcome(
        data=data,
        measures=measures(
            evaluate,
            None if start is None or not run.config.starts_public else lambda: loop.evaluate(start, "test"),
            lambda: adapter_answers(run.config, data.test, *final, run.telemetry),
            data.label_names,
        ),
        rounds_done=max(loop.state.round, 0),
        seconds=run.clock.times().run,
        stopped=stopped,
        dimension=max(map(sum, assembly.setting.layouts)),
        further={"kept_round": kept} if kept else {},
    )
