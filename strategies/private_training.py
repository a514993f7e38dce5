"""What the next release is: its plan, its cohort's sampling, and what of the adapter it trains.

What the server carries from round to round.

From a release to the next adapter: the optimizer on what the round trained, the average, the aggregation.

Everything here is post-processing of the release. It is done in the coordinates of the sent vector without its scales,
so an optimizer sees updates of adapter values and the noise that is on them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from privacy.contribution import Contribution, Plan
from privacy.events import NoiseShares, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release, charged_release, reopened_release
from privacy.randomness.noise import InsecureZeroNoise, Noise
from strategies.adapter.layout import AdapterLayout
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters, Aggregation
from strategies.controllers.controller import Controller, RunInfo
from strategies.optimizers.optimizer import Optimizer, ServerStep
from strategies.public_subspace import Subspace, within


@dataclass(frozen=True)
class ServerState:
    """Everything that changes from round to round; a checkpoint holds exactly this and the ledger.

    Attributes:
        round: the last round done; -1 before the initial release, 0 before round 1.
        adapter: float32 ``[size]``, the global adapter in full (frozen factors included).
        served: float32 ``[size]``, its exponential moving average; the adapter itself where no average is kept.
        optimizer: named tensors of the server optimizer: one number per adapter value ``[size]``, or 0-d.
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


@dataclass(frozen=True)
class PlannedRelease:
    """One release before it is made.

    Attributes:
        round: 1..T; 0 is the initial release.
        plan: clips and sets the noise.
        sampling: how its cohort is drawn.
        part: what of the adapter its clients train.
        noise_shares: how its clients make the noise together; None if the server adds it.
    """

    round: int
    plan: Plan
    sampling: Poisson
    part: TrainedSubset
    noise_shares: NoiseShares | None = None

    @property
    def label(self) -> str:
        """Its name in the ledger."""
        return "round" if self.round else "histogram"

    @property
    def event(self) -> ReleaseEvent:
        """What the ledger is asked to pay."""
        return ReleaseEvent(self.label, self.round, self.sampling, self.plan.components(), self.noise_shares)

    def release(self, total: Contribution, ledger: Ledger, noise: Noise | None) -> Release:
        """Charge the ledger and release the cohort's sum, see :func:`privacy.mechanism.charged_release`."""
        return charged_release(
            total,
            self.plan,
            label=self.label,
            round=self.round,
            sampling=self.sampling,
            ledger=ledger,
            noise=noise,
        )

    def reopened(self, update: Tensor, answers: tuple[Tensor, ...], ledger: Ledger) -> Release:
        """The release as it was made before, from a checkpoint. CorruptRun if the ledger knows of no such release."""
        return reopened_release(
            self.plan,
            update,
            answers,
            label=self.label,
            round=self.round,
            sampling=self.sampling,
            charges=ledger.charges,
            noise_shares=self.noise_shares,
        )


@dataclass(frozen=True)
class Planner:
    """From the server's state to the next release.

    Attributes:
        controller: plans every release.
        setting: what the run told it.
        aggregation: names what each round trains.
        adapters: what the run told it.
        subspace: gives the public subspace to clip in; None clips in the whole space.
        noise_shares: how the clients make the noise together; None if the server adds it.
    """

    controller: Controller[Any]
    setting: RunInfo
    aggregation: Aggregation
    adapters: Adapters
    subspace: Subspace | None
    noise_shares: NoiseShares | None = None

    def initial(self) -> Poisson | None:
        """How the cohort of the initial release is drawn; None if the controller has none."""
        initial = self.controller.initial(self.setting.sampling)
        return None if initial is None else initial.sampling

    def part(self, round: int) -> TrainedSubset:
        """What a round trains; the initial release trains what round 1 does."""
        return self.aggregation.part(self.adapters, max(round, 1))

    def based(self, state: ServerState) -> ServerState:
        """The state with a subspace fit for the next round; it is made from public data and the adapter."""
        round, made = state.round + 1, state.basis_round
        if self.subspace is None:
            return state
        if state.basis is None or round >= made + self.subspace.refresh or self.part(round) != self.part(made):
            return replace(state, basis=self.subspace.basis(state.adapter, self.part(round)), basis_round=round)
        return state

    def planned(self, state: ServerState) -> PlannedRelease:
        """The release after ``state``, whose subspace is fit. A controller may plan otherwise when asked again."""
        round = state.round + 1
        sampling = self.setting.sampling if round else self.initial()
        assert sampling is not None, "a state before the initial release, and a controller that has none"
        plan = self.controller.plan(state.controller, round)
        plan = plan if state.basis is None else within(state.basis, plan)
        return PlannedRelease(round, plan, sampling, self.part(round), self.noise_shares)


