"""From a release to the next adapter: the optimizer on what the round trained, the average, the aggregation.

Everything here is post-processing of the release. It is done in the coordinates of the sent vector without its scales,
so an optimizer sees updates of adapter values and the noise that is on them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from client.lora import AdapterLayout, Part
from privacy.mechanism import Noise, Release
from privacy.noise import InsecureZeroNoise
from strategies.aggregation.aggregation import Aggregation
from strategies.optimizer import Optimizer, ServerStep
from strategies.server_state import ServerState

PublicLoss = Callable[[Float[Tensor, " size"]], float]


@dataclass(frozen=True)
class Server:
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
        self, state: ServerState, release: Release, part: Part, round: int, scale: float, public_loss: PublicLoss | None
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

    def _rewritten(self, state: ServerState, part: Part) -> ServerState:
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
