"""A rehearsal: every stage of a run at its own settings, on a handful of invented records, before anything is spent.

What depends on public facts alone (tokenizer, model, settings, methods of one's own) fails here and not in a run, where
it would come behind the charge, or drop single units in silence. Nobody's records are looked at: those that are trained
on are invented, of the extremes that the settings allow; those that are measured are public. The ledger that is charged
here pays for invented units and lies in a folder that is removed.

Not rehearsed: sums that clients open together (their plans are clipped and encoded, no more), and the export of a base
model of more than 500 MB or on the hub.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.data.local import OwnData
from client.data.records import Records
from client.data.spec import ANSWERS
from client.engine.local_training import LocalTraining
from client.models.base import load_tokenizer
from client.models.export import merged_model, write_classifier, write_language_model
from client.models.files import RANDOM_PREFIX, locate
from client.models.lora import CannotMerge, load_peft
from client.record_level.public_subspace import PublicSpan, in_public_span
from client.record_level.training import private_training, record_level_engine
from client.record_level.units import UnitGradients, UnitIndex
from client.worker import Worker
from privacy.clipping.units import Units
from privacy.contribution import Contribution, contribute
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from privacy.randomness.sampling import CohortSampler
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.evaluation.answers import adapter_answers
from server.evaluation.metrics import refuse_diverged
from server.run_folder.names import LEDGER_FILE
from server.runs.artefacts import Final, save_adapter
from server.runs.assembly import Assembly, CommittedAssembly, make_strategy
from server.runs.commitment import commit_records
from server.runs.phase_plan import NonPrivatePhase
from server.runs.phases import PhasesRun
from server.runs.public_data import public_span, train_without_noise
from server.runs.record_level_assembly import RecordLevelAssembly, SitesAssembly
from server.runs.sites import final_adapter
from strategies.conformance import ConformanceError, check_aggregation, check_controller, check_optimizer
from strategies.controllers.controller import PublicSignals
from strategies.messages.client_update import TrainRequest
from strategies.plugins import BadAnswer, place
from strategies.private_training import PlannedRelease, PrivateTraining
from strategies.published.raw_rows import UnsoundRule
from strategies.sites import GlobalModel, Place, SiteAnswer, combine_of, next_model

FEW = 2
"""Units that take part, and public records that are measured."""
MOST_EXPORTED = 500 << 20
"""Bytes of a base model that is exported whole; larger ones may not fit the disk or the time."""
TIMES_DRAWN = 10
"""Units of an invented site for every unit that is drawn."""
ANSWER_TOKENS = 4
"""New tokens of an answer: more of them are more of the same."""


def rehearse(ready: Assembly) -> None:
    """Go through a run over clients, over the records of one site, or of several.

    Raises:
        ConfigError: the stage that fails and what it said.
    """
    check_own_methods(ready)
    with tempfile.TemporaryDirectory(prefix="lacquer-rehearsal-") as folder, _one_thread():
        if isinstance(ready, RecordLevelAssembly):
            final, engine = _at_a_site(ready, Path(folder))
        elif isinstance(ready, SitesAssembly):
            final, engine = _at_sites(ready, Path(folder))
        else:
            assert isinstance(ready, CommittedAssembly), "or it has no ledger to rehearse with"
            final, engine = _over_clients(ready, Path(folder))
        _ended(ready, final, engine, Path(folder))


def rehearse_phases(run: PhasesRun) -> None:
    """The same of a run in phases: the first phase of either kind takes a step."""
    ready, config = run.assembly, run.config
    with tempfile.TemporaryDirectory(prefix="lacquer-rehearsal-") as folder, _one_thread():
        records, adapter = invented(ready), ready.start
        with stage("loading the model"):
            engine = run.engine
        for phase in [phase for phase in config.phases if isinstance(phase, NonPrivatePhase)][:1]:
            with stage(f"training phase {phase.name!r}"):
                engine.train_factors("both")
                local = LocalTraining.of(phase)
                adapter = train_without_noise(engine, adapter, records, local, config.run.seed)
        if (ledger := run.ledger(Path(folder))) is not None:
            with ledger:
                site = config.record_level(config.private_phases[0], run.guarantee.not_private)
                index, multipliers = run.index[run.key(config.private_phases[0])], run.planned.multipliers[0]
                training = private_training(site, engine, index, ledger, multipliers, CohortSampler.create())
                adapter = _site_stepped(training, engine, adapter, records)
        _ended(ready, Final(adapter, ready.layout, ready.spec), engine, Path(folder))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of a few records, more threads wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Part of a rehearsal; what fails in it is refused as a setting is."""
    try:
        yield
    except (ConfigError, OSError):  # which say enough
        raise
    except Exception as error:  # whatever a model, a tokenizer or a method of one's own raises
        said = str(error) if isinstance(error, BadAnswer) else f"{type(error).__name__}: {error}{place(error)}"
        raise ConfigError(f"rehearsal, {name}, with invented records at these settings: {said}") from error


