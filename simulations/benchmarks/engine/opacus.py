"""One step of DP-SGD by Opacus 1.6 on plain PEFT, one client after the other: the opponent of the record-level mode.

Two of its ways. Hooks (`GradSampleModule`): one backward pass, every record's gradient in memory. Ghost clipping
(`GradSampleModuleFastGradientClipping`): norms from a first backward pass, the clipped sum from a second one. Tensors
are ready before the clock starts; nothing is rebuilt.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from peft import get_peft_model
from torch import Tensor, nn

from client.models.lora import peft_config
from client.models.tasks import Batch
from simulations.benchmarks.engine import jobs


def hooks(job: jobs.Job, bound: float, noise_multiplier: float) -> Callable[[], Tensor]:
    """Updates of all clients after one step each, `[clients, D]`."""
    model = GradSampleModule(_peft_model(job), loss_reduction="mean")

    def step(parameters: list[nn.Parameter], batch: Batch) -> None:
        optimizer = DPOptimizer(
            torch.optim.SGD(parameters, lr=job.local.learning_rate),
            noise_multiplier=noise_multiplier,
            max_grad_norm=bound,
            expected_batch_size=len(batch.input_ids),
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(_logits(model, batch), batch.labels).backward()  # type: ignore[arg-type, no-untyped-call]
        optimizer.step()

    return _client_by_client(model, job, step)


def ghost(job: jobs.Job, bound: float, noise_multiplier: float) -> Callable[[], Tensor]:
    """The same with ghost clipping."""
    model = GradSampleModuleFastGradientClipping(
        _peft_model(job), max_grad_norm=bound, use_ghost_clipping=True, loss_reduction="mean"
    )

    def step(parameters: list[nn.Parameter], batch: Batch) -> None:
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(parameters, lr=job.local.learning_rate),
            noise_multiplier=noise_multiplier,
            max_grad_norm=bound,
            expected_batch_size=len(batch.input_ids),
        )
        loss = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())
        optimizer.zero_grad()
        loss(_logits(model, batch), batch.labels).backward()
        optimizer.step()

    return _client_by_client(model, job, step)


def _client_by_client(
    model: nn.Module, job: jobs.Job, step: Callable[[list[nn.Parameter], Batch], None]
) -> Callable[[], Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    batches: Sequence[list[Batch]] = jobs.padded_batches(job)

    def work() -> Tensor:
        rows = []
        for (batch,) in batches:
            with torch.no_grad():
                for parameter, values in zip(parameters, start, strict=True):
                    parameter.copy_(values)
            step(parameters, batch)
            rows.append(torch.cat([(p.detach() - s).reshape(-1) for p, s in zip(parameters, start, strict=True)]))
        return torch.stack(rows)

    return work


def _peft_model(job: jobs.Job) -> Any:
    """PEFT on the job's base, at the job's starting adapter, in training mode (the hooks work in no other)."""
    base = job.make()
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = get_peft_model(base, peft_config(job.spec)).train()
    jobs.load_start(model, job)
    return model


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    return output if isinstance(output, Tensor) else output.logits
