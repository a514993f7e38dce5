"""The jobs of the engine's benchmarks: models, clients, the cohort engine, and plain PEFT as one writes it by hand.

The hand-written loop is the fair opponent: batches are padded to their longest record and turned into tensors before
the clock starts, the adapter is copied in place, nothing is rebuilt. With ``rebuilt`` it does what many federated
examples do: a new model from the base for every client.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from peft import get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from client.data.records import Records
from client.engine.batching import Pool, local_steps
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.base import load_base, load_tokenizer
from client.models.lora import LoraSpec, adapter_layout, initial_adapter, peft_config
from client.models.tasks import Batch, SequenceClassification, Task
from privacy.randomness.rng import simulation_generator

Sst2 = Annotated[Path | None, typer.Option(help="train.parquet of SST-2; random tokens of its lengths without it")]
Quick = Annotated[bool, typer.Option(help="very little of everything, nothing is written: does it run at all?")]

CPU = torch.device("cpu")
TASK = SequenceClassification(2)
SPEC = LoraSpec(8, 16.0, ("query", "value"), heads=("classifier",))
LLAMA_SPEC = LoraSpec(8, 16.0, ("q_proj", "v_proj"))
ADAMW = LocalTraining(optimizer="adamw", learning_rate=1e-3, batch_size=10)
BOUND, NOISE_MULTIPLIER, RATE = 0.1, 1.0, 0.05
"""Of a step of DP-SGD."""


@dataclass(frozen=True)
class Job:
    """A base model (made anew at every call), adapters, clients and their training."""

    name: str
    make: Callable[[], nn.Module]
    spec: LoraSpec
    clients: Sequence[Records]
    local: LocalTraining
    task: Task = TASK
    device: torch.device = CPU

    @property
    def seeds(self) -> range:
        return range(len(self.clients))

    def start(self) -> Tensor:
        """A full vector with B away from zero, as after some rounds."""
        model = self.make()
        vector = initial_adapter(adapter_layout(model, self.spec), model, 0)
        return vector + 0.02 * torch.randn(len(vector), generator=torch.Generator().manual_seed(0))

    def engine(self, precision: str, **settings: Any) -> CohortEngine:
        """The cohort engine on the job's model."""
        return CohortEngine(self.make(), self.spec, self.task, precision=precision, device=self.device, **settings)


def seeded(make: Callable[[Any], Any], config: Any) -> nn.Module:
    """A model with random weights that are always the same; torch's global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = make(config)
        return model.eval()


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
    return seeded(BertForSequenceClassification, config)


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2: 6 layers, width 384, 22 million parameters."""
    return load_base("minilm", "classification", 2)[0]


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct: 30 layers, width 576, vocabulary 49,152."""
    return load_base("smollm2", "causal-lm")[0]


def llama(**shape: Any) -> nn.Module:
    """A language model, by default of the size of ours: 4 layers, width 256, vocabulary 4,096."""
    ours = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    return seeded(LlamaForCausalLM, LlamaConfig(**(shape or ours)))


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


def data_name(sst2: Path | None) -> str:
    """What `ragged_clients` hold, for the results."""
    return "random tokens of SST-2's lengths" if sst2 is None else "SST-2"


def engine_training(job: Job, engine: CohortEngine) -> Callable[[], Tensor]:
    """Train the job's clients on the engine, `[clients, D]`; all from token lists to updates is inside the clock."""
    start = job.start()
    return lambda: engine.train_all(start, job.clients, job.local, job.seeds)


def one_step(job: Job) -> Job:
    """All records of a client in one step of SGD."""
    largest = max(len(records) for records in job.clients)
    return replace(job, local=job.local.replace(optimizer="sgd", learning_rate=RATE, batch_size=largest))


def private_step(job: Job, engine: CohortEngine, noise_multiplier: float = NOISE_MULTIPLIER) -> Callable[[], Tensor]:
    """The step with clipped record gradients and noise, for all clients at once."""
    start = job.start()
    sizes = torch.tensor([[len(records)] for records in job.clients], device=engine.device)

    def work() -> Tensor:
        sums = torch.zeros(len(job.clients), engine.layout.dim, device=engine.device)
        for chunk in engine.cohort_record_gradients(start, job.clients):
            scale = (BOUND / chunk.rows.norm(dim=1)).clamp_max_(1.0)
            # rows of one client times their factors: a product, without a scaled copy of the rows
            weights = torch.zeros(len(job.clients), len(chunk.rows), device=engine.device)
            weights[torch.from_numpy(chunk.clients), torch.arange(len(chunk.rows))] = scale
            sums.addmm_(weights, chunk.rows)
        return (sums + noise_multiplier * BOUND * torch.randn_like(sums)).mul_(-RATE / sizes)

    return work


def padded_batches(job: Job) -> list[list[Batch]]:
    """Every step of every client as tensors, padded to the longest record of the step."""
    made = []
    for records, seed in zip(job.clients, job.seeds, strict=True):
        pool = Pool([records])
        made.append([pool.batch(rows, 0, job.device) for rows in local_steps(job.local, len(records), seed)])
    return made


def plain_peft(job: Job, *, rebuilt: bool = False) -> Callable[[], Tensor]:
    """Train all clients one by one with PEFT and torch.optim; returns their updates `[clients, D]`.

    Args:
        rebuilt: copy the base model and put a new adapter on it for every client.
    """
    base, batches = job.make(), padded_batches(job)
    tensors = {n: start.to(job.device) for n, start in adapter_layout(base, job.spec).tensors(job.start()).items()}

    def adapted() -> tuple[nn.Module, dict[str, nn.Parameter]]:
        model = get_peft_model(copy.deepcopy(base) if rebuilt else base, peft_config(job.spec)).eval()
        return model, parameters_of(model)

    kept, fused = None if rebuilt else adapted(), True if job.device.type == "cuda" else None

    def work() -> Tensor:
        rows = []
        for steps in batches:
            model, parameters = kept or adapted()
            copy_into(parameters, tensors)
            run_steps(model, parameters.values(), steps, job.task, job.local, fused=fused)
            moves = [(parameters[name].detach() - start).reshape(-1) for name, start in tensors.items()]
            rows.append(torch.cat(moves).cpu())
        return torch.stack(rows)

    return work


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of a PEFT model under the names of PEFT's state dicts."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name.replace(".default", "").replace(".modules_to_save", ""): p for name, p in trained.items()}


def copy_into(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    """Set the trained parameters."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def run_steps(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    steps: Iterable[Batch],
    task: Task,
    local: LocalTraining,
    *,
    fused: bool | None = None,
) -> None:
    """AdamW over the batches, as one writes it in PyTorch."""
    optimizer = torch.optim.AdamW(parameters, local.learning_rate, weight_decay=local.weight_decay, fused=fused)
    for batch in steps:
        optimizer.zero_grad()
        loss = task.per_record_loss(logits_of(model, batch), batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's answer to a batch."""
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    return output if isinstance(output, Tensor) else output.logits