PublicLoss = Callable[[Float[Tensor, " size"]], float]


@dataclass(frozen=True)
class ServerUpdate:
    """The server's parts that turn a release into the next adapter.

    Attributes:
        optimizer: takes the released mean update as a pseudo-gradient.
        aggregation: may rewrite the adapter afterwards.
        layout: where each adapter value lies.
        served_average: factor of the exponential moving average of the served adapter, in [0, 1).
        noise: what the releases carry; None is the mechanism's default.
    """

    optimizer: Optimizer
    aggregation: Aggregation
    layout: AdapterLayout
    served_average: float
    noise: Noise | None = None

    def start(self, adapter: Float[Tensor, " size"], controller: object, round: int) -> ServerState:
        """The state before the first release, from the adapter a run starts with."""
        rewritten = self.aggregation.rewritten(adapter, self.layout)
        adapter = adapter if rewritten is None else rewritten.adapter
        return ServerState(round, adapter, adapter, self.optimizer.init(adapter), controller)

    def after(
        self,
        state: ServerState,
        release: Release,
        part: TrainedSubset,
        round: int,
        scale: float,
        public_loss: PublicLoss | None,
    ) -> ServerState:
        """Adapter, served adapter and optimizer state after the release of ``round``, which trained ``part``."""
        layout, scales = part.layout(self.layout), part.scales(self.layout)
        update, std = release.update, release.plan.noise_std(release.expected_units)
        if isinstance(self.noise, InsecureZeroNoise):
            std = torch.zeros_like(std)  # an optimizer that takes off noise which is not there hardly moves
        if scales is not None:
            update, std = update / scales, std / scales
        loss = None
        if public_loss is not None:
            of_all = public_loss
            loss = lambda values: of_all(layout.with_trainable(state.adapter, values))  # noqa: E731
        per_value = {name for name, tensor in state.optimizer.items() if tensor.shape == state.adapter.shape}
        own = {n: layout.trainable(t) if n in per_value else t for n, t in state.optimizer.items()}
        step = ServerStep(round, update, std, scale, loss)
        own, values = self.optimizer.step(own, layout.trainable(state.adapter), step)
        optimizer = {n: layout.with_trainable(state.optimizer[n], t) if n in per_value else t for n, t in own.items()}
        adapter = layout.with_trainable(state.adapter, values)
        served = adapter
        if self.served_average:
            served = torch.lerp(state.served, adapter, served_share(self.served_average, round))
        return self._rewritten(replace(state, adapter=adapter, served=served, optimizer=optimizer), part)

    def _rewritten(self, state: ServerState, part: TrainedSubset) -> ServerState:
        """The state in the coordinates the aggregation wants, if it wants others."""
        rewritten = self.aggregation.rewritten(state.adapter, self.layout)
        if rewritten is None:
            return state
        adapter, moments = rewritten.adapter, self.optimizer.moments
        served = adapter
        if self.served_average:
            served = turned(state.served, rewritten.turns, self.layout)
            for entry in self.layout.entries:
                if entry.factor == "A":
                    entry.of(served).copy_(entry.of(adapter))
        optimizer = {
            name: turned(tensor, rewritten.turns, self.layout, moments[name]) if name in moments else tensor
            for name, tensor in state.optimizer.items()
        }
        basis = state.basis
        if basis is not None:
            layout = part.layout(self.layout)
            full = layout.with_trainable(basis.new_zeros(len(basis), layout.size), basis)
            basis = layout.trainable(turned(full, rewritten.turns, layout))
        return replace(state, adapter=adapter, served=served, optimizer=optimizer, basis=basis)


def served_share(factor: float, round: int) -> float:
    """The share of the newest adapter in the served one: debiased, so that the starting point is not in it."""
    return (1 - factor) / (1 - factor**round)


def turned(
    vector: Float[Tensor, "... size"],
    turns: Mapping[str, Float[Tensor, "r r"]],
    layout: AdapterLayout,
    moment: int = 1,
) -> Float[Tensor, "... size"]:
    """Full vectors whose blocks of B are multiplied by R from the right; by R o R where it holds second moments."""
    result = vector.clone()
    for entry in layout.entries:
        if entry.factor == "B":
            entry.of(result).copy_(entry.of(vector) @ turns[entry.pair] ** moment)
    return result