def check_own_methods(ready: Assembly) -> None:
    """Hold methods of one's own against the contract that built-in ones keep.

    Raises:
        ConfigError: the rule that one breaks.
    """
    chosen, parts = ready.config.strategy, ready.methods
    checks: list[tuple[str, str, Any, Callable[[Any], None]]] = [
        ("aggregation", chosen.aggregation, parts.aggregation, check_aggregation),
        ("optimizer", chosen.optimizer, parts.optimizer, check_optimizer),
    ]
    if not isinstance(parts.controller, UnsoundRule):
        checks.append(("controller", chosen.controller, parts.controller, check_controller))
    for role, name, method, check in checks:
        if ":" in name:
            with stage(f"strategy.{role} = {name!r}"):
                try:
                    check(method)
                except ConformanceError as error:
                    raise ConfigError(f"strategy.{role} = {name!r} breaks a rule: {error}") from error


def invented(ready: Assembly) -> Records:
    """Records as long and as short as any, with the last token of the vocabulary, special tokens, the last label."""
    config, tokenizer = ready.config, load_tokenizer(ready.config.model.name)
    ids = np.array(sorted(set(tokenizer.get_vocab().values())))
    ids = np.concatenate([np.array(tokenizer.all_special_ids, dtype=np.int64), ids[::-1]])
    long = [int(token) for token in np.resize(ids, config.model.max_length)]
    if config.model.task == "preference":
        pairs = [(long, long[::-1]), (long[-2:], long[:2])]
        rows = [[*first, *second] for first, second in pairs]
        weights = [[float(place > 0) for text in pair for place in range(len(text))] for pair in pairs]
        return replace(Records.from_lists(rows, None, weights), splits=np.array([len(first) for first, _ in pairs]))
    rows = [long, long[-2:]]
    labels = None if ready.data.validation.labels is None else [max(ready.data.num_labels - 1, 0), 0]
    weights = [[float(place > 0) for place in range(len(row))] for row in rows]
    return Records.from_lists(rows, labels, weights if config.model.task in ANSWERS else None)


class InventedRounds(PrivateTraining):
    """A run's training over clients that are invented.

    Args:
        of: the run's, whose planner, server, ledger and sampler it has.
        contribution: of one invented client.
    """

    def __init__(self, of: PrivateTraining, contribution: Callable[[PlannedRelease], Contribution]) -> None:
        super().__init__(planner=of.planner, server=of.server, ledger=of.ledger, sampler=of.sampler)
        self._contribution = contribution

    def make_release(self, planned: PlannedRelease) -> Release:
        """A release over one client, or over none where none was drawn."""
        cohort = self.cohort(planned)
        with stage("training a client, clipping and encoding what it moved"):
            total = self._contribution(planned)
        return planned.release(
            total if cohort.most else Contribution.zero(planned.plan), cohort, self.ledger, self.noise
        )


