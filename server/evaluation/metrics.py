"""Metrics of the global adapter on public data, shared out over the workers.

Only the public validation set and the test set are evaluated: both are the server's, so what comes back is no release.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from jaxtyping import Float
from torch import Tensor

from client.data.prepared import PreparedData
from client.models.tasks import Metrics
from client.worker import Job, make_engine
from server.network.grid import exchange_messages
from strategies.messages.client_update import EvaluateRequest, ShardMetrics
from strategies.messages.dispatch import RoundFailed, error_text
from strategies.messages.records import BadMessage


class Evaluate(Protocol):
    """A function that measures a full adapter vector on a public split.

    The base model is moved by a residual first, if one is given.
    """

    def __call__(self, adapter: Float[Tensor, " size"], split: str, residual: Tensor | None = None) -> Metrics: ...


class Diverged(ValueError):
    """A model whose loss is not finite: whatever is spent on training it further is lost."""


def refuse_diverged(metrics: Metrics, where: str) -> None:
    """Raise :class:`Diverged` if a released adapter's loss on public validation records is not finite."""
    if not math.isfinite(metrics.loss):
        raise Diverged(
            f"the model's validation loss is {metrics.loss} {where}; nothing more is charged. Lower the learning rates "
            "(local.learning-rate, strategy.optimizer-options), or raise engine.precision"
        )


def on_server(job: Job, data: PreparedData, splits: dict[str, tuple[int, int]]) -> Evaluate:
    """Make an evaluation that runs in this process, on records that the server has itself.

    Where nodes hold the clients' records, the public ones are on the server alone.

    Args:
        splits: first record and end of what is evaluated of every public split.
    """
    engine = make_engine(job)
    parts = {part: getattr(data, part).select(np.arange(*rows)) for part, rows in splits.items()}

    def evaluate(adapter: Float[Tensor, " size"], split: str, residual: Tensor | None = None) -> Metrics:
        engine.set_residual(residual)
        return engine.evaluate(adapter, parts[split])

    return evaluate


def on_workers(
    grid: Grid,
    nodes: int,
    job: str,
    splits: dict[str, tuple[int, int]],
    timeout: float,
    tokens: Mapping[str, int | None] | None = None,
) -> Evaluate:
    """Make an evaluation that gives every worker a contiguous part of the split.

    Args:
        nodes: most workers to use; all that are connected if they are fewer.
        job: the clients' job as JSON text.
        splits: first record and end of what is evaluated of every public split.
        timeout: seconds for all replies.
        tokens: predicted tokens in every split, which the metrics of a language model average over; None: records.

    Returns:
        the evaluation, which raises :class:`RoundFailed` where not every worker answers for its part.
    """

    def evaluate(adapter: Float[Tensor, " size"], split: str, residual: Tensor | None = None) -> Metrics:
        moved = None if residual is None else residual.numpy()
        workers = sorted(grid.get_node_ids())[:nodes]
        if not workers:
            raise RoundFailed(f"evaluation on {split}: no worker is connected")
        cuts = np.linspace(*splits[split], len(workers) + 1).astype(int)
        messages = [
            Message(
                content=EvaluateRequest(adapter.numpy(), split, int(start), int(stop), job, moved).to_records(),
                message_type=MessageType.EVALUATE,
                dst_node_id=node,
            )
            for node, start, stop in zip(workers, cuts[:-1], cuts[1:], strict=True)
            if stop > start
        ]
        answered, problems = dict[int, ShardMetrics](), list[str]()
        for reply in exchange_messages(grid, messages, timeout):
            try:
                if reply.has_error():
                    problems.append(error_text(reply))
                else:
                    answered[reply.metadata.src_node_id] = ShardMetrics.from_records(reply.content)
            except BadMessage as error:
                problems.append(str(error))
        if len(answered) < len(messages):
            raise RoundFailed(
                f"evaluation on {split}: {len(answered)} of {len(messages)} workers answered"
                + (f"; the first error: {problems[0]}" if problems else "")
            )
        # In one order, so that the mean is the same to the last bit whoever answers first.
        parts = [answered[node] for node in sorted(answered)]
        weights = torch.tensor([part.count for part in parts], dtype=torch.float64)
        count = int(weights.sum())
        predicted = tokens.get(split) if tokens else None
        expected, what = (cuts[-1] - cuts[0], "records") if predicted is None else (predicted, "tokens")
        if count != expected:
            raise RoundFailed(f"evaluation on {split}: {count} of {expected} {what} were evaluated")
        loss, accuracy = (
            float((torch.tensor(values, dtype=torch.float64) * weights).sum() / count)
            for values in ([part.loss for part in parts], [part.accuracy for part in parts])
        )
        perplexity = None if predicted is None else math.exp(loss)
        return Metrics(loss, accuracy, count, perplexity, _added(split, parts))

    return evaluate


def _added(split: str, parts: Sequence[ShardMetrics]) -> tuple[tuple[int, ...], ...] | None:
    """The confusion matrix summed over all shards; None unless every one has counted."""
    counted = [part.confusion for part in parts if part.confusion is not None]
    if not counted or len(counted) < len(parts):
        return None
    if len({matrix.shape for matrix in counted}) > 1:
        raise RoundFailed(f"evaluation on {split}: the workers count confusions of different numbers of classes")
    return tuple(map(tuple, np.sum(counted, axis=0).tolist()))
