"""Rounds of DP-FedAvg beside pfl-research 0.6.

Run: `python -m simulations.benchmarks engine.against_pfl PYTHON [--sst2 train.parquet] [--quick]`.

Whole rounds of DP-FedAvg on the same model, clients, batches and starting adapter: local SGD, flat clipping, Gaussian
noise, server step. pfl-research runs as its users run it (`pfl_worker.py`) in a process of its own, because its
requirements and ours exclude each other; it and the engine take turns, round after round, each on one thread, and CPU
seconds are compared. Ours includes what a run pays: the integer grid, the ledger's write to disk, noise from the secure
generator. `PYTHON` is the interpreter of an environment made so, with the versions of this one:

    python3.11 -m venv pfl && pfl/bin/pip install "pfl[pytorch]==0.6.0" torch==2.13.0 transformers==5.23.0 \
        peft==0.21.2 jaxtyping httpx
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from client.engine.batching import Pool, local_steps
from client.engine.local_training import LocalTraining
from client.models.lora import adapter_layout
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.mechanism import charged_release
from privacy.randomness.sampling import CohortSampler
from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import ROOT, say_ratios, write_ratios
from simulations.benchmarks.harness.timing import cpu_seconds, one_thread, ratios

BOUND, NOISE_MULTIPLIER = 0.1, 1.0
PFL, PFL_AMP = "pfl-research", "pfl-research, autocast bf16"
SGD = LocalTraining(optimizer="sgd", learning_rate=0.05)


class PflWorker:
    """A resident process of pfl-research that trains rounds on request."""

    def __init__(self, python: Path, job: jobs.Job, folder: Path, *, amp: bool) -> None:
        self._folder = folder
        folder.mkdir()
        model = job.make()
        layout = adapter_layout(model, job.spec)
        torch.save(model, folder / "base.pt")
        torch.save(layout.tensors(job.start()), folder / "start.pt")
        torch.save([_as_tensors(job, client) for client in range(len(job.clients))], folder / "clients.pt")
        settings = {
            "lora": {
                "r": job.spec.rank,
                "lora_alpha": job.spec.alpha,
                "target_modules": list(job.spec.targets),
                "modules_to_save": list(job.spec.heads),
            },
            "batch_size": job.local.batch_size,
            "learning_rate": job.local.learning_rate,
            "bound": BOUND,
            "noise_multiplier": NOISE_MULTIPLIER,
            "amp": amp,
        }
        self._process = subprocess.Popen(
            # -P: a module beside it must not stand in the place of another of its name
            [python, "-P", Path(__file__).with_name("pfl_worker.py"), folder, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        self._layout = layout

    def seconds(self) -> float:
        """CPU seconds of one round."""
        return float(self._ask("round")["seconds"])

    def mean_update(self) -> Tensor:
        """Mean update of all clients at the starting adapter, as a trainable vector. Only before the first round."""
        self._ask("mean")
        return self._layout.vector(torch.load(self._folder / "mean.pt"))

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the worker of pfl-research ended with exit code {self._process.wait()}")


def _as_tensors(job: jobs.Job, client: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and labels of a client, padded to its longest record, in the order in which the engine batches them."""
    records = job.clients[client]
    order = np.concatenate(local_steps(job.local, len(records), job.seeds[client]))
    batch = Pool([records]).batch(order, 0, torch.device("cpu"))
    assert batch.labels is not None
    return batch.input_ids, batch.attention_mask, batch.labels


def engine_round(job: jobs.Job, precision: str, ledger: Ledger, rounds: int) -> Callable[[], None]:
    """Local training, clipping, ledger, noise and server step, each call one round after the last."""
    engine, adapter = job.engine(precision), job.start()
    plan = Plan(FlatClip(BOUND, engine.layout.dim), NOISE_MULTIPLIER)
    sampling = Poisson(1.0, len(job.clients))
    numbers, sampler = iter(range(1, rounds + 1)), CohortSampler.create()

    def work() -> None:
        nonlocal adapter
        total = Contribution.zero(plan)
        for updates in engine.train(adapter, job.clients, job.local, job.seeds):
            total = total + contribute(Units(updates.deltas), plan)
        release = charged_release(total, plan, sampler.draw(sampling, next(numbers)), ledger=ledger)
        layout = engine.layout
        adapter = layout.with_trainable(adapter, layout.trainable_values(adapter) + release.update)

    return work


