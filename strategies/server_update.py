"""The server's step on a release: optimizer, rewriting by the aggregation, the average that is served.

All of it is post-processing of the release, in the coordinates of the sent vector without its scales, so an optimizer
sees updates of adapter values and the noise that is on them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from privacy.mechanism import Release
from privacy.randomness.noise import InsecureZeroNoise, Noise
from strategies.adapter.layout import AdapterLayout, turn_factors
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Aggregation, Rewritten
from strategies.optimizers.optimizer import Optimizer, ServerStep, take_step
from strategies.plugins import expect, expect_finite, expect_tensor


@dataclass(frozen=True)
class ServerState:
    """Everything that changes from round to round; a checkpoint holds exactly this and the ledger.

    Attributes:
        round: the last round done; -1 before the initial release, 0 before round 1.
        adapter: float32 ``[size]``, the global adapter in full (frozen factors included).
        served: float32 ``[size]``, its exponential moving average; the adapter itself where no average is kept.
        optimizer: named tensors of the server optimizer: one number per adapter value ``[size]``, or 0-d.
        subspace: that of the public subspace releases are made in, None for the whole space.
    """

    round: int
    adapter: Float[Tensor, " size"]
    served: Float[Tensor, " size"]
    optimizer: dict[str, Tensor]
    controller: Any
    subspace: Any = None


@dataclass(frozen=True)
class ServerUpdate:
    """The server's parts that turn a release into the next adapter.

    Attributes:
        optimizer: takes the released mean update as a pseudo-gradient.
        aggregation: may rewrite the adapter afterwards.
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
        rewritten = self._rewriting(adapter, round)
        adapter = adapter if rewritten is None else rewritten.adapter
        state = self.optimizer.init(adapter)
        expect("optimizer", self.optimizer, "init", state, dict, "a dict of tensors, empty where there is no state")
        return ServerState(round, adapter, adapter, state, controller)

    def after(
        self,
        state: ServerState,
        release: Release,
        part: TrainedSubset,
        round: int,
        scale: float,
    ) -> ServerState:
        """Adapter, served adapter and optimizer state after the release of ``round``, which trained ``part``."""
        std = release.plan.noise_std(release.expected_units) * release.loudness
        return self.apply_update(state, release.update, std, part, round, scale)

    def apply_update(
        self,
        state: ServerState,
        update: Float[Tensor, " d"],
        std: Float[Tensor, "*d"],
        part: TrainedSubset,
        round: int,
        scale: float,
    ) -> ServerState:
        """Apply a mean update, given with the noise on it, both as they are sent."""
        layout, scales = part.layout(self.layout), part.scales(self.layout)
        if isinstance(self.noise, InsecureZeroNoise):
            std = torch.zeros_like(std)  # an optimizer that takes off noise which is not there hardly moves
        if scales is not None:
            update, std = update / scales, std / scales
        per_value = {name for name, tensor in state.optimizer.items() if tensor.shape == state.adapter.shape}
        own = {n: layout.trainable_values(t) if n in per_value else t for n, t in state.optimizer.items()}
        step = ServerStep(round, update, std, scale)
        own, values = take_step(self.optimizer, own, layout.trainable_values(state.adapter), step)
        optimizer = {n: layout.with_trainable(state.optimizer[n], t) if n in per_value else t for n, t in own.items()}
        adapter = layout.with_trainable(state.adapter, values)
        served = adapter
        if self.served_average:
            served = torch.lerp(state.served, adapter, served_share(self.served_average, round))
        return self._rewritten(replace(state, adapter=adapter, served=served, optimizer=optimizer))

    def _rewriting(self, adapter: Float[Tensor, " size"], round: int) -> Rewritten | None:
        """What the aggregation makes of an adapter, which is released or the start; whole and finite."""
        found = self.aggregation.rewritten(adapter, self.layout)
        if found is not None:
            expect("aggregation", self.aggregation, "rewritten", found, Rewritten, "a Rewritten, or None")
            expect_tensor("aggregation", self.aggregation, "rewritten", found.adapter, adapter)
            expect_finite("aggregation", self.aggregation, "rewritten", found.adapter, f"in round {max(round, 1)}")
        return found

    def _rewritten(self, state: ServerState) -> ServerState:
        """The state in the coordinates the aggregation wants, if it wants others."""
        rewritten = self._rewriting(state.adapter, state.round + 1)
        if rewritten is None:
            return state
        adapter, moments = rewritten.adapter, self.optimizer.moments
        served = adapter
        if self.served_average:
            served = turn_factors(state.served, rewritten.turns, self.layout)
            for entry in self.layout.entries:
                if entry.factor == "A":
                    entry.of(served).copy_(entry.of(adapter))
        optimizer = {
            name: turn_factors(tensor, rewritten.turns, self.layout, moments[name]) if name in moments else tensor
            for name, tensor in state.optimizer.items()
        }
        return replace(state, adapter=adapter, served=served, optimizer=optimizer)


def served_share(factor: float, round: int) -> float:
    """The share of the newest adapter in the served one: debiased, so that the starting point is not in it."""
    return (1 - factor) / (1 - factor**round)
