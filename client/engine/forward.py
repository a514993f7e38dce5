"""Forward passes of pooled rows through the stacked model: padding, token budget, prefix cache, offsets, metrics.

The prefix cache is tried before it is relied on. What `client.engine.prefix` supposes of a model (its layers are called
one after the other, each once; nothing that is trained comes before them; no layer looks at padding) holds for most
architectures, and no name tells for which. So two short texts of different lengths are run through the model once with
one adapter, which fills a cache, and once with another, from that cache; the outcome must be that of the whole model
with the other adapter.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from client.data.records import Records
from client.engine.batching import MicroBatch, Pool, micro_batches
from client.engine.prefix import Prefix, PrefixCache
from client.engine.stacked import Rows
from client.engine.stacked_model import StackedModel
from client.models.base import positions
from client.models.devices import LEAST_TOKENS, activation_bytes
from client.models.lm_head import Predictions
from client.models.tasks import Batch, Preference, Task
from privacy.randomness.rng import simulation_generator

log = logging.getLogger(__name__)
Result = TypeVar("Result")

CPU_TOKENS_TIMES_WIDTH = 524_288


class Forward:
    """Runs rows of a pool through the model. `token_budget` halves itself when a device runs out of memory."""

    def __init__(self, stacked: StackedModel, task: Task, token_budget: int, prefix: Prefix | None = None) -> None:
        self.stacked = stacked
        self.task = task
        self.token_budget = token_budget
        self.tokens_run = 0  # with padding, since the engine was made
        self.longest = positions(stacked.model)
        self.prefix = prefix

    def micro_batches(self, lengths: np.ndarray, owner: np.ndarray | None = None) -> list[MicroBatch]:
        """Cut records into micro-batches, see `client.engine.batching.micro_batches`."""
        return micro_batches(lengths, self.token_budget // self.task.texts_each, owner, self.longest)

    def pool(self, clients: Sequence[Records]) -> Pool:
        """Pool the clients' records, for this model."""
        return Pool(clients, self.longest)

    def each(
        self, lengths: np.ndarray, work: Callable[[MicroBatch], Result], owner: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, Result]]:
        """Apply `work` to every micro-batch, and give the results with the positions of its rows.

        If the device runs out of memory, the budget is halved and all rows not yet done are cut anew, so `work` must
        leave nothing behind when it fails.
        """
        waiting = self.micro_batches(lengths, owner)[::-1]
        while waiting:
            piece = waiting.pop()
            try:
                result = work(piece)
            except torch.OutOfMemoryError as error:
                self.halve(error, len(piece.rows))
                left = np.concatenate([piece.rows, *(other.rows for other in waiting)])
                cut = self.micro_batches(lengths[left], None if owner is None else owner[left])
                waiting = [replace(new, rows=left[new.rows]) for new in cut][::-1]
                continue
            yield piece.rows, result

    def losses(self, pool: Pool, rows: np.ndarray, placement: Rows, offsets: Tensor | None) -> Float[Tensor, " rows"]:
        """The training loss of every row. `offsets` `[clients, classes]` are added to the logits."""
        logits, batch = self.outputs(pool, rows, placement)
        if offsets is not None:
            batch = replace(batch, logit_offsets=offsets[torch.from_numpy(pool.client[rows])])
        return self.task.per_record_loss(logits, batch)

    def margins(self, pool: Pool, rows: np.ndarray) -> Float[Tensor, " rows"]:
        """The margin of every pair under one adapter, see `client.models.tasks.Preference`."""
        assert isinstance(self.task, Preference), "others have none"
        return self.task.margins(*self.outputs(pool, rows, Rows.share_adapter(len(rows))))

    def totals(self, pool: Pool, rows: np.ndarray) -> Float[Tensor, " sums"]:
        """The task's metric totals of rows that share one adapter."""
        logits, batch = self.outputs(pool, rows, Rows.share_adapter(len(rows)))
        return self.task.totals(logits, batch).cpu()

    def halve(self, error: torch.OutOfMemoryError, rows: int) -> None:
        """Answer to a full device: half the budget. Re-raises when a single row does not fit."""
        if rows <= 1 or self.token_budget <= 1:
            raise error
        torch.cuda.empty_cache()
        self.token_budget //= 2
        log.warning("device memory is full: token budget halved to %d", self.token_budget)

    def outputs(self, pool: Pool, rows: np.ndarray, placement: Rows) -> tuple[Tensor | Predictions, Batch]:
        """Logits of rows, or what stands for them, and the batch they were in."""
        batch = pool.batch(rows, self.stacked.pad, self.stacked.device)
        mask = batch.attention_mask if pool.hides_padding(rows) else None
        self.tokens_run += batch.input_ids.numel()
        placement = replace(placement, count=len(batch.input_ids))  # the texts of a pair are one owner's
        if self.prefix is None:
            return self.stacked(batch.input_ids, mask, placement), batch
        self.prefix.hidden = self.prefix.states(pool, rows, batch.input_ids, mask)
        try:
            return self.stacked(batch.input_ids, mask, placement), batch
        finally:
            self.prefix.hidden = None


