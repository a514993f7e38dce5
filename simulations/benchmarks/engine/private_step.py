"""`python -m simulations.benchmarks.engine.private_step [--quick]`: a whole private step beside one without privacy.

Everything a step of ``client.record_level.dp_sgd`` does: draw the batch, gradients of every record, clip, round to the
grid, charge the ledger and wait for the disk, noise, optimizer. Against one step of SGD on the same records by the
same engine. CPU time of one thread, in turn within one process, so that a busy machine shows little; peak memory of
each variant in a process of its own, above that process's size once the model is loaded. Gradients alone beside
Opacus' hooks and ghost
clipping: ``record_level.py``.
"""

import gc
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.sequential import OpacusEngine
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import CausalLM, Task
from client.record_level.settings import RecordLevelSettings
from client.record_level.training import commit, private_training
from client.record_level.units import UnitIndex
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import CohortSampler
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.timing import forget_peak, interleaved, one_thread, peak_memory, write
from strategies.controllers.controller import PublicSignals

ENGINE, PRIVATE, HOOKS = "without privacy", "private step", "private step, gradients by Opacus' hooks"
VARIANTS = (ENGINE, PRIVATE, HOOKS)
JOBS = ("MiniLM, 64 records of 64 tokens", "Llama of 4 million, 64 records of 128 tokens")
Step = Callable[[], object]


def llama() -> nn.Module:
    """A language model of the size of ours, with random weights: 4 layers, width 256, vocabulary 4,096."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=704,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
        return model.eval()


def job(name: str) -> tuple[nn.Module, LoraSpec, Task, Records]:
    """Model, adapter, task and the records of one batch."""
    if name == JOBS[0]:
        return jobs.minilm(), jobs.SPEC, jobs.TASK, jobs.uniform_clients(1, 64, 64)[0]
    return llama(), LoraSpec(8, 16.0, ("q_proj", "v_proj")), CausalLM(), jobs.uniform_clients(1, 64, 128)[0]


def build(name: str, variant: str, folder: Path) -> Step:
    """One step of a variant, ready to be repeated; every record is in every batch."""
    model, spec, task, records = job(name)
    start = initial_adapter(adapter_layout(model, spec), model, 0)
    if variant == HOOKS:
        engine: Any = OpacusEngine(model, spec, task)
    else:
        engine = CohortEngine(model, spec, task, precision="fp32")
    if variant == ENGINE:
        local = LocalTraining("sgd", learning_rate=0.01, batch_size=len(records))
        return lambda: engine.train_all(start, [records], local, [0])
    silo = RecordLevelSettings(
        "record", 200, len(records), 100.0, 1e-5, controller_options={"clip-norm": 0.1}, optimizer="fedadam"
    )
    index = UnitIndex.of(records, grouped=False)
    commitment, multipliers = commit(silo, len(index))
    ledger = Ledger.create(folder / "ledger.jsonl", commitment)
    training = private_training(silo, engine, index, ledger, multipliers, CohortSampler.fresh())
    training.begin(start, PublicSignals(0, None))

    def step() -> None:
        training.step()
        training.observe(PublicSignals(training.state.round, None))

    return step


def cpu_ratios(name: str, rounds: int, root: Path) -> list[dict[str, Any]]:
    """CPU time of every variant over that of the step without privacy, taken in turn."""
    steps: dict[str, Step] = {}
    for number, variant in enumerate(VARIANTS):
        folder = root / f"{JOBS.index(name)}-{number}"
        folder.mkdir()
        steps[variant] = build(name, variant, folder)
    seconds = interleaved(steps, rounds)
    rows = []
    for variant in VARIANTS:
        ratios = [own / plain for own, plain in zip(seconds[variant], seconds[ENGINE], strict=True)]
        found = {"ratio": statistics.median(ratios), "lowest_ratio": min(ratios), "highest_ratio": max(ratios)}
        rows.append({"job": name, "variant": variant, **found, "seconds": statistics.median(seconds[variant])})
    return rows


def memory_of(name: str, variant: str, connection: Any) -> None:
    """Peak bytes of two steps above the size before them."""
    one_thread()
    with tempfile.TemporaryDirectory() as folder:
        step = build(name, variant, Path(folder))
        gc.collect()
        forget_peak()
        before = peak_memory()
        step()
        step()
        connection.send(peak_memory() - before)


def peaks(rows: Sequence[dict[str, Any]]) -> None:
    """Add the peak memory to every row, one process each."""
    context = multiprocessing.get_context("spawn")
    for row in rows:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=memory_of, args=(row["job"], row["variant"], sender))
        process.start()
        row["peak_bytes"] = receiver.recv()
        process.join()


def main(quick: Annotated[bool, typer.Option(help="one round: does it run at all?")] = False) -> None:
    """Measure and write the results."""
    one_thread()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in JOBS:
            rows += cpu_ratios(name, 1 if quick else 9, Path(folder))
    peaks(rows)
    for row in rows:
        Console(width=160).print(row)
    if not quick:
        write("dp-sgd-step", {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
