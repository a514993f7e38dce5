"""A run over sites: in every round each site that takes part does some private steps, and the server averages.

The server holds no ledger: every site has its own, in its own folder, and refuses for itself. What the run states of
privacy is what the sites say of their commitments. An interrupted run resumes from its last whole round; the
steps of a lost one stay spent in the sites' ledgers.

With ``[site.span]`` the server sends public texts along, which it wrote, and sites answer with coefficients of their
gradients; the server takes the step.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from client.models.lora import as_one_adapter
from client.models.tasks import Metrics
from client.record_level.messages import ACTION, SiteReply, SiteRequest
from client.record_level.public_subspace import PublicSpan
from client.record_level.training import noise_of, record_level_engine
from privacy.randomness.rng import simulation_generator
from server import notice
from server.config.schema import RunConfig
from server.evaluation.answers import adapter_answers
from server.evaluation.metrics import Evaluate, refuse_diverged
from server.network.grid import exchange_messages, node_names
from server.run_folder.checkpoint import Times
from server.run_folder.names import CLIENTS_FILE, SITES_FOLDER
from server.run_folder.progress import Progress, SiteGuarantee, load_progress, save_progress
from server.run_folder.resume import Resumed, note_resumed
from server.run_folder.round_record import Presence, RoundRecord, validation_fields
from server.runs import guarantee
from server.runs.artefacts import Final, Outcome, measures
from server.runs.lifecycle import Run, connect_trainers
from server.runs.public_data import PublicTraining, public_span
from server.runs.record_level_assembly import SitesAssembly, assemble_sites
from strategies.messages.dispatch import PATIENCE, RoundFailed, await_roster, quorum, sound_replies
from strategies.server_update import ServerUpdate
from strategies.sites import GlobalModel, Place, SiteAnswer, SpanUpdate, combine_of, next_model, updates_of

log = logging.getLogger(__name__)


def run_sites(run: Run, grid: Grid) -> None:
    """Run a training over sites from configuration to artefacts."""
    run.status("preparing data and model")
    config, telemetry, folder = run.config, run.telemetry, run.folder
    ready = assemble_sites(config, folder)
    public = PublicTraining.of(ready)
    adapter, span = prepare_span(ready)
    run.note_start(ready.data)
    if run.resumes:
        progress = load_progress(folder, ready.layout)
        note_resumed(folder, Resumed(progress.round, time.time(), 0, tuple(run.changes)))
        run.clock.before = Times(progress.seconds)
    else:
        if config.public.warm_start_epochs:
            run.status("warm start on public records")
        progress = Progress(GlobalModel(public.warm_start(adapter)))
        if span is not None:
            progress.texts, progress.optimizer = span.public.texts, ready.methods.optimizer.init(adapter)
        save_progress(folder, progress)
    nodes, evaluate = connect_trainers(run, ready, grid, public.num_records)
    if isinstance(nodes, int):  # a simulation's workers stand for several sites each
        workers = sorted(grid.get_node_ids())[:nodes]
        nodes = tuple(workers[site % len(workers)] for site in range(config.clients))

    def record(seconds: float, present: Presence | None = None) -> None:
        due = progress.round % config.evaluation.every == 0 or progress.round == config.rounds
        metrics = evaluate(progress.model.served, "validation", progress.model.residual) if due else None
        if metrics is not None and progress.round < config.rounds:
            refuse_diverged(metrics, f"after round {progress.round}")
        telemetry.round(_record(ready, progress, metrics, seconds, present))

    def keep() -> None:
        steered = ready.methods.steered_by_validation
        statement = guarantee.sites_statement(config, ready.site.not_private, progress.sites, steered=steered)
        residual, kind = progress.model.residual, config.strategy.aggregation
        final = final_adapter(ready, progress.model)
        note = "" if residual is None else f"Its rank is {final.spec.rank}: it holds what {kind} adds to the base."
        run.keep(final, statement, ready.data, note)

    kept = telemetry.rewind(progress.round) if run.resumes else []
    if not progress.round and not kept:
        began = time.monotonic()
        first = evaluate(progress.model.served, "validation", progress.model.residual)
        refuse_diverged(first, "before round 1")
        seconds, target = time.monotonic() - began, config.privacy.epsilon
        reason = ready.site.not_private
        telemetry.round(
            RoundRecord.of_start(first, rounds=config.rounds, epsilon=target, seconds=seconds, not_private=reason)
        )
    if progress.round == config.rounds:
        keep()
    if progress.round > sum(item.phase == "round" for item in kept):  # the run was interrupted between the two
        record(0.0)
    while progress.round < config.rounds and len(progress.refusals) < config.clients:
        start = time.monotonic()
        telemetry.status("running", f"round {progress.round + 1} of {config.rounds}")
        there = None
        if config.is_deployed:  # before the sites of the round are drawn, and before any of them charges its ledger
            there = await_roster(grid, nodes, quorum(nodes), PATIENCE, lambda text: telemetry.status("running", text))
        notice.end_if_given()
        with notice.protect(lambda: True):  # sites charge their ledgers when they are asked
            asked, missing = _round(ready, folder, grid, nodes, progress, span)
            told = _told(folder, config, nodes, missing)
            present = Presence(asked, None if there is None else len(there), asked - len(missing), told)
            progress.seconds = run.clock.times().run
            save_progress(folder, progress, telemetry.records())
        if progress.round == config.rounds or len(progress.refusals) == config.clients:
            keep()
        record(time.monotonic() - start, present)
    if run.kept is None:  # a resumed run whose sites had all refused
        keep()
    run.finish(_outcome(run, ready, progress, evaluate, lambda: public.warm_start(adapter)), progress.summary())


@dataclass(frozen=True)
class InSpan:
    """The server's part in a run whose sites send coefficients of public gradients.

    Attributes:
        public: the first texts, and how they evolve.
        update: the step that the server takes with the coefficients.
    """

    public: PublicSpan
    update: SpanUpdate

    def take_step(
        self, progress: Progress, gradients: Tensor, answers: Sequence[SiteAnswer], round: int, batch: int
    ) -> None:
        """Take the step of a round, and let the texts evolve.

        Args:
            gradients: basis at the round's adapter, one row a text.
            round: from 1.
            batch: units that each site expects in one.
        """
        sent = updates_of(answers, round)
        if not sent:
            return
        multipliers = [progress.sites[answer.site].noise_multiplier for answer in answers if answer.update is not None]
        noise = math.hypot(*multipliers) / (len(sent) * batch)
        progress.model, progress.optimizer = self.update(
            progress.model, progress.optimizer, gradients, sent, noise, round
        )
        if self.public.evolve is not None and progress.texts is not None:
            scores = batch * torch.stack(sent).sum(dim=0)  # of all sites' records together, as at one site
            progress.texts = self.public.evolve(progress.texts, scores, progress.model.adapter, round)


def prepare_span(ready: SitesAssembly) -> tuple[Tensor, InSpan | None]:
    """Set up the adapter to start from, and what ``[site.span]`` adds to the run; None without it."""
    config = ready.config
    if not config.site.span.method:
        return ready.start, None
    adapter, public = public_span(ready, record_level_engine(ready.job, "stacked"))
    assert public is not None, "site.span.method is set"
    parts = ready.methods
    average, noise = config.strategy.served_average, noise_of(config.privacy)
    server = ServerUpdate(parts.optimizer, parts.aggregation, ready.layout, average, noise)
    return adapter, InSpan(public, SpanUpdate(server, ready.part, ready.site.learning_rates))


def final_adapter(ready: SitesAssembly, model: GlobalModel) -> Final:
    """The adapter of the run, with what its aggregation adds to the base merged into it."""
    final = Final(model.served, ready.layout, ready.spec)
    if model.residual is None:
        return final
    return Final(*as_one_adapter(final.vector, model.residual, final.layout, final.spec))


def _outcome(
    run: Run, ready: SitesAssembly, progress: Progress, evaluate: Evaluate, start: Callable[[], Tensor]
) -> Outcome:
    """The outcome of the sites' training; ``start`` gives the adapter before round 1, where that is trained."""
    model, config, data = progress.model, run.config, ready.data
    assert run.kept is not None
    final = run.kept.adapter
    return Outcome(
        data=data,
        measures=measures(
            lambda split: evaluate(model.served, split, model.residual),
            (lambda: evaluate(start(), "test")) if config.starts_public else None,
            lambda: adapter_answers(config, data.test, *final, run.telemetry),
            data.label_names,
        ),
        rounds_done=progress.round,
        seconds=run.clock.times().run,
        stopped=progress.end_reason(config.clients),
        dimension=ready.layout.dim,
    )


