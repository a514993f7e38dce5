"""The cohort engine: all clients of a worker train at once on one frozen base.

Every client holds a *slot*: one row of the stacked adapter, gradient and optimizer buffers. In each wave the next local
batch of every slot is pooled, sorted by length, cut into micro-batches under a token budget and run through the base
once; then all slots step. A finished client leaves its slot to the next one. Which rows share a micro-batch changes
nothing but rounding, because no layer mixes rows and each client's batch order has its own seed: the number of slots,
the token budget and the split of clients over workers are speed settings only.

Design and measurements: docs of the benchmark `simulations/benchmarks/engine_speed.py`.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from client.batch import Pool, micro_batches
from client.lora import AdapterLayout, LoraSpec
from client.precision import choose
from client.records import Records
from client.stacked import Rows
from client.stacked_model import StackedModel
from client.tasks import Metrics, Task
from client.training import LocalTraining, StackedOptimizer

log = logging.getLogger(__name__)

CPU_TOKEN_BUDGET = 2048
SLOT_MEMORY = 512 * 2**20
"""Bytes that the stacked adapters, gradients and moments may take when the number of slots is chosen automatically."""


@dataclass(frozen=True)
class Updates:
    """Updates of some clients: `deltas[i]` belongs to client `clients[i]`; public order, float32 (float64 under fp64)."""

    clients: np.ndarray
    deltas: Float[Tensor, "clients dim"]


@dataclass(frozen=True)
class RecordGradients:
    """Gradients of single records' losses: `rows[i]` (public order) belongs to record `records[i]`."""

    records: np.ndarray
    rows: Float[Tensor, "records dim"]
    losses: Float[Tensor, "records"]  # noqa: F821


