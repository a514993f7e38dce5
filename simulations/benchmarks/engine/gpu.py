"""Models in bfloat16 on one GPU: the shape of TinyLlama (1.1 billion parameters), and that of SmolLM2 (135 million).

Run: `python -m simulations.benchmarks engine.gpu [--device cuda] [--quick]`; about four minutes on an H200.

Random weights, sequences of 128 tokens, LoRA of rank 8 on query and value, clients with 20 records each in batches of
10. In one run, in turn: the cohort engine, plain PEFT client by client on the same base, one step of record-level
DP-SGD beside the same step without it, and two processes with half the clients each. MFU is the operations of the
frozen products, forwards and backwards to their inputs, over the time and over the peak of a large bfloat16 product
measured in the same run. What CUDA graphs could gain is the time in which no kernel runs. Needs neither Flower nor Ray.
``--quick`` runs very small models wherever there is no GPU, and writes nothing.
"""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models import lm_head
from client.models.tasks import CausalLM
from privacy.randomness.rng import simulation_generator
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import say, say_ratios, write
from simulations.benchmarks.harness.timing import one_thread, ratios

LOCAL = LocalTraining(optimizer="adamw", learning_rate=1e-4, batch_size=10)
ENGINE, PEFT, PRIVATE = "engine", "plain PEFT", "engine, record-level"
ONE, TWO = "one process", "two processes"


@dataclass(frozen=True)
class Shape:
    """Of a Llama, and of the benchmark on it: clients in a round, clients that plain PEFT trains."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    intermediate: int
    words: int
    tokens: int
    records: int
    clients: int
    sequential: int

    def weights(self) -> int:
        """Values in the frozen matrices that multiply every token, the output layer included."""
        keys = self.hidden * self.key_heads // self.heads
        layer = 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.words

    def operations(self) -> float:
        """Of one client's training: two for every weight and token, forwards and again backwards."""
        return 4.0 * self.weights() * self.tokens * self.records


LARGE = Shape("TinyLlama's shape, 1.1B", 2048, 22, 32, 4, 5632, 32000, 128, 20, 240, 8)
SMALL = Shape("SmolLM2's shape, 135M", 576, 30, 9, 3, 1536, 49152, 128, 20, 1000, 8)
TOY = Shape("toy", 64, 2, 4, 2, 96, 200, 16, 4, 6, 2)


def model(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Random weights, made where they stay."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            made = jobs.llama(
                vocab_size=shape.words,
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.key_heads,
                intermediate_size=shape.intermediate,
                max_position_embeddings=2 * shape.tokens,
                use_cache=False,
            )
            lm_head.mark(made)  # as `client.models.base` does with what it loads
            return made
    finally:
        torch.set_default_dtype(before)


def clients(shape: Shape, count: int) -> list[Records]:
    """Random tokens, all sequences of the same length."""
    rng = simulation_generator(0, "benchmark", "gpu")
    rows = rng.integers(3, shape.words, (count, shape.records, shape.tokens))
    return [Records.from_lists(list(client)) for client in rows]


