"""The jobs of the engine's benchmarks: models, clients, and plain PEFT as one writes it by hand.

The hand-written loop is the fair opponent: batches are padded to their longest record and turned into tensors before
the clock starts, the adapter is copied in place, nothing is rebuilt. `rebuilt_peft` is what many federated examples do:
a new model from the base for every client.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from client.data.records import Records
from client.engine.batching import Pool
from client.engine.local_training import LocalTraining
from client.models.base import load_base, load_tokenizer
from client.models.lora import LoraSpec, adapter_layout, initial_adapter, peft_config
from client.models.tasks import Batch, SequenceClassification
from privacy.randomness.rng import simulation_generator

TASK = SequenceClassification(2)
SPEC = LoraSpec(8, 16.0, ("query", "value"), heads=("classifier",))
ADAMW = LocalTraining("adamw", learning_rate=1e-3, batch_size=10)


@dataclass(frozen=True)
class Job:
    """A base model (made anew at every call), adapters, clients and their training."""

    name: str
    make: Callable[[], nn.Module]
    spec: LoraSpec
    clients: Sequence[Records]
    local: LocalTraining

    @property
    def seeds(self) -> range:
        return range(len(self.clients))

    def start(self) -> Tensor:
        """A full vector with B away from zero, as after some rounds."""
        model = self.make()
        vector = initial_adapter(adapter_layout(model, self.spec), model, 0)
        return vector + 0.02 * torch.randn(len(vector), generator=torch.Generator().manual_seed(0))


def tiny() -> nn.Module:
    """2 layers, width 64: time goes to overhead, not to arithmetic."""
    config = BertConfig(  # type: ignore[call-arg]  # num_labels is an argument of its parent
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=128,
        num_labels=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = BertForSequenceClassification(config)
        return model.eval()


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2: 6 layers, width 384, 22 million parameters."""
    return load_base("minilm", "classification", 2)[0]


def uniform_clients(count: int, records: int, tokens: int) -> list[Records]:
    """Clients of equal size: random tokens, random labels."""
    rng = simulation_generator(0, "benchmark", "uniform")
    rows = rng.integers(3, 1000, (count, records, tokens))
    return [Records.from_lists(list(client), rng.integers(0, 2, records)) for client in rows]


def ragged_clients(count: int, sst2: Path | None) -> list[Records]:
    """Clients of 15 to 45 records: sentences of SST-2 (a parquet file), or random tokens of the same lengths."""
    rng = simulation_generator(0, "benchmark", "ragged")
    sizes = rng.integers(15, 46, count)
    if sst2 is None:  # SST-2's training sentences: median 10 tokens, 2 to 60
        lengths = [np.clip(rng.lognormal(2.35, 0.65, size), 3, 60).astype(int) for size in sizes]
        rows = [[rng.integers(1000, 30000, length) for length in client] for client in lengths]
        return [Records.from_lists(client, rng.integers(0, 2, len(client))) for client in rows]
    import pyarrow.parquet as parquet

    table = parquet.read_table(sst2, columns=["sentence", "label"])
    tokenizer = load_tokenizer("minilm")
    clients = []
    for size in sizes:
        chosen = table.take(rng.choice(len(table), size, replace=False))
        tokens = tokenizer(chosen["sentence"].to_pylist(), truncation=True, max_length=64)["input_ids"]
        clients.append(Records.from_lists(tokens, chosen["label"].to_pylist()))
    return clients


def padded_batches(job: Job) -> list[list[Batch]]:
    """Every step of every client as tensors, padded to the longest record of the step."""
    made = []
    for records, seed in zip(job.clients, job.seeds, strict=True):
        pool = Pool([records])
        made.append([pool.batch(rows, 0, torch.device("cpu")) for rows in job.local.batches(len(records), seed)])
    return made


def plain_peft(job: Job) -> Callable[[], Tensor]:
    """Train all clients one by one with PEFT and torch.optim; returns their updates `[clients, D]`."""
    layout = adapter_layout(job.make(), job.spec)
    tensors, batches = layout.tensors(job.start()), padded_batches(job)
    model = get_peft_model(job.make(), peft_config(job.spec)).eval()
    parameters = parameters_of(model)

    def work() -> Tensor:
        rows = []
        for steps in batches:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(tensors[name])
            rows.append(_train(model, parameters, tensors, steps, job.local))
        return torch.stack(rows)

    return work


def rebuilt_peft(job: Job) -> Callable[[], Tensor]:
    """The same, but every client copies the base model and puts new adapters on it."""
    layout, base = adapter_layout(job.make(), job.spec), job.make()
    tensors, batches = layout.tensors(job.start()), padded_batches(job)

    def work() -> Tensor:
        rows = []
        for steps in batches:
            model = get_peft_model(copy.deepcopy(base), peft_config(job.spec)).eval()
            parameters = parameters_of(model)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(tensors[name])
            rows.append(_train(model, parameters, tensors, steps, job.local))
        return torch.stack(rows)

    return work


def load_start(model: nn.Module, job: Job) -> None:
    """Put the job's starting adapter into a PEFT model."""
    tensors = adapter_layout(job.make(), job.spec).tensors(job.start())
    with torch.no_grad():
        for name, parameter in parameters_of(model).items():
            parameter.copy_(tensors[name])


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of a PEFT model under the names of PEFT's state dicts."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name.replace(".default", "").replace(".modules_to_save", ""): p for name, p in trained.items()}


def _train(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    start: dict[str, Tensor],
    steps: Sequence[Batch],
    local: LocalTraining,
) -> Tensor:
    optimizer = torch.optim.AdamW(parameters.values(), lr=local.learning_rate, weight_decay=local.weight_decay)
    for batch in steps:
        optimizer.zero_grad()
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        logits = output if isinstance(output, Tensor) else output.logits
        TASK.per_record_loss(logits, batch).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([(parameters[name].detach() - start[name]).reshape(-1) for name in start])
