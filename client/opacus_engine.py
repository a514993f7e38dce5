"""Per-record gradients of any architecture by Opacus' hooks, on plain PEFT.

``opacus.GradSampleModule`` (Yousefpour et al. 2021, arXiv 2109.12298v4) keeps the input of every trained layer and
makes the gradient of each record from it and the gradient of the layer's output, in one backward pass over a whole
micro-batch. It knows every adapter that is made of linear layers, stacked by our engine or not, and is the slower and
larger of the two ways: `docs/record-level.md` has the numbers. What it computes is the same, tested against it.
"""

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from opacus import GradSampleModule
from torch import Tensor, nn

from client.batch import Pool, micro_batches
from client.cohort import RecordGradients
from client.layout import AdapterLayout
from client.lora import LoraSpec
from client.records import Records
from client.sequential import SequentialEngine
from client.stacked_model import UnsupportedAdapter
from client.tasks import Metrics, Task


class OpacusEngine:
    """Gradients of single records, and evaluation; takes `model` over.

    Raises:
        UnsupportedAdapter: a trained part of the model is no layer that Opacus has a rule for (DoRA, embeddings).
    """

    def __init__(
        self,
        model: nn.Module,
        spec: LoraSpec,
        task: Task,
        *,
        token_budget: int = 2048,
        precision: str = "fp32",
        device: str | torch.device = "cpu",
    ) -> None:
        self.token_budget = token_budget
        self._plain = SequentialEngine(model, spec, task, token_budget=token_budget, precision=precision, device=device)
        self._hooks = self._hooked()

    @property
    def layout(self) -> AdapterLayout:
        """Where each adapter value lies."""
        return self._plain.layout

    def switch(self, train: str) -> None:
        """Train `"both"` factors, or only `"a"` or `"b"`, from now on."""
        if self.layout != self.layout.training(train):
            self._hooks.remove_hooks()
            self._plain.switch(train)
            self._hooks = self._hooked()

    def evaluate(self, vector: Tensor, records: Records) -> Metrics:
        """As `CohortEngine.evaluate`."""
        return self._plain.evaluate(vector, records)

    def per_record_gradients(self, vector: Tensor, records: Records) -> Iterator[RecordGradients]:
        """As `CohortEngine.per_record_gradients`."""
        self._plain.load(vector)
        pool = Pool([records], self._plain.longest)
        for rows in (piece.rows for piece in micro_batches(pool.lengths, self.token_budget, longest=pool.longest)):
            losses = self._plain.record_losses(pool, rows, None)
            with warnings.catch_warnings():  # the first adapted layer's input needs no gradient, and torch says so
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                losses.sum().backward()  # type: ignore[no-untyped-call]
            found = torch.cat([_of_records(p, len(rows)) for p in self._plain.trained], dim=1)
            self._hooks.zero_grad(set_to_none=True)
            yield RecordGradients(np.zeros(len(rows), dtype=np.int64), rows, found, losses.detach())

    def _hooked(self) -> GradSampleModule:
        for path, module in self._plain.model.named_modules():
            trained = any(p.requires_grad for p in module.parameters(recurse=False))
            if trained and not isinstance(module, nn.Linear):
                raise UnsupportedAdapter(f"{path} is a {type(module).__name__}; Opacus needs trained layers Linear")
            module.training = trained  # its hooks work in this mode only; everything around stays as it is
        return GradSampleModule(self._plain.model, loss_reduction="sum")


def _of_records(parameter: nn.Parameter, records: int) -> Tensor:
    """What the hooks left on one parameter, ``[records, values]``; 0 where the loss does not reach it."""
    found = getattr(parameter, "grad_sample", None)
    if found is None:
        return parameter.new_zeros(records, parameter.numel())
    total: Tensor = torch.stack(found).sum(dim=0) if isinstance(found, list) else found
    return total.detach().reshape(records, -1)
