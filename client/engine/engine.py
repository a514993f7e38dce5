"""The interface of what trains clients, which both engines share, and the choice between them."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from client.data.records import Records
from client.engine.cohort import CohortEngine, RecordGradients
from client.engine.local_training import LocalTraining
from client.engine.slots import Updates
from client.engine.stacked_model import UnsupportedAdapter
from client.models.frozen.quantised import round_blocks
from client.models.lora import LoraSpec
from client.models.tasks import Metrics, Task
from strategies.adapter.layout import AdapterLayout

log = logging.getLogger(__name__)


class Engine(Protocol):
    """The interface of `client.engine.cohort.CohortEngine` and `client.engine.sequential.SequentialEngine`."""

    @property
    def layout(self) -> AdapterLayout: ...
    def train_factors(self, train: str) -> None: ...
    def set_residual(self, residual: Float[Tensor, " values"] | None) -> None: ...
    def train(
        self, start: Tensor, clients: Sequence[Records], local: LocalTraining, seeds: Sequence[int]
    ) -> Iterator[Updates]: ...
    def train_all(
        self, start: Tensor, clients: Sequence[Records], local: LocalTraining, seeds: Sequence[int]
    ) -> Float[Tensor, "clients dim"]: ...
    def losses(self, vector: Tensor, clients: Sequence[Records]) -> Float[Tensor, " clients"]: ...
    def candidate_losses(
        self, base: Tensor, candidates: Tensor, clients: Sequence[Records]
    ) -> Float[Tensor, "clients n"]: ...
    def evaluate(self, vector: Tensor, records: Records) -> Metrics: ...
    def per_record_gradients(self, vector: Tensor, records: Records) -> Iterator[RecordGradients]: ...
    def cohort_record_gradients(
        self, base: Tensor, clients: Sequence[Records], vectors: Tensor | None = None
    ) -> Iterator[RecordGradients]: ...


def build_engine(
    model: nn.Module,
    spec: LoraSpec,
    task: Task,
    *,
    sequential: bool = False,
    token_budget: int | None = None,
    precision: str = "auto",
    device: str | torch.device = "cpu",
    quantisation: str = "none",
    checkpoint_blocks: bool = False,
    prefix_memory: int = 0,
    prefix_folder: str | Path | None = None,
) -> Engine:
    """The cohort engine on `model`; the sequential one if asked for, or if the adapters cannot be stacked.

    In the last case one warning says so and why: results are the same, but clients train one after the other.
    """
    if not sequential:
        try:
            return CohortEngine(
                model,
                spec,
                task,
                token_budget=token_budget,
                precision=precision,
                device=device,
                quantisation=quantisation,
                checkpoint_blocks=checkpoint_blocks,
                prefix_memory=prefix_memory,
                prefix_folder=prefix_folder,
            )
        except UnsupportedAdapter as reason:
            if checkpoint_blocks:
                raise ValueError(
                    f"engine.checkpoint-blocks = true: these adapters are trained with plain PEFT ({reason}), which "
                    "keeps every activation; set engine.checkpoint-blocks = false"
                ) from reason
            log.warning("clients train one after the other with plain PEFT: %s", reason)
    from client.engine.sequential import SequentialEngine  # PEFT takes a second to import, and few runs need it

    round_blocks(model, quantisation)  # the model that the other engine has, at no less memory
    full = precision if precision == "fp64" else "fp32"
    return SequentialEngine(model, spec, task, token_budget=token_budget or 2048, precision=full, device=device)
