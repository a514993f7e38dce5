"""One warm process: a base model loaded once, an engine on it, the prepared data; serves request after request.

What it must know to train is constant over the run: sent as canonical JSON, read once per process.
"""

import functools
import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from client.data.columns.shares import share_row
from client.data.local import OwnData, ReadSettings
from client.data.prepared import PreparedData
from client.data.records import MOST_AT_ONCE, Records
from client.data.spec import Task
from client.engine.engine import Engine, build_engine
from client.engine.local_training import LocalTraining
from client.models.base import refuse_batch_dependent_positions, refuse_longer_than_positions
from client.models.frozen.base import FrozenBase
from client.models.lora import LoraSpec
from client.models.tasks import Metrics, make_task
from client.settings import CountOrAuto, Table
from client.votes import clip_votes
from privacy.audit.in_run import CanaryUnits
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.queries import BoundedMean, LossHistogram, OneHotVote
from privacy.randomness.rng import simulation_generator
from strategies.messages.client_update import EvaluateRequest, TrainRequest


class Job(Table):
    """A run as its nodes see it.

    Attributes:
        model: name of the base model, see :func:`client.models.base.load_base`.
        task: one of :data:`client.models.tasks.TASKS`.
        num_labels: classes; 0 for a language model.
        spec: adapters and heads.
        data: folder of the prepared data set (simulation), see :func:`client.data.prepare.prepare`.
        seed: of the simulation randomness.
        sequential: train clients one by one with plain PEFT.
        base: how the base model is held and run.
        token_budget: 0 takes the engine's default.
        prefix_cache_mb: memory for the prefix cache, 0 for none.
        reading: how nodes read records of their own (deployment); None where `data` holds everybody's.
        fingerprint: of the server's base model, see :func:`client.models.files.fingerprint`, for nodes with a copy of
            their own; empty in a simulation.
        canaries: how many of the last clients are canaries of an audit, in a simulation.
        first_canary: the first of them.
        canary_key: file with the secret of their coins.
        asks: clients bring what they say of their records (:func:`client.data.columns.shares.share_row`); nobody
            trains.
    """

    model: str
    task: Task
    num_labels: int
    spec: LoraSpec
    local: LocalTraining
    data: str
    seed: int
    sequential: bool = False
    base: FrozenBase = FrozenBase()
    token_budget: int = 0
    prefix_cache_mb: int = 0
    reading: ReadSettings | None = None
    fingerprint: str = ""
    canaries: CountOrAuto = 0
    first_canary: CountOrAuto = 0
    canary_key: str = ""
    asks: bool = False

    def canary_units(self) -> CanaryUnits | None:
        """The canaries among the units; None where there are none."""
        if not self.canaries:
            return None
        secret = bytes.fromhex(Path(self.canary_key).read_text(encoding="ascii"))
        return CanaryUnits(self.first_canary, self.canaries, secret, self.seed)


log = logging.getLogger(__name__)


