"""DP-FedAvg as a Flower strategy: plan -> messages -> bounded sums -> one charged release -> server step.

    x_{t+1} = step( x_t, ( sum_{k in cohort} clip(Delta_k) + N(0, z^2 C^2 I) ) / (q N) )

Reference: McMahan, Ramage, Talwar, Zhang, ICLR 2018 (arXiv 1710.06963v3), Algorithm 1 with the fixed denominator.
Guarantee: each round is one Poisson-sampled Gaussian event, charged to the ledger before noise is drawn; unit: client,
add or remove one. The divisor is q N whatever the cohort turned out to be; a node that fails contributes zero.

The strategy owns no loop: ``server/runs/loop.py`` drives it (Flower's own ``Strategy.start`` can neither resume, nor
stop when a budget is spent, nor begin with an initial release).
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from jaxtyping import Float
from torch import Tensor

from privacy.contribution import Contribution, Plan
from privacy.errors import BudgetExceeded
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from privacy.randomness.noise import Noise
from privacy.randomness.sampling import CohortSampler
from strategies.adapter.layout import AdapterLayout
from strategies.aggregations.aggregation import Adapters, Aggregation
from strategies.controllers.controller import Controller, PublicSignals, RunInfo
from strategies.dispatch import RoundFailed, asked, shares
from strategies.messages.client_update import TrainRequest
from strategies.optimizers.optimizer import Optimizer
from strategies.private_training import PlannedRelease, Planner, PublicLoss, ServerState, ServerUpdate
from strategies.public_subspace import Subspace
from strategies.replies import summed
from strategies.secure_aggregation import SecureAggregation

log = logging.getLogger(__name__)


class DpFedAvg(Strategy):
    """Differentially private federated averaging of LoRA adapters.

    Args:
        controller: plans every release.
        optimizer: takes the released mean update as a pseudo-gradient.
        aggregation: names what each round trains, and may rewrite the adapter after it.
        setting: what the run told the controller.
        layout: where each adapter value lies.
        ledger: pays for every release.
        sampler: draws the cohorts.
        job: canonical JSON every node needs, see :class:`strategies.messages.client_update.TrainRequest`.
        nodes: how many must be connected before a round starts; or the node of every client, by the clients' ids, in a
            deployment, where one that is away contributes zero.
        clients_per_node: None splits the cohort over the nodes; 1 sends every client's work as a message of its own.
        served_average: factor of the exponential moving average of the served adapter, in [0, 1).
        work: expected work of each client, for balancing; None counts all alike.
        noise: noise of the mechanism; None is the default.
        subspace: gives the public subspace to clip in at an adapter; None clips in the whole space.
        patience: seconds to wait for the nodes.
        seed: of the run's public randomness, for aggregations that draw from it.
        public_loss: mean loss of a full adapter on the public validation set, for an optimizer that reads it; it may
            be set until :meth:`begin`.

    Attributes:
        state: of the server; whole again as soon as ``aggregate_train`` returns, so it can be saved right then.
        release: the last one.
        secure: opens the sums if the clients make the noise; set behind the constructor, for it needs the grid.
    """

    def __init__(
        self,
        *,
        controller: Controller[Any],
        optimizer: Optimizer,
        aggregation: Aggregation,
        setting: RunInfo,
        layout: AdapterLayout,
        ledger: Ledger,
        sampler: CohortSampler,
        job: str,
        nodes: int | tuple[int, ...],
        clients_per_node: int | None = None,
        served_average: float = 0.0,
        work: Sequence[float] | np.ndarray | None = None,
        noise: Noise | None = None,
        subspace: Subspace | None = None,
        patience: float = 600.0,
        seed: int = 0,
        public_loss: PublicLoss | None = None,
    ) -> None:
        self.controller = controller
        self.server = ServerUpdate(optimizer, aggregation, layout, served_average, noise)
        adapters = Adapters(layout.rank, setting.sampling.population, seed)
        self.planner = Planner(controller, setting, aggregation, adapters, subspace, ledger.commitment.noise_shares)
        self.ledger = ledger
        self.sampler = sampler
        self.job = job
        self.nodes = nodes
        self.clients_per_node = clients_per_node
        self.work = work
        self.noise = noise
        self.patience = patience
        self.state: ServerState | None = None
        self.release: Release | None = None
        self.public_loss = public_loss
        self.secure: SecureAggregation | None = None
        self._sent: list[tuple[Metadata, int]] = []
        self._away = 0
        self._next: tuple[ServerState, PlannedRelease] | None = None

    def begin(self, adapter: Float[Tensor, " size"], public: PublicSignals) -> None:
        """Start from a full adapter vector; ``public`` describes the model it makes."""
        if self.server.optimizer.reads_public_loss and self.public_loss is None:
            raise ValueError(f"{type(self.server.optimizer).__name__} reads the public loss; set public_loss first")
        first = 0 if self.planner.initial() is None else -1
        self.state = self.server.start(adapter, self.controller.init(self.planner.setting, public), first)

    def restore(self, state: ServerState, update: Tensor | None = None, answers: tuple[Tensor, ...] = ()) -> None:
        """Go on from a checkpoint.

        Args:
            state: as it was after the last release (or after :meth:`begin`), before the controller heard of that.
            update, answers: of that release; None if there was none yet. :meth:`observe` is the next call then.

        Raises:
            CorruptRun: the ledger knows of no such release.
        """
        self.state, self.release = state, None
        if update is not None:
            before = self.planner.planned(replace(state, round=state.round - 1))
            self.release = before.reopened(update, answers, self.ledger)

    def next_release(self) -> PlannedRelease:
        """The next release; planned once, so that one plan clips and sets the noise."""
        state = self._state()
        if self._next is None or self._next[0] is not state:
            self.state = self.planner.based(state)
            self._next = self.state, self.planner.planned(self.state)
        return self._next[1]

    def next_plan(self) -> tuple[int, Plan, Poisson]:
        """Number, plan and sampling of the next release."""
        planned = self.next_release()
        return planned.round, planned.plan, planned.sampling

    def refusal(self) -> str | None:
        """Why the ledger does not pay for the next release, or None. Asked before anyone is sampled."""
        return self.ledger.would_exceed(self.next_release().event)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per node with the ids of the clients it is to train. ``arrays`` and ``config`` are not used."""
        planned = self._planned(server_round)
        if (refusal := self.refusal()) is not None:
            raise BudgetExceeded(refusal)
        nodes, away = asked(grid, self.nodes, self.patience)
        if self.sampler.insecure and self.ledger.not_private is None:
            self.ledger.stamp_not_private("cohorts are drawn from a seed")
        round, label = planned.round, planned.label
        attempt = sum(event.round == round and event.label == label for event in self.ledger.events)
        cohort = self.sampler.draw(planned.sampling, round, attempt, label=label)
        state = self._state()
        adapter, basis = state.adapter.numpy(), None if state.basis is None else state.basis.numpy()
        self._sent, self._away, messages = [], 0, []
        requests: list[tuple[int, TrainRequest]] = []
        for node, clients in shares(cohort, nodes, self.work, self.clients_per_node):
            if node in away:
                log.warning("round %d: node %d is not connected", round, node)
                self._away += 1
                continue
            ranks = self.planner.aggregation.client_ranks(self.planner.adapters, clients)
            request = TrainRequest(round, adapter, planned.plan, planned.part, clients, self.job, basis, ranks)
            message = Message(content=request.to_records(), message_type=MessageType.TRAIN, dst_node_id=node)
            self._sent.append((message.metadata, len(clients)))
            messages.append(message)
            requests.append((node, request))
        return messages if self.secure is None else self.secure.begin(planned, attempt, requests, self.ledger)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum what came back, release it, take the server's step. A failed node contributes zero; noise stays whole."""
        state = self._state()
        planned = self._planned(server_round)
        if self.secure is None:
            self.release = planned.release(self._total(planned, replies), self.ledger, self.noise)
        else:
            self.release = self.secure.release(replies, self.ledger)
        if planned.round > 0:
            scale = self.controller.step_scale(state.controller)
            loss = self._public_loss if self.server.optimizer.reads_public_loss else None
            state = self.server.after(state, self.release, planned.part, planned.round, scale, loss)
        self.state = replace(state, round=planned.round)
        return ArrayRecord({"adapter": Array(self.state.served.numpy())}), None

    def observe(self, public: PublicSignals) -> None:
        """Tell the controller of the last release and of what everyone may know after it."""
        state = self._state()
        if self.release is None:
            raise ValueError("observe needs a release; call it after aggregate_train")
        self.state = replace(state, controller=self.controller.update(state.controller, self.release, public))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Clients are not evaluated: their metrics would be releases that nobody paid for."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing was asked."""
        return None

    def summary(self) -> None:
        """Log what this strategy is."""
        log.info(
            "DP-FedAvg: %s, %s, %s; %d values, expected cohort %g",
            type(self.controller).__name__,
            type(self.server.optimizer).__name__,
            type(self.planner.aggregation).__name__,
            self.planner.setting.dimension(1),
            self.planner.setting.sampling.expected_units,
        )

    def _public_loss(self, adapter: Float[Tensor, " size"]) -> float:
        """The public loss for the optimizer. A failed evaluation is NaN: it must not lose a release that is paid."""
        assert self.public_loss is not None
        try:
            return self.public_loss(adapter)
        except RoundFailed as error:
            log.warning("public loss for the server optimizer: %s", error)
            return math.nan

    def _total(self, planned: PlannedRelease, replies: Iterable[Message]) -> Contribution:
        total, sound = summed(self._sent, replies, planned.plan, planned.round)
        if 2 * sound < len(self._sent) + self._away:
            self.ledger.charge(planned.event)
            raise RoundFailed(  # without numbers: how many messages went out may tell the realised cohort
                f"round {planned.round}: too few messages were answered soundly, at least half must be; the round is "
                "charged and nothing was released; the run's log names the nodes and the kind of failure, the workers' "
                "own log (in simulation the same file) has the details"
            )
        return total

    def _planned(self, server_round: int) -> PlannedRelease:
        planned = self.next_release()
        if planned.round != server_round:
            raise ValueError(f"server_round must be {planned.round}, the round after the state, got {server_round}")
        return planned

    def _state(self) -> ServerState:
        if self.state is None:
            raise ValueError("the strategy has no state; call begin() or restore a checkpoint first")
        return self.state