def hidden_size(model: nn.Module) -> int:
    """Width of the residual stream of a transformers model."""
    config: Any = model.config
    return int(config.get_text_config().hidden_size)


def automatic_token_budget(model: nn.Module, device: torch.device, precision: str) -> int:
    """Tokens per micro-batch that keep a CPU's caches, or half of a GPU's free memory, busy.

    CPU: the buffers of one layer should stay in the cache; measured best at hidden size 384: 512 to 2,048, at 64: 4,096
    and more. GPU: the more the better, up to where `client.models.devices.activation_bytes` fill that half; on an H200
    a quarter of them runs at 0.93 of the speed (1.1 billion parameters) or at 0.51 (135 million).
    """
    width = hidden_size(model)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        each = activation_bytes(model, 1, value=2 if precision == "bf16-model" else 4)
        return max(LEAST_TOKENS, min(65536, free // (2 * each)))
    return max(256, min(8192, CPU_TOKENS_TIMES_WIDTH // width))


LENGTHS = (7, 4)
"""Tokens of the two texts; both are padded, as short texts are in training."""


def confirm_prefix(prefix: Prefix, forward: Forward, kept: torch.dtype) -> Prefix | None:
    """`prefix` if it changes nothing on `forward`, whose own prefix is None; else None, and the model as it was."""
    stacked = forward.stacked
    scratch = PrefixCache(hidden_size(stacked.model), kept, 2**24)
    trial = Forward(stacked, forward.task, forward.token_budget, prefix)
    reason = "the result is another one"
    try:
        with torch.no_grad(), prefix.keeping_in(scratch):
            pool = Pool([_texts(stacked.model)], forward.longest)
            first, second = (_adapter(stacked, seed) for seed in (1, 2))
            stacked.bind(first)
            _outputs(trial, pool)
            stacked.bind(second)
            expected, found = _outputs(forward, pool), _outputs(trial, pool)
        tolerance = 0.05 if kept == torch.bfloat16 else 1e-3
        if torch.allclose(found, expected, rtol=0.0, atol=tolerance * float(expected.abs().max())):
            return prefix
    except Exception as error:  # whatever a foreign model does when a layer of it is left out
        reason = f"{type(error).__name__}: {error}"
    prefix.remove()
    log.info("hidden states of %s are not kept: %s", type(stacked.model).__name__, reason)
    return None


def _texts(model: torch.nn.Module) -> Records:
    """Two records of tokens drawn by a fixed seed, none of them padding."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    generator = simulation_generator(0, "prefix-check-texts")
    tokens = [generator.integers(0, config.vocab_size, length) for length in LENGTHS]
    pad = getattr(config, "pad_token_id", None) or 0
    return Records.from_lists(
        [np.where(row == pad, (pad + 1) % config.vocab_size, row).tolist() for row in tokens], None
    )


def _adapter(stacked: StackedModel, seed: int) -> Tensor:
    """A full vector in which every factor and head, not the factor B alone, moves what the model says."""
    generator = simulation_generator(seed, "prefix-check-adapter")
    vector = torch.from_numpy(generator.uniform(-2.0, 2.0, stacked.layout.size).astype(np.float32))
    for entry in stacked.layout.entries:
        entry.of(vector).div_(math.sqrt(max(entry.shape)))
    return stacked.inward(vector, full=True)


def _outputs(forward: Forward, pool: Pool) -> Tensor:
    """Logits, or the last hidden states, of every text; where there is one per token, of its own tokens only."""
    outputs, batch = forward.outputs(pool, np.arange(len(LENGTHS)), Rows.share_adapter(len(LENGTHS)))
    values = outputs if isinstance(outputs, Tensor) else outputs.hidden
    return (values[batch.attention_mask.bool()] if values.dim() == 3 else values).double()