@dataclass(frozen=True)
class InventedGradients(UnitGradients):
    """Gradients of a few invented units, whoever was drawn."""

    def of(self, adapter: Tensor, units: Any, part: Any, step: int) -> Iterator[Units]:
        return super().of(adapter, units[:FEW] % len(self.index), part, step)


def _over_clients(ready: CommittedAssembly, folder: Path) -> tuple[Final, Any]:
    config, few = ready.config, np.zeros(1, dtype=np.int64)
    with stage("loading the model"):
        worker = Worker(ready.job.replace(prefix_cache_mb=0), OwnData(folder, invented(ready)))
    with Ledger.create(folder / LEDGER_FILE, ready.commitment) as ledger:
        strategy = make_strategy(ready, folder, 1, ledger)

        def contribution(planned: PlannedRelease) -> Contribution:
            ranks = ready.methods.aggregation.client_ranks(strategy.planner.adapters, few)
            adapter = training.state.adapter.numpy()
            return worker.contribution(
                TrainRequest(planned.round, adapter, planned.plan, planned.part, few, ready.job.to_json(), ranks)
            )

        training = InventedRounds(strategy, contribution)
        if config.noise_shares is None:
            served = _stepped(training, worker.engine, ready.start, invented(ready))
        else:  # whose release needs everybody's shares of the noise
            training.begin(ready.start, PublicSignals(0, 1.0))
            with stage("training a client, clipping and encoding what it moved"):
                contribution(training.next_release())
            served = ready.start
    return Final(served, ready.layout, ready.spec), worker.engine


def _at_a_site(ready: RecordLevelAssembly, folder: Path) -> tuple[Final, Any]:
    with stage("loading the model"):
        engine = record_level_engine(ready.job.replace(prefix_cache_mb=0), ready.config.site.gradients)
    start, span = _few_texts(ready, engine)
    with Ledger.create(folder / LEDGER_FILE, ready.commitment) as ledger:
        multipliers = ready.setting.noise_multipliers
        training = private_training(ready.site, engine, ready.index, ledger, multipliers, CohortSampler.create())
        served = _site_stepped(training, engine, start, invented(ready), span)
    return Final(served, ready.layout, ready.spec), engine


def _at_sites(ready: SitesAssembly, folder: Path) -> tuple[Final, Any]:
    """One site of as many invented units as the settings allow, whose step the server averages with itself."""
    config, site, records = ready.config, ready.site, invented(ready)
    with stage("loading the model"):
        engine = record_level_engine(ready.job.replace(prefix_cache_mb=0), config.site.gradients)
    start, span = _few_texts(ready, engine)
    units = max(site.batch_size, min(TIMES_DRAWN * site.batch_size, int(config.privacy.delta ** (-1 / 1.1))))
    index = UnitIndex.of(records.select(np.arange(units) % len(records)), grouped=False, most=site.records_per_unit)
    noise = commit_records(config, site, units, None, records=index.kept)
    with Ledger.create(folder / LEDGER_FILE, noise.commitment) as ledger:
        training = private_training(site, engine, index, ledger, noise.multipliers, CohortSampler.create())
        moved = _site_stepped(training, engine, start, records, span) - start
    sites = [SiteAnswer(site, moved, 1, "") for site in range(FEW)]
    with stage("putting sites together"):
        where = Place(ready.layout, ready.spec.scale, config.seed, 1, config.strategy.served_average)
        model = next_model(GlobalModel(start), sites, combine_of(ready.methods.aggregation), where)
        return final_adapter(ready, model), engine


