"""What record-level privacy costs: a step of DP-SGD beside the same step without privacy, and beside Opacus.

Run: `python -m simulations.benchmarks engine.record_level [--sst2 train.parquet] [--quick]`.

Gradients of every record are clipped to a bound and summed, with Gaussian noise, for many clients at once; against
the same step without privacy on the same engine, and against Opacus 1.6 on plain PEFT, client by client, in two of its
ways. Hooks (`GradSampleModule`): one backward pass, every record's gradient in memory. Ghost clipping
(`GradSampleModuleFastGradientClipping`): norms from a first backward pass, the clipped sum from a second one. Tensors
are ready before the clock starts, nothing is rebuilt, and the noise here only costs what noise costs: no ledger.

CPU time of one thread, in turn within one process; peak memory of each variant in a process of its own, above that
process's size once the model is loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from peft import get_peft_model
from torch import Tensor, nn

from client.models.lora import adapter_layout, peft_config
from client.models.tasks import Batch, CausalLM
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import say, say_ratios, write_ratios
from simulations.benchmarks.harness.timing import growth, in_own_process, interleaved, one_thread, ratios

PLAIN, ENGINE, PRIVATE = "plain PEFT", "engine", "engine, record-level"
HOOKS, GHOST = "Opacus hooks", "Opacus ghost"


def opacus_hooks(job: jobs.Job, noise_multiplier: float = jobs.NOISE_MULTIPLIER) -> Callable[[], Tensor]:
    """Updates of all clients after one step each, `[clients, D]`."""
    model = GradSampleModule(_peft_model(job), loss_reduction="mean")

    def step(parameters: list[nn.Parameter], batch: Batch) -> None:
        optimizer = DPOptimizer(**_options(job, parameters, batch, noise_multiplier))
        optimizer.zero_grad()
        loss = job.task.per_record_loss(jobs.logits_of(model, batch), batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return _client_by_client(model, job, step)


def opacus_ghost(job: jobs.Job, noise_multiplier: float = jobs.NOISE_MULTIPLIER) -> Callable[[], Tensor]:
    """The same with ghost clipping."""
    model = GradSampleModuleFastGradientClipping(
        _peft_model(job), max_grad_norm=jobs.BOUND, use_ghost_clipping=True, loss_reduction="mean"
    )

    def step(parameters: list[nn.Parameter], batch: Batch) -> None:
        optimizer = DPOptimizerFastGradientClipping(**_options(job, parameters, batch, noise_multiplier))
        loss = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())
        optimizer.zero_grad()
        loss(jobs.logits_of(model, batch), batch.labels).backward()
        optimizer.step()

    return _client_by_client(model, job, step)


def _options(job: jobs.Job, parameters: list[nn.Parameter], batch: Batch, noise_multiplier: float) -> dict[str, Any]:
    return {
        "optimizer": torch.optim.SGD(parameters, lr=job.local.learning_rate),
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": jobs.BOUND,
        "expected_batch_size": len(batch.input_ids),
    }


def _client_by_client(
    model: nn.Module, job: jobs.Job, step: Callable[[list[nn.Parameter], Batch], None]
) -> Callable[[], Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    batches = jobs.padded_batches(job)

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
    tensors = adapter_layout(base, job.spec).tensors(job.start())
    model = get_peft_model(base, peft_config(job.spec)).train()
    jobs.copy_into(jobs.parameters_of(model), tensors)
    return model


def variants(job: jobs.Job, precision: str) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """What is compared; each is built when it is called. Opacus' ghost clipping takes a loss of classes only."""
    found: dict[str, Callable[[], Callable[[], Tensor]]] = {
        PLAIN: lambda: jobs.plain_peft(job),
        ENGINE: lambda: jobs.engine_training(job, job.engine(precision)),
        PRIVATE: lambda: jobs.private_step(job, job.engine(precision)),
        HOOKS: lambda: opacus_hooks(job),
    }
    return found if isinstance(job.task, CausalLM) else {**found, GHOST: lambda: opacus_ghost(job)}


def make_jobs(quick: bool, sst2: Path | None) -> list[tuple[jobs.Job, str]]:
    """Short records on a tiny model, where overhead counts; MiniLM with full and with ragged records; SmolLM2."""
    small, large = (4, 2) if quick else (64, 6)
    tiny = jobs.Job("tiny, 4 x 16", jobs.tiny, jobs.SPEC, jobs.uniform_clients(small, 4, 16), jobs.ADAMW)
    long = jobs.Job("MiniLM, 16 x 64", jobs.minilm, jobs.SPEC, jobs.uniform_clients(large, 16, 64), jobs.ADAMW)
    ragged = jobs.Job("MiniLM, ragged SST-2", jobs.minilm, jobs.SPEC, jobs.ragged_clients(large, sst2), jobs.ADAMW)
    records = jobs.uniform_clients(1 if quick else 2, 8, 64)
    chat = jobs.Job("SmolLM2, 8 x 64", jobs.smollm2, jobs.LLAMA_SPEC, records, jobs.ADAMW, CausalLM())
    made = [(tiny, "fp32"), (long, "fp32"), (long, "bf16"), (ragged, "bf16"), (chat, "fp32")]
    return [(jobs.one_step(replace(job, name=f"{job.name}, {precision}")), precision) for job, precision in made]


def gradient_rows(quick: bool, sst2: Path | None) -> list[dict[str, Any]]:
    """All variants of every job in turn; what is asked of them is how much faster the private step is."""
    found = []
    for job, precision in make_jobs(quick, sst2):
        works = {name: build() for name, build in variants(job, precision).items()}
        seconds = interleaved(works, 1 if quick else 5)
        for reference in [name for name in (ENGINE, HOOKS, GHOST) if name in works]:
            rows = ratios(job.name, seconds, reference, len(job.clients))
            found += [row for row in rows if row["variant"] == PRIVATE or reference == ENGINE]
    return found


def gradient_memory(variant: str) -> int:
    """Peak bytes of two steps of one variant on MiniLM, 32 records of 64 tokens, above the size before them."""
    one_thread()
    cohort = jobs.uniform_clients(1, 32, 64)
    job = jobs.one_step(jobs.Job("memory", jobs.minilm, jobs.SPEC, cohort, jobs.ADAMW))
    work = variants(job, "fp32")[variant]()
    return growth(lambda: (work(), work()))


def main(sst2: jobs.Sst2 = None, quick: jobs.Quick = False) -> None:
    """Measure and write the results."""
    one_thread()
    found = gradient_rows(quick, sst2)
    say_ratios(found)
    names: Sequence[str] = (PLAIN, ENGINE, PRIVATE, HOOKS, GHOST)
    memory = [{"variant": name, "peak_bytes": in_own_process(gradient_memory, name)} for name in names]
    for row in memory:
        say(f"peak memory, {row['variant']}: {row['peak_bytes'] / 2**20:.0f} MiB")
    if not quick:
        write_ratios("engine-record-level", {"seeds": [0], "ratios": found, "memory": memory}, "ratios")


if __name__ == "__main__":
    typer.run(main)