class CohortEngine:
    """Trains and evaluates adapters of many clients on one frozen base model, which it takes over.

    Args:
        model: a transformers model (or one that is called like it) returning logits.
        spec: adapters and heads. `UnsupportedAdapter` (a ValueError) if they cannot be stacked.
        task: gives one loss per record.
        token_budget: tokens per micro-batch, padding included. Memory and speed only.
        precision: `"auto"`, `"fp32"`, `"bf16"` (frozen products only) or `"fp64"`.
        device: where the model and the buffers live.
        slots: clients trained at once; None chooses from the token budget and `SLOT_MEMORY`.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: LoraSpec,
        task: Task,
        *,
        token_budget: int = CPU_TOKEN_BUDGET,
        precision: str = "auto",
        device: str | torch.device = "cpu",
        slots: int | None = None,
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget must be >= 1, got {token_budget}")
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be >= 1 or None, got {slots}")
        self.device = torch.device(device)
        self.precision = choose(precision, self.device)
        self.task = task
        self.spec = spec
        self.token_budget = token_budget
        self.slots = slots
        self._stacked = StackedModel(model, spec, precision=self.precision, device=self.device)

    @property
    def layout(self) -> AdapterLayout:
        """Where each adapter value lies, and which values are trained now."""
        return self._stacked.layout

    def switch(self, train: str) -> None:
        """Train `"both"` factors, or only `"a"` or `"b"`, from now on (RoLoRA alternates)."""
        self._stacked.layout = self.layout.training(train)

    def train(
        self,
        start: Float[Tensor, "size"],  # noqa: F821
        clients: Sequence[Records],
        local: LocalTraining,
        seeds: Sequence[int],
    ) -> Iterator[Updates]:
        """Train every client from `start` (full vector); yields updates `trained - start` as clients finish.

        A client without records has update 0. `seeds[i]` alone decides the batch order of client i.
        """
        if len(seeds) != len(clients):
            raise ValueError(f"seeds must have one entry per client ({len(clients)}), got {len(seeds)}")
        pool = Pool(clients)
        plans = [local.batches(int(n), seed) for n, seed in zip(pool.counts, seeds, strict=True)]
        idle = np.array([i for i, plan in enumerate(plans) if not plan], dtype=np.int64)
        if len(idle):
            yield Updates(idle, torch.zeros(len(idle), self.layout.dim, dtype=self._stacked.dtype))
        # most steps first, so that the last waves are not run for one straggler
        queue = sorted((i for i, plan in enumerate(plans) if plan), key=lambda i: -len(plans[i]))
        queue.reverse()
        if not queue:
            return
        slots = min(len(queue), self._slots(pool, local))
        base = self._stacked.inward(start, full=True)
        origin = self.layout.trainable(base)
        parameters = torch.empty(slots, self.layout.dim, dtype=base.dtype, device=self.device)
        gradients = torch.zeros_like(parameters)
        optimizer = StackedOptimizer(local, parameters)
        offsets = self._logit_offsets(clients)
        holders: list[tuple[int, Iterator[np.ndarray]]] = []
        steps_left: list[int] = []

        def enter(slot: int) -> None:
            client = queue.pop()
            parameters[slot] = origin
            optimizer.reset(slot)
            holders[slot : slot + 1] = [(client, iter(plans[client]))]
            steps_left[slot : slot + 1] = [len(plans[client])]

        for slot in range(slots):
            enter(slot)
        while holders:
            batches = [pool.first[client] + next(plan) for client, plan in holders]
            sizes = np.array([len(batch) for batch in batches])
            self._stacked.bind(base, parameters, gradients)
            self._accumulate(pool, np.concatenate(batches), sizes, gradients, offsets)
            optimizer.step(gradients, len(holders))
            steps_left = [left - 1 for left in steps_left]
            done = [slot for slot, left in enumerate(steps_left) if left == 0]
            if done:
                deltas = self._stacked.outward(parameters[done] - origin).cpu()
                yield Updates(np.array([holders[slot][0] for slot in done], dtype=np.int64), deltas)
            for slot in reversed(done):
                if queue:
                    enter(slot)
                else:
                    last = len(holders) - 1
                    if slot != last:
                        optimizer.move(last, slot)
                        holders[slot], steps_left[slot] = holders[last], steps_left[last]
                    del holders[last], steps_left[last]

    def train_all(
        self, start: Tensor, clients: Sequence[Records], local: LocalTraining, seeds: Sequence[int]
    ) -> Float[Tensor, "clients dim"]:
        """`train`, gathered into one tensor in the order of `clients`."""
        result = torch.zeros(len(clients), self.layout.dim, dtype=self._stacked.dtype)
        for updates in self.train(start, clients, local, seeds):
            result[torch.from_numpy(updates.clients)] = updates.deltas
        return result

    def _accumulate(
        self, pool: Pool, rows: np.ndarray, sizes: np.ndarray, gradients: Tensor, offsets: Tensor | None
    ) -> None:
        """Gradients of the mean loss of each slot's batch; `rows` lists the slots' batches one after the other."""
        owner = np.repeat(np.arange(len(sizes)), sizes)
        weight = torch.from_numpy(np.repeat(1.0 / sizes, sizes)).to(self.device, gradients.dtype)
        gradients[: len(sizes)].zero_()
        for piece in micro_batches(pool.lengths[rows], owner, self.token_budget):
            losses = self._losses(pool, rows[piece], Rows.of_slots(torch.from_numpy(owner[piece])), offsets)
            (losses * weight[torch.from_numpy(piece)]).sum().backward()

    def _losses(self, pool: Pool, rows: np.ndarray, placement: Rows, offsets: Tensor | None) -> Tensor:
        batch = pool.batch(rows, self._stacked.pad, self.device)
        if offsets is not None:
            batch = replace(batch, logit_offsets=offsets[torch.from_numpy(pool.client[rows])])
        mask = batch.attention_mask if pool.padded(rows) else None
        return self.task.per_record_loss(self._stacked(batch.input_ids, mask, placement), batch)

    def _logit_offsets(self, clients: Sequence[Records]) -> Tensor | None:
        """The task's logit offsets of every client, `[clients, classes]`; None if it has none."""
        rows = [
            self.task.logit_offsets(None if c.labels is None else torch.from_numpy(np.asarray(c.labels)))
            for c in clients
        ]
        given = [row for row in rows if row is not None]
        return torch.stack(given).to(self.device, self._stacked.dtype) if given else None

    def losses(self, vector: Float[Tensor, "size"], clients: Sequence[Records]) -> Float[Tensor, "clients"]:  # noqa: F821
        """Mean training loss of each client's records under one full vector (0 for a client without records)."""
        candidates = self.layout.trainable(vector).expand(len(clients), 1, -1)
        return self.candidate_losses(vector, candidates, clients)[:, 0]

    @torch.no_grad()
    def candidate_losses(
        self,
        base: Float[Tensor, "size"],  # noqa: F821
        candidates: Float[Tensor, "clients n dim"],
        clients: Sequence[Records],
    ) -> Float[Tensor, "clients n"]:
        """Mean training loss of each client's records under each of its own candidates (float64).

        `candidates` are trainable vectors (not updates); the other factors are taken from the full vector `base`.
        """
        pool = Pool(clients)
        count, each = candidates.shape[:2]
        if count != len(clients):
            raise ValueError(f"candidates must have one row per client ({len(clients)}), got {count}")
        inner, offsets = self._stacked.inward(base, full=True), self._logit_offsets(clients)
        sums = torch.zeros(count * each, dtype=torch.float64)
        group = max(1, SLOT_MEMORY // (4 * each * max(1, self.layout.dim)))
        for low in range(0, count, group):
            high = min(low + group, count)
            self._stacked.bind(inner, self._stacked.inward(candidates[low:high].flatten(0, 1), full=False))
            rows = np.arange(pool.first[low], pool.first[high])
            rows, copy = np.tile(rows, each), np.repeat(np.arange(each), len(rows))
            slot = (pool.client[rows] - low) * each + copy
            for piece in micro_batches(pool.lengths[rows], slot, self.token_budget):
                owner = torch.from_numpy(slot[piece])
                losses = self._losses(pool, rows[piece], Rows.of_slots(owner), offsets)
                sums.index_add_(0, owner + low * each, losses.double().cpu())
        return sums.view(count, each) / torch.from_numpy(np.maximum(pool.counts, 1))[:, None]

    @torch.no_grad()
    def evaluate(self, vector: Float[Tensor, "size"], records: Records) -> Metrics:  # noqa: F821
        """The task's metrics of one full vector over all records."""
        pool = Pool([records])
        self._stacked.bind(self._stacked.inward(vector, full=True))
        totals = torch.zeros(3, dtype=torch.float64)
        for rows in micro_batches(pool.lengths, pool.client, self.token_budget):
            batch = pool.batch(rows, self._stacked.pad, self.device)
            mask = batch.attention_mask if pool.padded(rows) else None
            logits = self._stacked(batch.input_ids, mask, Rows.shared(len(rows)))
            totals += self.task.totals(logits, batch).cpu()
        return self.task.metrics(totals)

    def per_record_gradients(self, vector: Float[Tensor, "size"], records: Records) -> Iterator[RecordGradients]:  # noqa: F821
        """Gradient of every record's own loss at one full vector, in chunks of at most one micro-batch."""
        pool = Pool([records])
        inner = self._stacked.inward(vector, full=True)
        buffer = torch.empty(0, self.layout.dim)
        for rows in micro_batches(pool.lengths, pool.client, self.token_budget):
            if len(buffer) < len(rows):
                buffer = torch.empty(len(rows), self.layout.dim, dtype=inner.dtype, device=self.device)
            buffer[: len(rows)].zero_()
            self._stacked.bind(inner, None, buffer)
            losses = self._losses(pool, rows, Rows.per_record(len(rows)), None)
            losses.sum().backward()
            yield RecordGradients(rows, self._stacked.outward(buffer[: len(rows)]), losses.detach())

    def _slots(self, pool: Pool, local: LocalTraining) -> int:
        """Enough clients that a wave fills several micro-batches of even length, within `SLOT_MEMORY`."""
        if self.slots is not None:
            return self.slots
        tokens_per_step = max(1.0, float(pool.lengths.mean()) * min(local.batch_size, float(pool.counts.mean())))
        wanted = int(4 * self.token_budget / tokens_per_step) + 1
        affordable = SLOT_MEMORY // (16 * max(1, self.layout.dim))
        return max(1, min(wanted, affordable))
