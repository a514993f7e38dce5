"""Continuous batching of clients: slots, steps, refills.

Every client holds a *slot*: one row of the stacked adapter, gradient and moment buffers. In each step the next local
batch of every slot is pooled, sorted by length, cut into micro-batches and run; then all slots step at once. A client
that has finished leaves its slot to the next one in the queue, so clients of different size keep the slots full.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from client.engine.batching import Pool
from client.engine.forward import Forward
from client.engine.local_training import LocalTraining
from client.engine.stacked import Rows
from client.engine.stacked_model import StackedModel
from client.engine.stacked_optimizer import StackedOptimizer

TOGETHER = 2**27
"""Bytes of updates that are handed over at once: what a wave of slots on a CPU has at most."""


@dataclass(frozen=True)
class Updates:
    """Updates of some clients: `deltas[i]`, in public order, belongs to client `clients[i]`."""

    clients: np.ndarray
    deltas: Float[Tensor, "clients dim"]


class Slots:
    """One round of local training.

    Args:
        stacked: the model; its layout says which values are trained.
        plans: for every client the record indices of each of its steps.
        offsets: logit offsets `[clients, classes]`, or None.
    """

    def __init__(
        self, stacked: StackedModel, forward: Forward, pool: Pool, plans: list[list[np.ndarray]], offsets: Tensor | None
    ) -> None:
        self._stacked = stacked
        self._forward = forward
        self._pool = pool
        self._plans = plans
        self._offsets = offsets

    def run(self, base: Float[Tensor, " size"], local: LocalTraining, slots: int) -> Iterator[Updates]:
        """Train every client that has steps from `base` (full vector, engine's order)."""
        # fewest steps first in the list, so that pop() takes the longest: no straggler alone among the last
        queue = sorted((i for i, plan in enumerate(self._plans) if plan), key=lambda i: len(self._plans[i]))
        origin = self._stacked.layout.trainable_values(base)
        parameters = origin.repeat(slots, 1)
        gradients = torch.zeros_like(parameters)
        optimizer = StackedOptimizer(local, parameters)
        holders = [_Holder(client, self._plans[client]) for client in (queue.pop() for _ in range(slots))]
        while holders:
            self._stacked.bind(base, parameters, gradients)
            self._accumulate([self._pool.first[holder.client] + holder.next() for holder in holders], gradients)
            optimizer.step(gradients, len(holders))
            done = [slot for slot, holder in enumerate(holders) if holder.finished]
            most = max(1, TOGETHER // (origin.numel() * origin.element_size()))
            for low in range(0, len(done), most):
                some = done[low : low + most]
                deltas = _to_host(self._stacked.outward(parameters[some] - origin))
                yield Updates(np.array([holders[slot].client for slot in some], dtype=np.int64), deltas)
            for slot in reversed(done):
                if queue:
                    client = queue.pop()
                    holders[slot] = _Holder(client, self._plans[client])
                    parameters[slot] = origin
                    optimizer.reset(slot)
                else:  # keep the occupied slots together at the front
                    last = len(holders) - 1
                    if slot != last:
                        optimizer.move(last, slot)
                    holders[slot] = holders[last]
                    del holders[last]

    def _accumulate(self, batches: list[np.ndarray], gradients: Float[Tensor, "slots dim"]) -> None:
        """Gradient of the mean loss over each slot's batch, into its row of `gradients`."""
        rows, sizes = np.concatenate(batches), np.array([len(batch) for batch in batches])
        owner = np.repeat(np.arange(len(sizes)), sizes)
        weight = torch.from_numpy(np.repeat(1.0 / sizes, sizes)).to(gradients)
        while True:
            gradients[: len(sizes)].zero_()
            pieces = self._forward.micro_batches(self._pool.lengths[rows], owner)
            try:
                for piece in pieces:
                    placement = Rows.of_slots(torch.from_numpy(owner[piece.rows]), piece.whole)
                    losses = self._forward.losses(self._pool, rows[piece.rows], placement, self._offsets)
                    self._stacked.backward((losses * weight[torch.from_numpy(piece.rows)]).sum())
                return
            except torch.OutOfMemoryError as error:  # part of the wave may be in the gradients already: begin it again
                self._forward.halve(error, max(len(piece.rows) for piece in pieces))


def _to_host(values: Tensor) -> Tensor:
    """Into page-locked memory, which torch keeps for the next time: new pages are filled slowly."""
    if values.device.type != "cuda":
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


class _Holder:
    """A client in its slot."""

    def __init__(self, client: int, plan: list[np.ndarray]) -> None:
        self.client = client
        self._plan = plan
        self._done = 0

    def next(self) -> np.ndarray:
        self._done += 1
        return self._plan[self._done - 1]

    @property
    def finished(self) -> bool:
        return self._done == len(self._plan)
