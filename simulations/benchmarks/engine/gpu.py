"""A 1.1B Llama-shaped model on one GPU. Open: not measured yet.

Run: `python -m simulations.benchmarks engine.gpu [--device cuda] [--clients 1000] [--quick]`.

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
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.tasks import CausalLM
from privacy.randomness.rng import simulation_generator
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import say, say_ratios, write
from simulations.benchmarks.harness.timing import one_thread, ratios

LOCAL = LocalTraining(optimizer="adamw", learning_rate=1e-4, batch_size=10)
ENGINE, PEFT, PRIVATE = "engine", "plain PEFT", "engine, record-level"


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
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return jobs.llama(
                vocab_size=shape.words,
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.key_heads,
                intermediate_size=shape.intermediate,
                max_position_embeddings=2 * shape.tokens,
                use_cache=False,
            )
    finally:
        torch.set_default_dtype(before)


def clients(shape: Shape, count: int, records: int) -> list[Records]:
    """Random tokens, all sequences of the same length."""
    rng = simulation_generator(0, "benchmark", "gpu")
    rows = rng.integers(3, shape.words, (count, records, shape.tokens))
    return [Records.from_lists(list(client)) for client in rows]


def job_of(shape: Shape, device: torch.device, dtype: torch.dtype, count: int, records: int) -> jobs.Job:
    """So many clients of so many records."""
    name = f"Llama, {shape.weights() / 1e9:.2f}B in products, {records} x {shape.tokens}"
    make = partial(model, shape, device, dtype)
    return jobs.Job(name, make, jobs.LLAMA_SPEC, clients(shape, count, records), LOCAL, CausalLM(), device)


def engine_round(job: jobs.Job, engine: CohortEngine) -> Callable[[], Tensor]:
    """Local training of all clients; the sum of their updates, which together would be gigabytes."""
    start = job.start()

    def work() -> Tensor:
        total = torch.zeros(engine.layout.dim)
        for updates in engine.train(start, job.clients, job.local, job.seeds):
            total += updates.deltas.sum(dim=0)
        return total

    return work


def timed(work: Callable[[], object], device: torch.device) -> float:
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
    draws = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16, generator=draws) for _ in range(2))
    times = [timed(lambda: left @ right, device) for _ in range(12)]
    return 2.0 * side**3 / statistics.median(times[2:])


def measure(
    shape: Shape, device: torch.device, *, count: int, records: int, sequential: int, rounds: int, side: int
) -> dict[str, Any]:
    """Everything the table needs. A few clients are enough for plain PEFT, where one does not help the other."""
    cuda = device.type == "cuda"
    job = job_of(shape, device, torch.bfloat16 if cuda else torch.float32, count, records)
    few, warm = (replace(job, clients=job.clients[:some]) for some in (sequential, 64))
    engine = job.engine("bf16-model" if cuda else "auto")  # on a GPU bfloat16 has to be asked for
    step = jobs.one_step(few)
    peft, whole = jobs.plain_peft(few), engine_round(job, engine)
    private, plain = jobs.private_step(step, engine), jobs.engine_training(step, engine)
    for warm_up in (peft, private, plain, engine_round(warm, engine)):
        warm_up()
    seconds: dict[str, list[float]] = {name: [] for name in (PEFT, ENGINE)}
    steps: dict[str, list[float]] = {name: [] for name in (ENGINE, PRIVATE)}
    peaks = []
    for _ in range(rounds):
        peaks.append(product_peak(device, side))
        seconds[PEFT].append(timed(peft, device) * count / sequential)  # for as many clients as the engine
        seconds[ENGINE].append(timed(whole, device))
        steps[ENGINE].append(timed(plain, device))
        steps[PRIVATE].append(timed(private, device))
    flops = 4.0 * shape.weights() * shape.tokens * records * count
    return {
        "ratios": ratios(job.name, seconds, PEFT, count) + ratios(f"{job.name}, one step", steps, ENGINE, sequential),
        "mfu": statistics.median(flops / own / peak for own, peak in zip(seconds[ENGINE], peaks, strict=True)),
        "product_tflops": statistics.median(peaks) / 1e12,
        "clients": count,
        "token_budget": engine.token_budget,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else 0,
    }


def main(
    device: Annotated[str, typer.Option(help="a CUDA device")] = "cuda",
    count: Annotated[int, typer.Option("--clients", help="clients in the round")] = 1000,
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results."""
    if quick:
        one_thread()
        found = measure(SMALL, jobs.CPU, count=6, records=4, sequential=2, rounds=1, side=128)
    else:
        target = torch.device(device)
        found = measure(LARGE, target, count=count, records=20, sequential=40, rounds=3, side=8192)
        found["device"] = torch.cuda.get_device_name(target)
    say_ratios(found["ratios"])
    say(f"MFU {found['mfu']:.2f} of {found['product_tflops']:.1f} TFLOP/s")
    if not quick:
        write("engine-gpu", {"seeds": [0], **found})


if __name__ == "__main__":
    typer.run(main)
