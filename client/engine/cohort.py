"""The cohort engine: all clients of a worker train at once on one frozen base.

The parts: `client.engine.stacked` multiplies rows by the adapters of their own clients, `client.engine.slots`
schedules clients over slots, `client.engine.forward` runs padded micro-batches under a token budget,
`client.models.frozen` and `client.engine.attention` choose the arithmetic, `client.engine.prefix` leaves out
the layers below what is trained.

Which rows share a micro-batch changes nothing but rounding, because no layer mixes rows and each client's batch order
has its own seed: slots, token budget, prefix cache and the split of clients over workers are speed settings only.
Measurements: `simulations/benchmarks/engine/speed.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from client.data.records import Records
from client.engine.batching import MicroBatch, Pool, local_steps
from client.engine.forward import Forward, automatic_token_budget, confirm_prefix, hidden_size
from client.engine.local_training import LocalTraining
from client.engine.prefix import PrefixCache, prefix_of
from client.engine.references import References
from client.engine.slots import Slots, Updates
from client.engine.stacked import Rows
from client.engine.stacked_model import StackedModel
from client.models.frozen.batch_invariance import choose
from client.models.frozen.gpu_trial import Build, Texts, Trial, choose_on_gpu
from client.models.frozen.quantised import QUANTISATIONS
from client.models.lora import LoraSpec, linear_shape
from client.models.tasks import CausalLM, Metrics, SequenceClassification, Task
from privacy import checks
from strategies.adapter.layout import AdapterLayout

SLOT_MEMORY = 512 * 2**20
"""Bytes that the stacked adapters, gradients and moments may take when the number of slots is chosen automatically."""
GPU_SLOT_SHARE = 16
"""On a GPU they may take one part in so many of its free memory."""
STEP = LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=4, epochs=1)
"""Local training in the test of a device."""


@dataclass(frozen=True)
class RecordGradients:
    """Gradients of single records' losses: `rows[i]` (public order) is that of record `records[i]` of `clients[i]`."""

    clients: np.ndarray
    records: np.ndarray
    rows: Float[Tensor, "records dim"]
    losses: Float[Tensor, " records"]


