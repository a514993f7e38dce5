"""DP-FedAvg as a Flower strategy: plan -> messages -> bounded sums -> one charged release -> server step.

    x_{t+1} = step( x_t, ( sum_{k in cohort} clip(Delta_k) + N(0, z^2 C^2 I) ) / (q N) )

Reference: McMahan, Ramage, Talwar, Zhang, ICLR 2018 (arXiv 1710.06963v3), Algorithm 1 with the fixed denominator.
Guarantee: each round is one Poisson-sampled Gaussian event, charged to the ledger before noise is drawn; unit: client,
add or remove one. The divisor is q N whatever the cohort turned out to be; a client that fails contributes zero, and
the clients of a shard that is lost are asked again one by one.

The strategy owns no loop: ``server/runs/loop.py`` steps it (Flower's own ``Strategy.start`` can neither resume, nor
stop when a budget is spent, nor begin with an initial release).
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from jaxtyping import Int64

from privacy.contribution import MAX_UNITS, Contribution, Plan
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from privacy.randomness.noise import Noise
from privacy.randomness.sampling import Cohort, CohortSampler, RemoteSampler
from strategies.adapter.layout import AdapterLayout
from strategies.aggregations.aggregation import Adapters, Aggregation
from strategies.controllers.controller import Controller, RunInfo
from strategies.messages.client_update import TrainRequest
from strategies.messages.dispatch import PATIENCE, RoundFailed, Tell, nodes_to_ask, shares, split_shards, sum_replies
from strategies.messages.own_clients import Draw
from strategies.optimizers.optimizer import Optimizer
from strategies.private_training import PlannedRelease, Planner, PrivateTraining
from strategies.published.raw_rows import ExactCounts
from strategies.secure_aggregation import SecureAggregation
from strategies.server_update import ServerUpdate

log = logging.getLogger(__name__)

AGAIN = (10.0, 60.0)
"""Seconds before a deployed round that would be lost asks again, the first time and the second."""


class DpFedAvg(PrivateTraining, Strategy):
    """The strategy of differentially private federated averaging of LoRA adapters.

    Args:
        controller: plans every release.
        optimizer: takes the released mean update as a pseudo-gradient.
        aggregation: names what each round trains, and may rewrite the adapter after it.
        info: what the run tells the controller.
        layout: where each adapter value lies.
        ledger: pays for every release.
        sampler: draws the cohorts; a RemoteSampler where every node draws among clients of its own, in the order of
            ``nodes``.
        job: canonical JSON every node needs, see :class:`strategies.messages.client_update.TrainRequest`.
        nodes: how many must be connected before a round starts; or, in a deployment, where one that is away contributes
            zero, the node of every client, by the clients' ids, or all nodes if each has many clients.
        clients_per_node: None splits the cohort over the nodes; 1 sends every client's work as a message of its own.
        served_average: factor of the exponential moving average of the served adapter, in [0, 1).
        work: expected work of each client, for balancing; None counts all alike.
        noise: noise of the mechanism; None is the default.
        patience: seconds to wait for the nodes.
        seed: of the run's public randomness, for aggregations that draw from it.

    Attributes, set behind the constructor:
        grid, exchange: for :meth:`step`: where the nodes are, and what sends messages and gives the replies as they
            come; without them :meth:`configure_train` and :meth:`aggregate_train` make a round, as Flower calls them.
        secure: opens the sums if the clients make the noise.
        tell: is told what a round waits for.
        away: nodes of a deployment that were not connected when the last cohort was drawn; None before one was.
    """

    def __init__(
        self,
        *,
        controller: Controller[Any],
        optimizer: Optimizer,
        aggregation: Aggregation,
        info: RunInfo,
        layout: AdapterLayout,
        ledger: Ledger,
        sampler: CohortSampler | RemoteSampler,
        job: str,
        nodes: int | tuple[int, ...],
        clients_per_node: int | None = None,
        served_average: float = 0.0,
        work: Sequence[float] | np.ndarray | None = None,
        noise: Noise | None = None,
        patience: float = PATIENCE,
        seed: int = 0,
    ) -> None:
        adapters = Adapters(layout.rank, info.sampling.population, seed)
        super().__init__(
            planner=Planner(controller, info, aggregation, adapters, None, ledger.commitment.noise_shares),
            server=ServerUpdate(optimizer, aggregation, layout, served_average, noise),
            ledger=ledger,
            sampler=sampler,
        )
        self.job = job
        self.nodes = nodes
        self.clients_per_node = clients_per_node
        self.work = work
        self.patience = patience
        self.grid: Grid | None = None
        self.exchange: Callable[[list[Message]], Iterable[Message]] | None = None
        self.secure: SecureAggregation | None = None
        self.tell: Tell = lambda text: None
        self.away: frozenset[int] | None = None
        self._sent: list[tuple[Metadata, int]] = []
        self._asked: list[tuple[int, TrainRequest]] = []
        self._cohort: Cohort | None = None
        self._away = 0

    def make_release(self, planned: PlannedRelease) -> Release:
        """Send the messages of a round, take the replies, release their sum.

        Raises:
            RoundFailed: too few nodes, or too few sound replies; the latter is charged, and nothing was released.
        """
        if self.grid is None or self.exchange is None:
            raise ValueError("step needs a grid and an exchange; set them, or use configure_train and aggregate_train")
        return self._opened(planned, self.exchange(self._messages(planned, self.grid)))

    def measure(self, plan: Plan, sampling: Poisson) -> Release | None:
        """Release what held-out units answer about the served adapter after the last round.

        They are asked once a round, whatever becomes of it: an answer that was paid for and lost stays lost.

        Args:
            plan: of queries alone.
            sampling: of the held-out part of the population.

        Returns:
            the release; None where the ledger does not pay for it, or has paid before.
        """
        round = self.state.round
        planned = PlannedRelease(round, plan, sampling, self.planner.part(round), measures=True)
        if self.ledger.attempts(planned.label, round) or self.ledger.would_exceed(planned.event):
            return None
        return self.make_release(planned)

    def ask(self, plan: Plan, sampling: Poisson) -> Release:
        """Release what all units say of their own records; nobody trains, and there is no adapter yet.

        Args:
            plan: of the rows that a job which ``asks`` makes them bring.
            sampling: everybody.

        Raises:
            RoundFailed, BudgetExceeded: see :meth:`make_release`.
        """
        shares = self.planner.noise_shares
        return self.make_release(PlannedRelease(0, plan, sampling, self.planner.part(1), shares, asks=True))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per node with the ids of the clients it is to train. ``arrays`` and ``config`` are not used."""
        self._expect(server_round)
        return self._messages(self._paid(), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum what came back, release it, take the server's step. A failed node contributes zero; noise stays whole."""
        planned = self._expect(server_round)
        self._take(planned, self._opened(planned, replies))
        return ArrayRecord({"adapter": Array(self.state.served.numpy())}), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Clients are not evaluated: their metrics would be releases that nobody paid for."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing, for nothing was asked."""
        return None

    def summary(self) -> None:
        """Log what this strategy is."""
        log.info(
            "DP-FedAvg: %s, %s, %s; %d values, expected cohort %g",
            type(self.controller).__name__,
            type(self.server.optimizer).__name__,
            type(self.planner.aggregation).__name__,
            self.planner.info.dimension(1),
            self.planner.info.sampling.expected_units,
        )

    def _messages(self, planned: PlannedRelease, grid: Grid) -> list[Message]:
        """What the nodes of the cohort are sent; with secure sums, once they have agreed and the ledger has paid."""
        least = self.secure.federation.noise_shares.survivors if self.secure is not None else 0
        nodes, away = nodes_to_ask(grid, self.nodes, self.patience, least, self.tell)  # before anybody is drawn
        self.away = away
        if isinstance(self.controller, ExactCounts):
            self.ledger.stamp_not_private(self.controller.unsound)
        self._cohort = cohort = self.cohort(planned)
        self._away, there = 0, []
        for node, request, most in self._requests(planned, cohort, nodes):
            if node in away:
                log.warning("round %d: node %d is not connected", planned.round, node)
                self._away += 1
                continue
            there.append((node, request, most))
        self._asked = [(node, request) for node, request, _ in there]
        if self.secure is not None:
            return self.secure.begin(planned, cohort, self._asked, self.ledger)
        messages = [_message(node, request) for node, request in self._asked]
        self._sent = [(message.metadata, most) for message, (_, _, most) in zip(messages, there, strict=True)]
        return messages

    def _requests(
        self, planned: PlannedRelease, cohort: Cohort, nodes: Sequence[int]
    ) -> Iterator[tuple[int, TrainRequest, int]]:
        """Node, request and the most clients its sum can be over, of every message."""
        if not isinstance(self.sampler, RemoteSampler):
            for node, clients in shares(cohort.ids, nodes, self.work, self.clients_per_node):
                yield node, self._request(planned, clients), len(clients)
            return
        run, label, attempt = self.ledger.run_id, cohort.label, cohort.attempt
        for node, number, most in zip(nodes, self.sampler.units, cohort.held, strict=True):
            draw = Draw(run, label, attempt, cohort.sampling, number)
            yield node, self._request(planned, cohort.ids, draw), min(most, MAX_UNITS)

    def _request(
        self, planned: PlannedRelease, clients: Int64[np.ndarray, " k"], draw: Draw | None = None
    ) -> TrainRequest:
        whole = draw is not None or planned.measures or planned.asks
        ranks = None if whole else self.planner.aggregation.client_ranks(self.planner.adapters, clients)
        if planned.asks:
            adapter = np.empty(0, dtype=np.float32)
        else:
            adapter = (self.state.served if planned.measures else self.state.adapter).numpy()
        return TrainRequest(planned.round, adapter, planned.plan, planned.part, clients, self.job, ranks, draw)

    def _opened(self, planned: PlannedRelease, replies: Iterable[Message]) -> Release:
        cohort, self._cohort = self._cohort, None
        if cohort is None:
            raise ValueError("aggregate_train needs a cohort that was asked; call configure_train first")
        if self.secure is not None:
            return self.secure.release(replies, self.ledger)
        total, answered = sum_replies(self._sent, replies, planned.plan, planned.round)
        if isinstance(self.nodes, tuple):
            total, answered = self._asked_again(planned, total, answered)
        rescued, sound = self._rescued(planned, answered)
        if self._too_few(sound):
            self.ledger.charge(planned.event)
            raise RoundFailed(  # without numbers: how many messages went out may tell the realised cohort
                f"round {planned.round}: too few messages were answered soundly, at least half must be; the round is "
                "charged and nothing was released; the run's log names the nodes and the kind of failure, the workers' "
                "own log (in simulation the same file) has the details"
            )
        return planned.release(total + rescued, cohort, self.ledger, self.noise)

    def _too_few(self, sound: int) -> bool:
        return 2 * sound < len(self._sent) + self._away

    def _asked_again(
        self, planned: PlannedRelease, total: Contribution, answered: frozenset[int]
    ) -> tuple[Contribution, frozenset[int]]:
        """The sum of a deployed round, and which messages it answers, after those that were lost were sent once more.

        Only where the round would else be paid for nothing, as under a load at which nodes and server miss each other.
        Cohort and requests stay as they are, and each message is in the sum once: a late answer to the first is foreign
        to the second.
        """
        for pause in AGAIN:
            lost = [i for i in range(len(self._asked)) if i not in answered]
            if not self._too_few(len(answered)) or not lost or self.exchange is None:
                break
            log.warning("round %d: too few messages were answered soundly; the others are sent again", planned.round)
            time.sleep(pause)
            messages = [_message(*self._asked[i]) for i in lost]
            replies = self.exchange(messages)
            sent = [(message.metadata, self._sent[i][1]) for message, i in zip(messages, lost, strict=True)]
            found, positions = sum_replies(sent, replies, planned.plan, planned.round)
            total, answered = total + found, answered | {lost[position] for position in positions}
        return total, answered

    def _rescued(self, planned: PlannedRelease, answered: frozenset[int]) -> tuple[Contribution, int]:
        """What clients of lost shards answer when each is asked alone; how many shards were answered, now or before."""
        total, sound = Contribution.zero(planned.plan), len(answered)
        lost = [i for i in range(len(self._asked)) if i not in answered and len(self._asked[i][1].clients) > 1]
        if not lost or self.exchange is None:
            return total, sound
        log.warning("round %d: the clients of shards that are lost are asked again, one by one", planned.round)
        shard = {int(client): i for i in lost for client in self._asked[i][1].clients}
        nodes = [self._asked[i][0] for i in sorted(answered) or range(len(self._asked))]
        back = set[int]()
        for wave in split_shards([self._asked[i][1].clients for i in lost], nodes):
            messages = [_message(node, self._request(planned, clients)) for node, clients in wave]
            replies = self.exchange(messages)
            sent = [(message.metadata, len(clients)) for message, (_, clients) in zip(messages, wave, strict=True)]
            found, positions = sum_replies(sent, replies, planned.plan, planned.round)
            total = total + found
            back |= {shard[int(wave[position][1][0])] for position in positions}
        return total, sound + len(back)

    def _expect(self, server_round: int) -> PlannedRelease:
        planned = self.next_release()
        if planned.round != server_round:
            raise ValueError(f"server_round must be {planned.round}, the round after the state, got {server_round}")
        return planned


def _message(node: int, request: TrainRequest) -> Message:
    return Message(content=request.to_records(), message_type=MessageType.TRAIN, dst_node_id=node)
