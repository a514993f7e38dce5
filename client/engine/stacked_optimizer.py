"""The optimizers of local training, run for many clients at once on stacked vectors."""

import torch
from jaxtyping import Float
from torch import Tensor

from client.engine.local_training import ADAM_BETAS, ADAM_EPS, LocalTraining


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
        beta1, beta2 = ADAM_BETAS
        steps = self.steps[:active].add_(1)
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        first, second = self.moments[0][:active], self.moments[1][:active]
        if local.weight_decay:
            p.mul_(1 - local.learning_rate * local.weight_decay)
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = torch.sqrt(second, out=self.scratch[:active])
        # sqrt(v / c2) + eps, then lr / c1, both as one factor per slot
        root.div_(correction2.sqrt().to(p)).add_(ADAM_EPS)
        root.mul_((correction1 / -local.learning_rate).to(p))
        p.addcdiv_(first, root)