class CohortEngine:
    """Trains and evaluates adapters of many clients on one frozen base model, which it takes over.

    Args:
        model: a transformers model (or one that is called like it) returning logits.
        spec: adapters and heads. `UnsupportedAdapter` (a ValueError) if they cannot be stacked.
        task: gives one loss per record.
        token_budget: tokens per micro-batch, padding included; None chooses. Memory and speed only.
        precision: `"auto"`, `"fp32"`, `"bf16"`, `"bf16-model"` or `"fp64"`, see `client.models.frozen`.
        quantisation: of the frozen weights of the blocks: `"none"`, `"int8"` or `"nf4"`, see there.
        checkpoint_blocks: compute every block again in the backward pass: less memory, the same numbers.
        slots: clients trained at once; None chooses from the token budget and `SLOT_MEMORY`.
        prefix_memory: bytes for the hidden states below the first adapted layer, see `client.engine.prefix`; of use
            where only upper layers carry adapters, or heads alone are trained. 0 computes them each time.
        prefix_folder: where the prefix cache continues when its memory is full; None for nowhere.
        self_test: let a test on the device choose the precision (:mod:`client.models.frozen.gpu_trial`); not of a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: LoraSpec,
        task: Task,
        *,
        token_budget: int | None = None,
        precision: str = "auto",
        device: str | torch.device = "cpu",
        quantisation: str = "none",
        checkpoint_blocks: bool = False,
        slots: int | None = None,
        prefix_memory: int = 0,
        prefix_folder: str | Path | None = None,
        self_test: bool = True,
    ) -> None:
        for name, value in {"token_budget": token_budget, "slots": slots}.items():
            if value is not None:
                checks.integer_at_least(1, **{name: value}, remedy="None chooses")
        checks.integer_at_least(0, prefix_memory=prefix_memory)
        self.device = torch.device(device)
        if self.device.type != "cpu" and self_test:
            key = (type(model), frozenset(_weight_shapes(model)), spec, quantisation, self.device)
            precision = choose_on_gpu(model, precision, key, trial_of(spec, task, self.device, quantisation))
        self.precision = choose(precision, self.device, _weight_shapes(model))
        self.task = task
        self.spec = spec
        self.slots = slots
        checks.one_of(QUANTISATIONS, quantisation=quantisation)
        self._stacked = StackedModel(
            model,
            spec,
            precision=self.precision,
            device=self.device,
            quantisation=quantisation,
            checkpointing=checkpoint_blocks,
        )
        self._forward = Forward(
            self._stacked, task, token_budget or automatic_token_budget(model, self.device, self.precision)
        )
        self._residual: Tensor | None = None
        self._references = References(task, self._start_margins)
        if prefix_memory:
            kept = torch.bfloat16 if self.precision == "bf16" else self._stacked.dtype
            cache = PrefixCache(hidden_size(model), kept, prefix_memory, prefix_folder)
            prefix = prefix_of(model, self._stacked.trained, cache)
            self._forward.prefix = prefix and confirm_prefix(prefix, self._forward, kept)

    @property
    def token_budget(self) -> int:
        """The number of tokens of a micro-batch. Smaller than asked for if the device ran out of memory."""
        return self._forward.token_budget

    @property
    def tokens_run(self) -> int:
        """Tokens that went through the model so far, padding included."""
        return self._forward.tokens_run

    @property
    def layout(self) -> AdapterLayout:
        """The place of each adapter value, and which values are trained now."""
        return self._stacked.layout

    def train_factors(self, train: str) -> None:
        """Train `"both"` factors, or only `"a"` or `"b"`, from now on (RoLoRA alternates)."""
        self._stacked.layout = self.layout.training(train)

    def set_residual(self, residual: Float[Tensor, " values"] | None) -> None:
        """Add a residual to the frozen weights of adapted layers from now on; None: none."""
        self._residual = residual
        self._stacked.set_residual(residual)

    @torch.no_grad()
    def _start_margins(self, pool: Pool, rows: np.ndarray) -> np.ndarray:
        """The margins of pairs under the base as it was loaded, without adapter."""
        self._stacked.set_residual(None)
        self._stacked.bind(torch.zeros(self.layout.size, dtype=self._stacked.dtype, device=self.device))
        found = np.zeros(len(rows))
        try:
            for piece, margins in self._forward.each(
                pool.lengths[rows], lambda piece: self._forward.margins(pool, rows[piece.rows]).cpu().numpy()
            ):
                found[piece] = margins
        finally:
            self._stacked.set_residual(self._residual)
        return found

    def train(
        self,
        start: Float[Tensor, " size"],
        clients: Sequence[Records],
        local: LocalTraining,
        seeds: Sequence[int],
    ) -> Iterator[Updates]:
        """Train every client from `start` (full vector); yields updates `trained - start` as clients finish.

        A client without records has update 0. `seeds[i]` alone decides the batch order of client i.
        """
        checks.same_length(clients=clients, seeds=seeds)
        pool = self._forward.pool(clients)
        plans = [local_steps(local, int(n), seed) for n, seed in zip(pool.counts, seeds, strict=True)]
        idle = np.array([i for i, plan in enumerate(plans) if not plan], dtype=np.int64)
        if len(idle):
            yield Updates(idle, torch.zeros(len(idle), self.layout.dim, dtype=self._stacked.dtype))
        if len(idle) < len(plans):
            self._references.add_to(pool, _trained_on(pool, plans))
            slots = min(len(plans) - len(idle), self._slots(pool, local))
            filled = Slots(self._stacked, self._forward, pool, plans, self._logit_offsets(clients))
            yield from filled.run(self._stacked.inward(start, full=True), local, slots)

    def train_all(
        self, start: Tensor, clients: Sequence[Records], local: LocalTraining, seeds: Sequence[int]
    ) -> Float[Tensor, "clients dim"]:
        """`train`, gathered into one tensor in the order of `clients`."""
        result = torch.zeros(len(clients), self.layout.dim, dtype=self._stacked.dtype)
        for updates in self.train(start, clients, local, seeds):
            result[torch.from_numpy(updates.clients)] = updates.deltas
        return result

    def _logit_offsets(self, clients: Sequence[Records]) -> Tensor | None:
        """The task's logit offsets of every client, `[clients, classes]`; None if it has none."""
        rows = [
            self.task.logit_offsets(None if c.labels is None else torch.tensor(np.array(c.labels))) for c in clients
        ]
        given = [row for row in rows if row is not None]
        return torch.stack(given).to(self.device, self._stacked.dtype) if given else None

    def losses(self, vector: Float[Tensor, " size"], clients: Sequence[Records]) -> Float[Tensor, " clients"]:
        """Mean training loss of each client's records under one full vector (0 for a client without records)."""
        candidates = self.layout.trainable_values(vector).expand(len(clients), 1, -1)
        return self.candidate_losses(vector, candidates, clients)[:, 0]

    @torch.no_grad()
    def candidate_losses(
        self,
        base: Float[Tensor, " size"],
        candidates: Float[Tensor, "clients n dim"],
        clients: Sequence[Records],
    ) -> Float[Tensor, "clients n"]:
        """Mean training loss of each client's records under each of its own candidates (float64).

        `candidates` are trainable vectors (not updates); the other factors are taken from the full vector `base`.
        """
        pool = self._forward.pool(clients)
        count, each = candidates.shape[:2]
        if count != len(clients):
            raise ValueError(f"candidates must have one row per client ({len(clients)}), got {count}")
        self._references.add_to(pool)
        inner, offsets = self._stacked.inward(base, full=True), self._logit_offsets(clients)
        sums = torch.zeros(count * each, dtype=torch.float64)
        group = max(1, SLOT_MEMORY // (4 * each * max(1, self.layout.dim)))
        for low in range(0, count, group):
            high = min(low + group, count)
            self._stacked.bind(inner, self._stacked.inward(candidates[low:high].flatten(0, 1), full=False))
            rows = np.arange(pool.first[low], pool.first[high])
            rows, copy = np.tile(rows, each), np.repeat(np.arange(each), len(rows))
            slot = (pool.client[rows] - low) * each + copy

            def losses(piece: MicroBatch, rows: np.ndarray = rows, slot: np.ndarray = slot) -> Tensor:
                placement = Rows.of_slots(torch.from_numpy(slot[piece.rows]), piece.whole)
                return self._forward.losses(pool, rows[piece.rows], placement, offsets).double().cpu()

            for piece, found in self._forward.each(pool.lengths[rows], losses, slot):
                sums.index_add_(0, torch.from_numpy(slot[piece]) + low * each, found)
        return sums.view(count, each) / torch.from_numpy(np.maximum(pool.counts, 1))[:, None]

    @torch.no_grad()
    def evaluate(self, vector: Float[Tensor, " size"], records: Records) -> Metrics:
        """The task's metrics of one full vector over all records."""
        pool = self._forward.pool([records])
        self._references.add_to(pool)
        self._stacked.bind(self._stacked.inward(vector, full=True))
        totals = self.task.no_totals()
        for _, part in self._forward.each(pool.lengths, lambda piece: self._forward.totals(pool, piece.rows)):
            totals += part
        return self.task.metrics(totals)

    def per_record_gradients(self, vector: Float[Tensor, " size"], records: Records) -> Iterator[RecordGradients]:
        """Gradient of every record's own loss at one full vector, in chunks of at most one micro-batch."""
        return self.cohort_record_gradients(vector, [records])

    def cohort_record_gradients(
        self,
        base: Float[Tensor, " size"],
        clients: Sequence[Records],
        vectors: Float[Tensor, "clients dim"] | None = None,
    ) -> Iterator[RecordGradients]:
        """Gradient of every record of several clients, each at its own client's adapter.

        `vectors` are trainable vectors, one per client; the other factors (and all, where it is None) come from the
        full vector `base`. Memory is bounded by the token budget, whatever the number of records. The loss is that of
        `Task.per_record_loss` without logit offsets, which would couple the records of a client.
        """
        pool = self._forward.pool(clients)
        self._references.add_to(pool)
        inner = self._stacked.inward(base, full=True)
        stacked = None if vectors is None else self._stacked.inward(vectors, full=False)
        largest = max((len(piece.rows) for piece in self._forward.micro_batches(pool.lengths)), default=0)
        buffers = self._stacked.record_buffers(largest)

        def gradients(piece: MicroBatch) -> tuple[Tensor, Tensor]:
            rows = piece.rows
            self._stacked.bind(inner, stacked, buffers)
            owners = None if vectors is None else torch.from_numpy(pool.client[rows])
            losses = self._forward.losses(pool, rows, Rows.per_record(len(rows), owners), None)
            self._stacked.backward(losses.sum())
            return self._stacked.record_rows(len(rows)), losses.detach()

        for rows, (found, losses) in self._forward.each(pool.lengths, gradients):
            owners = pool.client[rows]
            yield RecordGradients(owners, rows - pool.first[owners], found, losses)

    def _slots(self, pool: Pool, local: LocalTraining) -> int:
        """Enough clients that a pass over the slots fills several micro-batches of even length, within `SLOT_MEMORY`.

        MiniLM, ragged SST-2, 48 clients: 48 slots are 1.06 times as fast as 24, and those 1.13 times as fast as 8.
        """
        if self.slots is not None:
            return self.slots
        tokens_per_step = max(1.0, float(pool.sizes.mean()) * min(local.batch_size, float(pool.counts.mean())))
        wanted = int(8 * self.token_budget / tokens_per_step) + 1
        memory = SLOT_MEMORY
        if self.device.type == "cuda":
            memory = max(memory, torch.cuda.mem_get_info(self.device)[0] // GPU_SLOT_SHARE)
        affordable = memory // (16 * max(1, self.layout.dim))
        return max(1, min(wanted, affordable))


def trial_of(spec: LoraSpec, task: Task, device: torch.device, quantisation: str) -> Build:
    """The maker of such a run's engine from a small model and a precision, for the test of a device."""
    plain = SequenceClassification(task.num_labels) if isinstance(task, SequenceClassification) else CausalLM()
    adapters = replace(spec, layers=None)

    def build(model: nn.Module, precision: str) -> Trial:
        engine = CohortEngine(
            model, adapters, plain, precision=precision, device=device, quantisation=quantisation, self_test=False
        )
        config: Any = model.config
        vector = 0.02 * torch.randn(engine.layout.size, generator=torch.Generator().manual_seed(0))

        def update(texts: list[Texts]) -> Tensor:
            classes = plain.num_labels if isinstance(plain, SequenceClassification) else 0
            clients = [
                Records.from_lists(own, [sum(text) % classes for text in own] if classes else None) for own in texts
            ]
            trained = engine.train_all(vector, clients, STEP, [0] * len(clients)).cpu()
            first = np.cumsum([0, *map(len, clients)])
            rows = torch.zeros(first[-1], engine.layout.dim)
            for chunk in engine.cohort_record_gradients(vector, clients):
                rows[torch.from_numpy(first[chunk.clients] + chunk.records)] = chunk.rows.float().cpu()
            return torch.cat([trained.float(), rows])

        return Trial(update, int(config.get_text_config().vocab_size), engine._forward.longest)

    return build


def _trained_on(pool: Pool, plans: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """The rows of a pool that some step of a client takes."""
    return np.unique(np.concatenate([pool.first[i] + step for i, plan in enumerate(plans) for step in plan]))


def _weight_shapes(model: nn.Module) -> set[tuple[int, int]]:
    """`(out, in)` of the model's Linear layers."""
    found = (linear_shape(module) for module in model.modules())
    return {(shape[1], shape[0]) for shape in found if shape is not None}