def new_ledger(path: Path, job: jobs.Job, rounds: int) -> Ledger:
    """A ledger that pays for so many rounds of all clients."""
    floor = FloorStep("round", Poisson(1.0, len(job.clients)), NOISE_MULTIPLIER, rounds)
    reason = "a benchmark on public text"
    commitment = Commitment(
        "client", "replace_one", len(job.clients), float("inf"), 1e-5, floor=(floor,), not_private=reason
    )
    return Ledger.create(path, commitment)


def compare(
    python: Path, job: jobs.Job, precisions: tuple[str, ...], rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """Measure rounds of all variants in turn; every row also tells how far the mean update is from pfl's."""
    workers = {PFL: PflWorker(python, job, folder / "pfl", amp=False)}
    if "bf16" in precisions:
        workers[PFL_AMP] = PflWorker(python, job, folder / "pfl-amp", amp=True)
    seconds: dict[str, list[float]] = {name: [] for name in [*workers, *(f"engine {p}" for p in precisions)]}
    truth = workers[PFL].mean_update()
    differences = {
        name: float((worker.mean_update() - truth).norm() / truth.norm())
        for name, worker in workers.items()
        if name != PFL
    }
    differences[PFL] = 0.0
    engines, ledgers = {}, []
    for precision in precisions:
        ledgers.append(new_ledger(folder / f"{precision}.jsonl", job, rounds + 1))
        engines[f"engine {precision}"] = engine_round(job, precision, ledgers[-1], rounds + 1)
        mean = jobs.engine_training(job, job.engine(precision))().mean(dim=0)
        differences[f"engine {precision}"] = float((mean - truth).norm() / truth.norm())
    for number in range(rounds + 1):  # the first is not counted
        measured = {name: worker.seconds() for name, worker in workers.items()}
        for name, work in engines.items():
            measured[name] = cpu_seconds(work)
        if number:
            for name, value in measured.items():
                seconds[name].append(value)
    for worker in workers.values():
        worker.close()
    for ledger in ledgers:
        ledger.close()
    rows = [row for reference in workers for row in ratios(job.name, seconds, reference, len(job.clients))]
    return [{**row, "difference": differences[row["variant"]]} for row in rows if row["variant"] not in workers]


def make_jobs(quick: bool, sst2: Path | None) -> list[tuple[jobs.Job, tuple[str, ...]]]:
    """The three jobs: short and long records on the tiny model, SST-2 on MiniLM."""
    tiny, large = (4, 2) if quick else (128, 24)
    cohorts = {
        ("tiny, 8 x 16, batches of 4", 4): jobs.uniform_clients(tiny, 8, 16),
        ("tiny, 20 x 64, batches of 10", 10): jobs.uniform_clients(max(2, tiny // 2), 20, 64),
    }
    made: list[tuple[jobs.Job, tuple[str, ...]]] = [
        (jobs.Job(name, jobs.tiny, jobs.SPEC, cohort, SGD.replace(batch_size=size)), ("fp32",))
        for (name, size), cohort in cohorts.items()
    ]
    ragged, local = jobs.ragged_clients(large, sst2), SGD.replace(batch_size=10)
    return [*made, (jobs.Job("MiniLM, ragged SST-2", jobs.minilm, jobs.SPEC, ragged, local), ("fp32", "bf16"))]


def main(
    python: Annotated[Path, typer.Argument(help="interpreter of an environment with pfl-research 0.6")],
    sst2: jobs.Sst2 = None,
    quick: jobs.Quick = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    rows: list[dict[str, Any]] = []
    for job, precisions in make_jobs(quick, sst2):
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(python, job, precisions, 1 if quick else 5, Path(folder))
    say_ratios(rows)
    if not quick:
        facts = {"data": jobs.data_name(sst2), "seeds": [0], "pfl": "0.6.0"}
        write_ratios("engine-pfl", {**facts, "ratios": rows}, "ratios")


if __name__ == "__main__":
    typer.run(main)