def _told(folder: Path, config: RunConfig, nodes: tuple[int, ...], missing: Mapping[int, str]) -> str:
    """The sites that are not in a round's mean, and why, in words.

    What a site says may hold anything: one line of it is shown.
    """
    called = node_names(folder / CLIENTS_FILE, nodes) if config.is_deployed else [""] * len(nodes)
    return "; ".join(
        f"site {site}{called[site] and f' ({called[site]})'}: "
        + "".join(one if one.isprintable() else " " for one in reason[:200])
        for site, reason in sorted(missing.items())
    )


def _round(
    ready: SitesAssembly,
    folder: Path,
    grid: Grid,
    nodes: tuple[int, ...],
    progress: Progress,
    span: InSpan | None,
) -> tuple[int, dict[int, str]]:
    """Hold the next round. Who is asked is drawn by the public seed: no amplification is claimed for it.

    Returns:
        how many sites were asked, and why those of them that are not in the mean are not.

    Raises:
        RoundFailed: most of those that were asked failed, or no site ever takes part.
    """
    model, round = progress.model, progress.round + 1
    adapter = model.adapter
    config, steps, texts = ready.config, ready.config.site.steps, progress.texts
    size = len(adapter) if texts is None else len(texts)
    drawn = simulation_generator(config.seed, "silos", round).random(config.clients) < config.sampling_rate
    sent, messages = [], []
    for site in np.flatnonzero(drawn).tolist():
        request = SiteRequest(
            round,
            adapter.numpy(),
            steps,
            site,
            ready.site,
            ready.job.to_json(),
            str(folder / SITES_FOLDER),
            None if model.residual is None else model.residual.numpy(),
            texts,
        )
        message = Message(content=request.to_records(), message_type=f"train.{ACTION}", dst_node_id=nodes[site])
        messages.append(message)
        sent.append((message.metadata, site))
    found: list[SiteAnswer] = []
    missing: dict[int, str] = {}

    def take(content: Any, site: int) -> None:
        reply = SiteReply.from_records(content, round, size, steps)
        if reply.steps:
            progress.sites[site] = SiteGuarantee(reply.epsilon, reply.population, reply.noise_multiplier)
        progress.steps += reply.steps
        progress.refusals.pop(site, None)
        if not reply.steps:
            progress.refusals[site] = missing[site] = reply.refused
        update = torch.from_numpy(reply.update) if reply.steps else None
        found.append(SiteAnswer(site, update, reply.steps, reply.refused))

    sound = sound_replies(sent, exchange_messages(grid, messages, config.engine.round_timeout), round, take, missing)
    if 2 * sound < len(sent):
        raise RoundFailed(
            f"round {round}: {sound} of {len(sent)} sites answered soundly, at least half must; the run's log names "
            "the others and the kind of failure, their own logs have the details; what a site charged stays spent"
        )
    if not progress.steps and (ended := progress.end_reason(config.clients)):
        raise RoundFailed(f"round {round}: {ended}; nothing was trained")
    if span is not None and texts is not None:
        gradients = span.public.basis(adapter, texts, ready.part)
        span.take_step(progress, gradients, found, round, config.site.batch_size)
    else:
        combine = combine_of(ready.methods.aggregation)
        place = Place(ready.layout, ready.spec.scale, config.seed, round, config.strategy.served_average)
        progress.model = next_model(model, found, combine, place)
    progress.round = round
    return len(sent), missing


def _record(
    ready: SitesAssembly, progress: Progress, metrics: Metrics | None, seconds: float, present: Presence | None
) -> RoundRecord:
    config, sites = ready.config, list(progress.sites.values())
    return RoundRecord(
        phase="round",
        round=progress.round,
        rounds=config.rounds,
        epsilon_spent=max((site.epsilon for site in sites), default=0.0),
        epsilon_budget=config.privacy.epsilon,
        noise_multiplier=min((site.noise_multiplier for site in sites), default=0.0),
        expected_cohort=config.expected_cohort,
        seconds=seconds,
        **validation_fields(metrics),
        not_private=ready.site.not_private,
        presence=present,
    )