class Worker:
    """Trains logical clients of a prepared data set, or the one client that a node is; answers with bounded sums.

    Args:
        own: the node's own records, instead of the prepared data set that the job names.
    """

    def __init__(self, job: Job, own: OwnData | None = None) -> None:
        self.job = job
        self.data: PreparedData | OwnData = PreparedData.open(job.data) if own is None else own
        self.canaries = job.canary_units()
        if not job.asks:  # a base model that cannot be loaded is told of before any message is read
            _ = self.engine

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine that the job asks for."""
        return make_engine(self.job)

    def contribution(self, request: TrainRequest) -> Contribution:
        """The bounded sum over the requested clients. Rows, norms, losses and votes end here.

        A client whose work raises contributes zero, and the others what they would without it: one unit moves the sum
        by its own row and nothing else.

        Raises:
            UnitsFailed: every client's work raises.
        """
        if self.canaries is None:
            return self._trained(request)
        honest, canaries = self.canaries.split(request.clients)
        made_up = canary_contribution(self.canaries, canaries, request.plan)
        ranks = None if request.ranks is None else request.ranks[honest]
        asked = replace(request, clients=request.clients[honest], ranks=ranks)
        return self._trained(asked) + made_up if honest.any() else made_up

    def _trained(self, request: TrainRequest) -> Contribution:
        if not self.job.asks:
            self.engine.train_factors(request.part.factors)
        work = self._told if self.job.asks else self._sum
        return together_or_alone(lambda: work(request), lambda i: work(request.only(i)), len(request.clients), "client")

    def _sum(self, request: TrainRequest) -> Contribution:
        total = Contribution.zero(request.plan)
        if asks_accuracy(request.plan):
            return total + self._measured(request)
        for ranks, members in _by_rank(request):
            whole = torch.from_numpy(request.adapter.copy())
            start = whole if ranks is None else self.engine.layout.truncate_ranks(whole, ranks)
            clients = [self.data.client(int(client)) for client in request.clients[members]]
            seeds = [local_seed(self.job.seed, request.round, int(client)) for client in request.clients[members]]
            for updates in self.engine.train(start, clients, self.job.local, seeds):
                records = [clients[i] for i in updates.clients]
                rows = request.part.sent_rows(self.engine.layout, updates.deltas)
                units = self._units(start, rows, records, [seeds[i] for i in updates.clients], ranks, request)
                total = total + contribute(units, request.plan)
        return total

    def _measured(self, request: TrainRequest) -> Contribution:
        """What clients answer about the adapter as it is; nobody trains. One without records counts as the middle."""
        vector = torch.from_numpy(request.adapter.copy())
        clients = [self.data.client(int(client)) for client in request.clients]
        found = [self.engine.evaluate(vector, records) for records in clients if len(records)]
        losses, accuracies = (
            torch.tensor([getattr(metrics, name) for metrics in found], dtype=torch.float64)
            for name in ("loss", "accuracy")
        )
        rows = torch.zeros(len(found), request.plan.clip.params)
        if request.plan.clip.params:
            counted = [metrics.count if metrics.confusion is None else metrics.confusion for metrics in found]
            rows = torch.tensor(counted, dtype=torch.float64).reshape(rows.shape)
            if self.job.num_labels:  # shares of records; of a language model the tokens that it predicts
                rows /= rows.sum(1, keepdim=True)
        units = Units(rows, losses, accuracies=accuracies)
        return contribute(units, request.plan)

    def _told(self, request: TrainRequest) -> Contribution:
        """What clients say of their records, however many they are."""
        total = Contribution.zero(request.plan)
        for start in range(0, len(request.clients), MOST_AT_ONCE):
            clients = [self.data.client(int(client)) for client in request.clients[start : start + MOST_AT_ONCE]]
            rows = np.array([share_row(records, self.job.num_labels, self.job.model) for records in clients])
            total = total + contribute(Units(torch.from_numpy(rows)), request.plan)
        return total

    def _units(
        self,
        start: torch.Tensor,
        rows: torch.Tensor,
        clients: list[Records],
        seeds: list[int],
        ranks: int | None,
        request: TrainRequest,
    ) -> Units:
        """What clients bring that trained from ``start``, which is zero beyond the ``ranks`` they train."""
        votes = losses = None
        for query in request.plan.queries:
            if isinstance(query, OneHotVote):
                votes = clip_votes(self.engine, start, rows, clients, query, seeds, request.part, ranks)
            if isinstance(query, BoundedMean | LossHistogram) and losses is None:
                losses = self.engine.losses(start, clients)  # of the broadcast model, before local training
        return Units(rows, losses, votes)

    def metrics(self, request: EvaluateRequest) -> Metrics:
        """Metrics of an adapter on part of a public split."""
        assert isinstance(self.data, PreparedData), "a node with records of its own has no public ones"
        records = {"validation": self.data.validation, "test": self.data.test}[request.split]
        part = records.select(np.arange(request.start, request.stop))
        self.engine.set_residual(None if request.residual is None else torch.from_numpy(request.residual))
        return self.engine.evaluate(torch.from_numpy(request.adapter.copy()), part)


def asks_accuracy(plan: Plan) -> bool:
    """Whether a plan measures the adapter that is sent, instead of training it."""
    return any(isinstance(query, BoundedMean) and query.of == "accuracies" for query in plan.queries)


def canary_contribution(canaries: CanaryUnits, numbers: np.ndarray, plan: Plan) -> Contribution:
    """The contribution of these canaries: each its own row, clipped as any; no vote, and no loss."""
    if not len(numbers):
        return Contribution.zero(plan)
    votes, losses = torch.full((len(numbers),), -1), torch.zeros(len(numbers))
    return contribute(Units(canaries.rows(numbers, plan.clip.params), losses, votes), plan)


class UnitsFailed(RuntimeError):
    """The work of every unit raised; whoever logs this quotes no record."""

    @classmethod
    def by(cls, error: Exception, what: str) -> "UnitsFailed":
        """Make one that names the class of the first unit's error and where it was raised, and not its text."""
        *_, at = traceback.extract_tb(error.__traceback__)
        return cls(f"every {what} raised ({type(error).__name__} in {at.name}, {Path(at.filename).name}:{at.lineno})")


