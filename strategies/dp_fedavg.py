"""DP-FedAvg as a Flower strategy: plan -> messages -> bounded sums -> one charged release -> server step.

    x_{t+1} = step( x_t, ( sum_{k in cohort} clip(Delta_k) + N(0, z^2 C^2 I) ) / (q N) )

Reference: McMahan, Ramage, Talwar, Zhang, ICLR 2018 (arXiv 1710.06963v3), Algorithm 1 with the fixed denominator.
Guarantee: each round is one Poisson-sampled Gaussian event, charged to the ledger before noise is drawn; unit: client,
add or remove one. The divisor is q N whatever the cohort turned out to be; a node that fails contributes zero.

The strategy owns no loop: ``server/loop.py`` drives it (Flower's own ``Strategy.start`` can neither resume, nor stop
when a budget is spent, nor begin with an initial release).
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from jaxtyping import Float
from torch import Tensor

from client.lora import AdapterLayout
from client.wire import TrainRequest
from privacy.clipping import FlatClip, NoUpdate
from privacy.errors import BudgetExceeded
from privacy.events import Poisson, ReleaseEvent
from privacy.ledger import Ledger
from privacy.mechanism import Contribution, Noise, Plan, Release, charged_release, reopened_release
from privacy.sampling import CohortSampler
from privacy.subspace import SubspaceClip
from strategies.aggregation.aggregation import Aggregation, Factors
from strategies.controller import Controller, PublicSignals, Setting
from strategies.optimizer import Optimizer
from strategies.replies import summed
from strategies.shards import split

log = logging.getLogger(__name__)


class RoundFailed(RuntimeError):
    """A round that cannot go on: too few nodes, or too few sound replies. Its charge stands."""


@dataclass(frozen=True)
class ServerState:
    """Everything that changes from round to round; a checkpoint holds exactly this and the ledger.

    Attributes:
        round: the last round done; -1 before the initial release, 0 before round 1.
        adapter: float32 ``[size]``, the global adapter in full (frozen factors included).
        served: float32 ``[size]``, its exponential moving average; the adapter itself where no average is kept.
        optimizer: named tensors of the server optimizer.
        controller: the controller's state.
        basis: float32 ``[k, d]``, the public subspace updates are clipped in; None for the whole space.
        basis_round: the round it was made for.
    """

    round: int
    adapter: Float[Tensor, " size"]
    served: Float[Tensor, " size"]
    optimizer: dict[str, Tensor]
    controller: Any
    basis: Float[Tensor, "k d"] | None = None
    basis_round: int = -1


class Subspace(Protocol):
    """Where a public subspace comes from."""

    @property
    def refresh(self) -> int:
        """Rounds a basis is kept, >= 1."""
        ...

    def basis(self, adapter: Float[Tensor, " size"], train: Factors) -> Float[Tensor, "k d"]:
        """Orthonormal rows in the space of the trained values, from public data and the adapter alone."""
        ...


class DpFedAvg(Strategy):
    """Differentially private federated averaging of LoRA adapters.

    Args:
        controller: plans every release.
        optimizer: takes the released mean update as a pseudo-gradient.
        aggregation: names the factors each round trains.
        setting: what the run told the controller.
        layout: where each adapter value lies.
        ledger: pays for every release.
        sampler: draws the cohorts.
        job: canonical JSON every node needs, see :class:`client.wire.TrainRequest`.
        nodes: nodes that must be connected before a round starts.
        clients_per_node: None splits the cohort over the nodes; 1 sends every client's work as a message of its own.
        served_average: factor of the exponential moving average of the served adapter, in [0, 1).
        work: expected work of each client, for balancing; None counts all alike.
        noise: noise of the mechanism; None is the default.
        subspace: gives the public subspace to clip in at an adapter; None clips in the whole space.
        patience: seconds to wait for the nodes.
    """

    def __init__(
        self,
        *,
        controller: Controller[Any],
        optimizer: Optimizer,
        aggregation: Aggregation,
        setting: Setting,
        layout: AdapterLayout,
        ledger: Ledger,
        sampler: CohortSampler,
        job: str,
        nodes: int,
        clients_per_node: int | None = None,
        served_average: float = 0.0,
        work: Sequence[float] | np.ndarray | None = None,
        noise: Noise | None = None,
        subspace: Subspace | None = None,
        patience: float = 600.0,
    ) -> None:
        self.controller = controller
        self.optimizer = optimizer
        self.aggregation = aggregation
        self.setting = setting
        self.layout = layout
        self.ledger = ledger
        self.sampler = sampler
        self.job = job
        self.nodes = nodes
        self.clients_per_node = clients_per_node
        self.served_average = served_average
        self.work = work
        self.noise = noise
        self.subspace = subspace
        self.patience = patience
        self.state: ServerState | None = None
        self.release: Release | None = None
        self._sent: list[tuple[Metadata, int]] = []
        self._next: tuple[ServerState, int, Plan, Poisson] | None = None

    def begin(self, adapter: Float[Tensor, " size"], public: PublicSignals) -> None:
        """Start from a full adapter vector; ``public`` describes the model it makes."""
        factors = self.layout.training(self.aggregation.train(1))
        optimizer = self.optimizer.init(factors.trainable(adapter))
        first = 0 if self.initial() is None else -1
        self.state = ServerState(first, adapter, adapter, optimizer, self.controller.init(self.setting, public))

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
            self.state = replace(state, round=state.round - 1)
            round, plan, sampling = self.next_plan()
            self.state, self._next = state, None
            self.release = reopened_release(
                plan,
                update,
                answers,
                label=_label(round),
                round=round,
                sampling=sampling,
                charges=self.ledger.charges,
            )

    def initial(self) -> Poisson | None:
        """How the cohort of the initial release is drawn; None if the controller has none."""
        initial = self.controller.initial(self.setting.sampling)
        return None if initial is None else initial.sampling

    def next_plan(self) -> tuple[int, Plan, Poisson]:
        """Number, plan and sampling of the next release; planned once, so that one plan clips and sets the noise."""
        state = self._state()
        if self._next is None or self._next[0] is not state:
            state = self._with_basis(state)
            round = state.round + 1
            sampling = self.setting.sampling if round else self.initial()
            assert sampling is not None
            plan = self.controller.plan(state.controller, round)
            self._next = (state, round, plan if state.basis is None else _within(state.basis, plan), sampling)
        return self._next[1:]

    def _with_basis(self, state: ServerState) -> ServerState:
        """The state with a subspace fresh enough for the next round; it is made from public data and the adapter."""
        round = state.round + 1
        if self.subspace is not None and (state.basis is None or round >= state.basis_round + self.subspace.refresh):
            basis = self.subspace.basis(state.adapter, self.aggregation.train(max(round, 1)))
            state = self.state = replace(state, basis=basis, basis_round=round)
        return state

    def refusal(self) -> str | None:
        """Why the ledger does not pay for the next release, or None. Asked before anyone is sampled."""
        round, plan, sampling = self.next_plan()
        return self.ledger.would_exceed(ReleaseEvent(_label(round), round, sampling, plan.components()))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message per node with the ids of the clients it is to train. ``arrays`` and ``config`` are not used."""
        round, plan, sampling = self._planned(server_round)
        if (refusal := self.refusal()) is not None:
            raise BudgetExceeded(refusal)
        nodes = self._wait_for_nodes(grid)
        if self.sampler.insecure and self.ledger.not_private is None:
            self.ledger.stamp_not_private("cohorts are drawn from a seed")
        attempt = sum(event.round == round and event.label == _label(round) for event in self.ledger.events)
        cohort = self.sampler.draw(sampling, round, attempt, label=_label(round))
        if self.clients_per_node is None:
            shares = list(zip(nodes, split(cohort, len(nodes), self.work), strict=True))
        else:
            shares = [(nodes[client % len(nodes)], cohort[i : i + 1]) for i, client in enumerate(cohort.tolist())]
        self._sent, messages = [], []
        for node, clients in shares:
            if len(clients) == 0:
                continue
            state = self._state()
            train = self.aggregation.train(max(round, 1))
            basis = None if state.basis is None else state.basis.numpy()
            request = TrainRequest(round, state.adapter.numpy(), plan, train, clients, self.job, basis)
            message = Message(content=request.to_records(), message_type=MessageType.TRAIN, dst_node_id=node)
            self._sent.append((message.metadata, len(clients)))
            messages.append(message)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum what came back, release it, take the server's step. A failed node contributes zero; noise stays whole."""
        state = self._state()
        round, plan, sampling = self._planned(server_round)
        total = self._total(plan, round, replies, sampling)
        self.release = charged_release(
            total, plan, label=_label(round), round=round, sampling=sampling, ledger=self.ledger, noise=self.noise
        )
        if round > 0:
            state = self._step(state, self.release.update, round)
        self.state = replace(state, round=round)
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
            type(self.optimizer).__name__,
            type(self.aggregation).__name__,
            self.setting.dimension(1),
            self.setting.sampling.expected_units,
        )

    def _step(self, state: ServerState, update: Float[Tensor, " d"], round: int) -> ServerState:
        factors = self.layout.training(self.aggregation.train(round))
        optimizer, parameters = self.optimizer.step(state.optimizer, factors.trainable(state.adapter), update, round)
        adapter = factors.with_trainable(state.adapter, parameters)
        served = adapter
        if self.served_average:
            # Debiased, so that the first rounds are not dragged towards the starting point.
            share = (1 - self.served_average) / (1 - self.served_average**round)
            served = torch.lerp(state.served, adapter, share)
        return replace(state, adapter=adapter, served=served, optimizer=optimizer)

    def _total(self, plan: Plan, round: int, replies: Iterable[Message], sampling: Poisson) -> Contribution:
        total, sound = summed(self._sent, replies, plan, round)
        if 2 * sound < len(self._sent):
            self.ledger.charge(ReleaseEvent(_label(round), round, sampling, plan.components()))
            # How many messages went out tells the realised cohort where every client has its own.
            told = f"{sound} of {len(self._sent)}" if self.clients_per_node is None else "too few"
            raise RoundFailed(
                f"round {round}: {told} messages were answered soundly, at least half must be; the round is charged "
                "and nothing was released; the run's log names the nodes and the kind of failure, the workers' own "
                "log (in simulation the same file) has the details"
            )
        return total

    def _planned(self, server_round: int) -> tuple[int, Plan, Poisson]:
        round, plan, sampling = self.next_plan()
        if round != server_round:
            raise ValueError(f"server_round must be {round}, the round after the state, got {server_round}")
        return round, plan, sampling

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """All nodes, sorted. The ServerApp may start before they are registered; sampling needs none of them."""
        deadline = time.monotonic() + self.patience
        while len(nodes := sorted(grid.get_node_ids())) < self.nodes:
            if time.monotonic() > deadline:
                raise RoundFailed(f"{len(nodes)} of {self.nodes} nodes connected within {self.patience:g} s")
            time.sleep(0.1)
        return nodes[: self.nodes]

    def _state(self) -> ServerState:
        if self.state is None:
            raise ValueError("the strategy has no state; call begin() or restore a checkpoint first")
        return self.state


def _within(basis: Float[Tensor, "k d"], plan: Plan) -> Plan:
    """The plan with flat clipping moved into the subspace."""
    match plan.clip:
        case NoUpdate():
            return plan
        case FlatClip(bound=bound):
            return replace(plan, clip=SubspaceClip(basis, bound))
        case other:
            raise ValueError(
                f"a public subspace needs flat clipping, the controller planned {type(other).__name__}; "
                "set public.subspace = 0"
            )


def _label(round: int) -> str:
    return "round" if round else "histogram"
