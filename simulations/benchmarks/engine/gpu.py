"""`python -m simulations.benchmarks.engine.gpu [--quick]`: a 1.1B Llama-shaped model on one GPU. Open: none was lent.

Random weights in the shape of TinyLlama, sequences of 128 tokens, LoRA of rank 8 on query and value, a round of 1,000
clients with 20 records each in batches of 10. In one run, in turn: the cohort engine, plain PEFT client by client on
the same bfloat16 base, and one step of record-level DP-SGD beside the same step without it. MFU is the operations of
the frozen products, forwards and backwards to their inputs, over the time and over the peak of a large bfloat16
product measured in the same run. Needs neither Flower nor Ray. ``--quick`` runs a very small model wherever there is no
GPU, and writes nothing.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from peft import get_peft_model
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from client.data.records import Records
from client.engine.batching import Pool
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.lora import LoraSpec, adapter_layout, initial_adapter, peft_config
from client.models.tasks import CausalLM
from privacy.randomness.rng import simulation_generator
from simulations.benchmarks.harness.timing import lines, show, write

SPEC = LoraSpec(8, 16.0, ("q_proj", "v_proj"))
LOCAL = LocalTraining("adamw", learning_rate=1e-4, batch_size=10)
TASK = CausalLM()
BOUND, NOISE_MULTIPLIER = 0.1, 1.0
ENGINE, PEFT = "engine", "plain PEFT"


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    words: int
    tokens: int

    def weights(self) -> int:
        """Values in the frozen matrices that multiply every token, the output layer included."""
        keys = self.hidden * self.key_heads // self.heads
        layer = 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.words


LARGE = Shape(2048, 22, 32, 4, 5632, 32000, 128)
SMALL = Shape(64, 2, 4, 2, 96, 200, 16)


def model(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Random weights, made where they stay."""
    config = LlamaConfig(
        vocab_size=shape.words,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=2 * shape.tokens,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            made: nn.Module = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    return made.eval()


def clients(shape: Shape, count: int, records: int) -> list[Records]:
    """Random tokens, all sequences of the same length."""
    rng = simulation_generator(0, "benchmark", "gpu")
    rows = rng.integers(3, shape.words, (count, records, shape.tokens))
    return [Records.from_lists(list(client)) for client in rows]


def start(base: nn.Module) -> Tensor:
    """A full vector with B away from zero."""
    vector = initial_adapter(adapter_layout(base, SPEC), base, 0)
    return vector + 0.02 * torch.randn(len(vector), generator=torch.Generator().manual_seed(0))


def engine_round(engine: CohortEngine, vector: Tensor, cohort: list[Records]) -> Callable[[], Tensor]:
    """Local training of all clients; the sum of their updates."""

    def work() -> Tensor:
        total = torch.zeros(engine.layout.dim)
        for updates in engine.train(vector, cohort, LOCAL, range(len(cohort))):
            total += updates.deltas.sum(dim=0)
        return total

    return work


def plain_peft(base: nn.Module, vector: Tensor, cohort: list[Records], device: torch.device) -> Callable[[], Tensor]:
    """The same, one client after the other; batches are on the device before the clock starts."""
    layout = adapter_layout(base, SPEC)
    tensors = {name: values.to(device) for name, values in layout.tensors(vector).items()}
    adapted = get_peft_model(base, peft_config(SPEC)).eval()
    parameters = {n.replace(".default", ""): p for n, p in adapted.named_parameters() if p.requires_grad}
    batches = []
    for seed, records in enumerate(cohort):
        pool = Pool([records])
        batches.append([pool.batch(rows, 0, device) for rows in LOCAL.batches(len(records), seed)])

    def work() -> Tensor:
        total = torch.zeros(layout.dim)
        for steps in batches:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(tensors[name])
            optimizer = torch.optim.AdamW(
                parameters.values(),
                lr=LOCAL.learning_rate,
                weight_decay=LOCAL.weight_decay,
                fused=device.type == "cuda",
            )
            for batch in steps:
                optimizer.zero_grad()
                TASK.per_record_loss(adapted(input_ids=batch.input_ids).logits, batch).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            total += torch.cat([(parameters[name].detach() - tensors[name]).reshape(-1) for name in tensors]).cpu()
        return total

    return work


def record_level(engine: CohortEngine, vector: Tensor, cohort: list[Records]) -> Callable[[], Tensor]:
    """One step of DP-SGD for every client: clipped sums of record gradients, and noise."""

    def work() -> Tensor:
        sums = torch.zeros(len(cohort), engine.layout.dim, device=engine.device)
        for chunk in engine.cohort_record_gradients(vector, cohort):
            scale = (BOUND / chunk.rows.norm(dim=1)).clamp_max_(1.0)
            sums.index_add_(0, torch.from_numpy(chunk.clients).to(engine.device), chunk.rows * scale[:, None])
        return sums + NOISE_MULTIPLIER * BOUND * torch.randn_like(sums)

    return work


def one_step(engine: CohortEngine, vector: Tensor, cohort: list[Records]) -> Callable[[], Tensor]:
    """One step without privacy."""
    local = replace(LOCAL, optimizer="sgd", batch_size=max(len(records) for records in cohort))
    return lambda: engine.train_all(vector, cohort, local, range(len(cohort)))


def timed(work: Callable[[], Tensor], device: torch.device) -> float:
    """Wall seconds, until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def product_peak(device: torch.device, side: int) -> float:
    """Operations per second of a square bfloat16 product."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [timed(lambda: left @ right, device) for _ in range(12)]
    return 2.0 * side**3 / statistics.median(times[2:])


def measure(
    shape: Shape, device: torch.device, *, count: int, records: int, sequential: int, rounds: int, side: int
) -> dict[str, Any]:
    """Everything the table needs. A few clients are enough for plain PEFT, where one does not help the other."""
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
    cohort = clients(shape, count, records)
    base = model(shape, device, narrow)
    vector = start(base)
    precision = "bf16-model" if device.type == "cuda" else "auto"  # on a GPU bfloat16 has to be asked for
    engine = CohortEngine(base, SPEC, TASK, device=device, precision=precision)
    whole = engine_round(engine, vector, cohort)
    works = {PEFT: plain_peft(model(shape, device, narrow), vector, cohort[:sequential], device), ENGINE: whole}
    private, plain = (make(engine, vector, cohort[:sequential]) for make in (record_level, one_step))
    for warm_up in (works[PEFT], private, plain, engine_round(engine, vector, cohort[:64])):
        warm_up()
    seconds: dict[str, list[float]] = {name: [] for name in (PEFT, ENGINE)}
    steps: dict[str, list[float]] = {ENGINE: [], "engine, record-level": []}
    peaks = []
    for _ in range(rounds):
        peaks.append(product_peak(device, side))
        seconds[PEFT].append(timed(works[PEFT], device) * count / sequential)  # for as many clients as the engine
        seconds[ENGINE].append(timed(works[ENGINE], device))
        steps[ENGINE].append(timed(plain, device))
        steps["engine, record-level"].append(timed(private, device))
    flops = 4.0 * shape.weights() * shape.tokens * records * count
    name = f"Llama, {shape.weights() / 1e9:.2f}B in products, {records} x {shape.tokens}"
    return {
        "ratios": lines(name, seconds, PEFT, count) + lines(f"{name}, one step", steps, ENGINE, sequential),
        "mfu": statistics.median(flops / own / peak for own, peak in zip(seconds[ENGINE], peaks, strict=True)),
        "product_tflops": statistics.median(peaks) / 1e12,
        "clients": count,
        "token_budget": engine.token_budget,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    }


def main(
    device: Annotated[str, typer.Option(help="a CUDA device")] = "cuda",
    count: Annotated[int, typer.Option("--clients", help="clients in the round")] = 1000,
    quick: Annotated[bool, typer.Option(help="a very small model on the CPU: does it run at all?")] = False,
) -> None:
    """Measure and write the results."""
    console = Console(width=160)
    if quick:
        torch.set_num_threads(1)
        found = measure(SMALL, torch.device("cpu"), count=6, records=4, sequential=2, rounds=1, side=128)
    else:
        target = torch.device(device)
        found = measure(LARGE, target, count=count, records=20, sequential=40, rounds=3, side=8192)
        found["device"] = torch.cuda.get_device_name(target)
    show(console, found["ratios"])
    console.print(f"MFU {found['mfu']:.2f} of {found['product_tflops']:.1f} TFLOP/s", highlight=False)
    if not quick:
        console.print(f"written to {write('engine-gpu', {'seeds': [0], **found})}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