def _few_texts(ready: Assembly, engine: Any) -> tuple[Tensor, PublicSpan | None]:
    """The start of a site and the span of the first few texts that ``[site.span]`` makes; None without it."""
    site, span = ready.config.site, ready.config.site.span
    fewer = span.model_copy(
        update={
            "samples": span.variants * math.ceil(FEW / span.variants),
            "directions": min(span.directions, FEW),
        }
    )
    config = ready.config.model_copy(update={"site": site.model_copy(update={"span": fewer})})
    with stage("writing texts for site.span"):
        start, made = public_span(replace(ready, config=config), engine)
        if made is not None and made.evolve is not None:
            made.evolve(made.texts, torch.ones(len(made.texts)), start, 1)
    return start, made


def _site_stepped(
    training: Any, engine: Any, start: Tensor, records: Records, span: PublicSpan | None = None
) -> Tensor:
    """After the first step of a site's training, with invented records in place of its own."""
    gradients = InventedGradients(engine, UnitIndex.of(records, grouped=False), training.gradients.combine)
    training.gradients = gradients
    training = training if span is None else in_public_span(training, span)
    training.begin(start, PublicSignals(0, 1.0))
    planned = training.next_release()
    with stage("taking gradients of records, clipping and encoding them"):  # a step leaves out units that fail
        for rows in gradients.of(start, np.arange(FEW), planned.part, planned.round):
            contribute(rows, planned.plan)
    return _stepped(training, engine, start, records)


def _stepped(training: PrivateTraining, engine: Any, start: Tensor, records: Records) -> Tensor:
    """The served adapter after round 1, and the release before it where there is one."""
    with stage("evaluating"):
        metrics = engine.evaluate(start, records)
        refuse_diverged(metrics, "on invented records, before anything is trained")
    with stage("planning, releasing and stepping"):
        training.begin(start, PublicSignals(0, metrics.loss))
        while training.state.round < 1:
            training.step()
            training.observe(PublicSignals(training.state.round, metrics.loss, training.ledger.rho_spent))
            training.released_values()
    return training.state.served


def _ended(ready: Assembly, final: Final, engine: Any, folder: Path) -> None:
    """What comes behind the last charge: evaluation, answers, the adapter's files."""
    config, data = ready.config, ready.data
    with stage("evaluating on public records"):
        for records in (data.validation, data.test):
            engine.evaluate(final.vector, _extremes(records))
    with stage("writing answers"):
        adapter_answers(_few_answers(config), _extremes(data.test), *final)
    with stage("saving the adapter and loading it"):
        save_adapter(folder / "adapter", config, final)
        if not torch.allclose(load_peft(folder / "adapter", final.layout), final.vector.cpu(), atol=1e-6):
            raise ValueError("what is loaded is not what was saved")
    with stage("exporting"):
        _export(config, data.label_names, folder)


def _export(config: RunConfig, label_names: Sequence[str], folder: Path) -> None:
    """Write the whole model with the adapter in its weights, as ``lacquer export`` does; not a large one."""
    name, task = config.model.name, config.model.task
    if not name.startswith(RANDOM_PREFIX):
        weights = [path.stat().st_size for path in Path(locate(name)[0]).glob("*.safetensors")]
        if not weights or sum(weights) > MOST_EXPORTED:
            return
    whole, tokenizer = folder / "export", load_tokenizer(name)
    try:
        model = merged_model(name, task, len(label_names) or None, folder / "adapter")
    except CannotMerge:  # which `lacquer export` says; the adapter is what such a run is for
        return
    if label_names:
        write_classifier(model, tokenizer, tuple(label_names), config.model.max_length, whole)
    else:
        write_language_model(model, tokenizer, task, whole)


def _extremes(records: Records) -> Records:
    """The shortest and the longest of public records."""
    order = np.argsort(records.lengths, kind="stable")
    return records.select(np.unique(order[[0, -1]]))


def _few_answers(config: RunConfig) -> RunConfig:
    wanted = config.evaluation
    few = {"rouge_records": min(FEW, wanted.rouge_records), "examples": min(1, wanted.examples)}
    changed = wanted.model_copy(update={**few, "rouge_tokens": ANSWER_TOKENS})
    return config.model_copy(update={"evaluation": changed})
