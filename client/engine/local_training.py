"""Local training of one client, and its optimizer run for many clients at once on stacked vectors."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks
from privacy.randomness.rng import simulation_generator


@dataclass(frozen=True)
class LocalTraining:
    """What each client does with its records between receiving the adapter and sending its update.

    The loss of a step is the mean over the records of its batch. The optimizers are those of `torch.optim` with the
    same defaults and start fresh in every round.

    Attributes:
        optimizer: `"sgd"`, `"momentum"` (heavy ball, as `torch.optim.SGD`) or `"adamw"`.
        learning_rate: constant over the round.
        batch_size: records per step; the last step of an epoch takes what is left.
        epochs: passes over the client's records, each in a new order.
        weight_decay: L2 added to the gradient (sgd, momentum), decoupled (adamw).
        momentum: used by `"momentum"` only.
        betas, eps: used by `"adamw"` only.
        max_steps: stop after so many steps; None runs all epochs.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.1
    batch_size: int = 16
    epochs: int = 1
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_steps: int | None = None

    def __post_init__(self) -> None:
        checks.one_of(("sgd", "momentum", "adamw"), optimizer=self.optimizer)
        checks.positive(learning_rate=self.learning_rate, eps=self.eps)
        checks.integer_at_least(1, batch_size=self.batch_size, epochs=self.epochs)
        if self.max_steps is not None:
            checks.integer_at_least(1, max_steps=self.max_steps, remedy="None runs all epochs")
        checks.non_negative(weight_decay=self.weight_decay)
        checks.fraction(momentum=self.momentum, beta1=self.betas[0], beta2=self.betas[1])

    def batches(self, count: int, seed: int) -> list[np.ndarray]:
        """The record indices of every step of a client with `count` records. Depends on nothing else."""
        steps: list[np.ndarray] = []
        for epoch in range(self.epochs if count else 0):
            order = simulation_generator(seed, "batch order", epoch).permutation(count)
            steps += [order[i : i + self.batch_size] for i in range(0, count, self.batch_size)]
            if self.max_steps is not None and len(steps) >= self.max_steps:
                return steps[: self.max_steps]
        return steps


class StackedOptimizer:
    """One optimizer state per slot, stepped together; row k equals the `torch.optim` optimizer of client k."""

    def __init__(self, local: LocalTraining, parameters: Float[Tensor, "slots dim"]) -> None:
        self.local = local
        self.parameters = parameters
        moments = {"sgd": 0, "momentum": 1, "adamw": 2}[local.optimizer]
        self.moments = [torch.zeros_like(parameters) for _ in range(moments)]
        self.scratch = torch.empty_like(parameters if local.optimizer == "adamw" else parameters[:0])
        self.steps = torch.zeros(len(parameters), 1, dtype=torch.float64)

    def reset(self, slot: int) -> None:
        """Forget the client that held this slot."""
        self.steps[slot] = 0
        for moment in self.moments:
            moment[slot].zero_()

    def move(self, source: int, target: int) -> None:
        """The client of slot `source` moves, with its state, to slot `target`."""
        for rows in (self.parameters, self.steps, *self.moments):
            rows[target] = rows[source]

    def step(self, gradient: Float[Tensor, "slots dim"], active: int) -> None:
        """One step of the first `active` slots; `gradient` may be overwritten."""
        local, p, g = self.local, self.parameters[:active], gradient[:active]
        if local.optimizer != "adamw":
            if local.weight_decay:
                g = g.add_(p, alpha=local.weight_decay)
            if local.optimizer == "momentum":
                g = self.moments[0][:active].mul_(local.momentum).add_(g)
            p.add_(g, alpha=-local.learning_rate)
            return
        beta1, beta2 = local.betas
        steps = self.steps[:active].add_(1)
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        first, second = self.moments[0][:active], self.moments[1][:active]
        if local.weight_decay:
            p.mul_(1 - local.learning_rate * local.weight_decay)
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = torch.sqrt(second, out=self.scratch[:active])
        # sqrt(v / c2) + eps, then lr / c1, both as one factor per slot
        root.div_(correction2.sqrt().to(p)).add_(local.eps)
        root.mul_((correction1 / -local.learning_rate).to(p))
        p.addcdiv_(first, root)