def together_or_alone(
    together: Callable[[], Contribution], alone: Callable[[int], Contribution], count: int, what: str
) -> Contribution:
    """The sum over some units; where that raises, the sum over those whose work alone does not.

    Args:
        alone: the sum over one of them, by its position.
        what: a unit, for the log, which names the kind of an error only: its text may quote records.

    Raises:
        UnitsFailed: every unit's work raises.
    """
    try:
        return together()
    except Exception as error:  # whatever one unit's records make the model raise
        if count < 2:
            raise UnitsFailed.by(error, what) from None
        log.warning("%ss computed together failed (%s); each is tried by itself", what, type(error).__name__)
    sums, failed = list[Contribution](), list[Exception]()
    for position in range(count):
        try:
            sums.append(alone(position))
        except Exception as error:
            failed.append(error)
    if not sums:
        raise UnitsFailed.by(failed[0], what)
    for reason in failed:
        log.warning("a %s contributes zero: its work raised %s", what, type(reason).__name__)
    return sum(sums[1:], sums[0])


def _by_rank(request: TrainRequest) -> list[tuple[int | None, np.ndarray]]:
    """Numbers of ranks, None for all, and the positions of the clients that train so many."""
    most = request.part.ranks
    if request.ranks is None:
        return [(most, np.arange(len(request.clients)))]
    ranks = request.ranks if most is None else np.minimum(request.ranks, most)
    return [(int(rank), np.flatnonzero(ranks == rank)) for rank in np.unique(ranks)]


def make_engine(job: Job) -> Engine:
    """The engine a job asks for, on a freshly loaded base model."""
    device = job.base.chosen_device()
    model, _ = job.base.load(job.model, job.task, job.num_labels)
    job.base.refuse_unfit(model, device, job.token_budget, plain=job.sequential)
    if job.reading is not None:  # the server has seen to it for its own data; a node with records takes nobody's word
        refuse_longer_than_positions(model, job.reading.max_length)
        refuse_batch_dependent_positions(model, job.reading.max_length)
    task = make_task(job.task, job.num_labels, job.local.balance, **dict(job.local.preference))
    return build_engine(
        model,
        job.spec,
        task,
        sequential=job.sequential,
        token_budget=job.token_budget or None,
        precision=job.base.precision,
        device=device,
        quantisation=job.base.quantisation,
        checkpoint_blocks=job.base.checkpoint_blocks,
        prefix_memory=job.prefix_cache_mb * 2**20,
        prefix_folder=Path(job.data).parent,  # on the disk of the prepared data, which has room
    )


def local_seed(seed: int, round: int, client: int) -> int:
    """Seed of one client's local randomness in one round: the same on whichever worker it is trained."""
    return int(simulation_generator(seed, "local", round, client).integers(2**62))


@functools.lru_cache(maxsize=1)
def warm_worker(job: str) -> Worker:
    """The worker of this process for a job; kept from message to message, replaced when another job comes."""
    torch.set_num_threads(1)  # one thread per worker: as many workers as cores are faster than threads within one
    return Worker(Job.from_json(job))