def job_of(shape: Shape, device: torch.device, count: int) -> jobs.Job:
    """So many clients; bfloat16 on a GPU."""
    make = partial(model, shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return jobs.Job(shape.name, make, jobs.LLAMA_SPEC, clients(shape, count), LOCAL, CausalLM(), device)


def engine_of(job: jobs.Job, **settings: Any) -> CohortEngine:
    """The cohort engine as users have it; on a GPU bfloat16 has to be asked for."""
    return job.engine("bf16-model" if job.device.type == "cuda" else "auto", **settings)


def engine_round(job: jobs.Job, engine: CohortEngine, start: Tensor) -> Callable[[], Tensor]:
    """Local training of all clients; the sum of their updates, which together would be gigabytes."""

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


def idle_share(work: Callable[[], object], device: torch.device) -> float:
    """Of the wall time of `work`, the part in which no kernel and no copy ran on the GPU."""
    wall = timed(work, device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed(work, device)
    busy = sum(float(event.self_device_time_total) for event in profiler.key_averages()) / 1e6
    return max(0.0, 1.0 - busy / wall)


def budgets(job: jobs.Job, engine: CohortEngine, start: Tensor, tried: list[int]) -> list[dict[str, Any]]:
    """Clients a second and peak memory by token budget. Slots follow from it."""
    rows, chosen = [], engine.token_budget
    for budget in tried:
        engine._forward.token_budget = budget
        engine_round(job, engine, start)()  # memory of new sizes is paid for once
        torch.cuda.reset_peak_memory_stats(job.device)
        seconds = timed(engine_round(job, engine, start), job.device)
        peak = torch.cuda.max_memory_allocated(job.device)
        rows.append({"token_budget": budget, "clients_per_second": len(job.clients) / seconds, "peak": peak})
    engine._forward.token_budget = chosen
    return rows


def child(shape: Shape, device: str, count: int, barrier: Any, results: Any, rounds: int) -> None:
    """One of two processes on one GPU: a round of its own clients whenever both are ready."""
    one_thread()
    job = job_of(shape, torch.device(device), count)
    engine, start = engine_of(job, token_budget=8192), job.start()
    work = engine_round(job, engine, start)
    work()
    for _ in range(rounds):
        barrier.wait()
        results.put(timed(work, job.device))
        barrier.wait()


def together(shape: Shape, device: str, count: int, rounds: int) -> list[float]:
    """Seconds of rounds of `count` clients shared by two processes, each with the base model on the GPU."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (shape, device, count // 2, barrier, results, rounds)
    processes = [context.Process(target=child, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    seconds = [max(results.get(), results.get()) for _ in range(rounds)]
    for process in processes:
        process.join()
    return seconds


def measure(shape: Shape, device: torch.device, *, rounds: int, side: int) -> dict[str, Any]:
    """Everything the tables need of one model. A few clients are enough for plain PEFT, where none helps another."""
    cuda = device.type == "cuda"
    job = job_of(shape, device, shape.clients)
    few, some = (replace(job, clients=job.clients[:count]) for count in (shape.sequential, shape.clients // 4))
    engine, start = engine_of(job), job.start()
    step = jobs.one_step(few)
    peft, whole = jobs.plain_peft(few), engine_round(job, engine, start)
    private, plain = jobs.private_step(step, engine), jobs.engine_training(step, engine)
    for warm_up in (peft, private, plain, engine_round(some, engine, start)):
        warm_up()
    seconds: dict[str, list[float]] = {name: [] for name in (PEFT, ENGINE)}
    steps: dict[str, list[float]] = {name: [] for name in (ENGINE, PRIVATE)}
    peaks = []
    for _ in range(rounds):
        peaks.append(product_peak(device, side))
        seconds[PEFT].append(timed(peft, device) * shape.clients / shape.sequential)  # for as many as the engine
        seconds[ENGINE].append(timed(whole, device))
        steps[ENGINE].append(timed(plain, device))
        steps[PRIVATE].append(timed(private, device))
    reached = [shape.operations() * shape.clients / own for own in seconds[ENGINE]]
    found: dict[str, Any] = {
        "model": shape.name,
        "ratios": ratios(job.name, seconds, PEFT, shape.clients)
        + ratios(f"{job.name}, one step", steps, ENGINE, shape.sequential),
        "mfu": statistics.median(own / peak for own, peak in zip(reached, peaks, strict=True)),
        "product_tflops": statistics.median(peaks) / 1e12,
        "clients": shape.clients,
        "token_budget": engine.token_budget,
        "adapter_values": engine.layout.dim,
        "slot_bytes": 4 * 4 * engine.layout.dim,
    }
    if cuda:
        found["idle"] = idle_share(engine_round(some, engine, start), device)
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        chosen = engine.token_budget
        found["budgets"] = budgets(some, engine, start, [chosen // 4, chosen // 2, chosen])
        engine._forward.token_budget = 8192
        alone = [timed(engine_round(some, engine, start), device) for _ in range(rounds)]
        del engine, peft, whole, private, plain
        gc.collect()
        torch.cuda.empty_cache()
        shared = together(shape, str(device), len(some.clients), rounds)
        found["ratios"] += ratios(f"{job.name}, 8,192 tokens", {ONE: alone, TWO: shared}, ONE, len(some.clients))
    return found


def main(
    device: Annotated[str, typer.Option(help="a CUDA device")] = "cuda",
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    rows = []
    for shape in [TOY] if quick else [LARGE, SMALL]:
        rows.append(
            measure(shape, jobs.CPU, rounds=1, side=128)
            if quick
            else measure(shape, torch.device(device), rounds=3, side=8192)
        )
        say_ratios(rows[-1]["ratios"])
        say({name: value for name, value in rows[-1].items() if name != "ratios"})
        if not quick:
            name = torch.cuda.get_device_name(torch.device(device))
            write("engine-gpu", {"seeds": [0], "device": name, "models": rows})


if __name__ == "__main__":
    typer.run(main)
