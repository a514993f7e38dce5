"""The engine's benchmarks compare like with like, and most of them need neither Flower nor Ray."""

import json
import mmap
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from simulations.benchmarks.engine import (
    against_flower,
    against_pfl,
    gpu,
    jobs,
    record_level,
    speed,
)
from simulations.benchmarks.harness.timing import both_clocks, forget_peak, peak_memory, ratios
from simulations.benchmarks.scale import populations

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and Opacus' own

LIBRARY = (
    "client.engine.engine",
    "client.engine.cohort",
    "client.engine.sequential",
    "client.engine.prefix",
    "client.models.lora",
    "client.models.base",
)
SCRIPTS = ("speed", "against_pfl", "gpu", "tables")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def job() -> jobs.Job:
    clients = jobs.uniform_clients(3, 4, 8)
    return jobs.Job("tiny", jobs.tiny, jobs.SPEC, clients, jobs.ADAMW.replace(batch_size=2))


def test_engine_and_benchmarks_run_without_flower_and_ray() -> None:
    modules = [*LIBRARY, *(f"simulations.benchmarks.engine.{name}" for name in SCRIPTS)]
    code = f"""
import importlib, sys
sys.modules["flwr"] = sys.modules["ray"] = None  # an import of either fails as if it were not installed
for name in {modules!r}:
    importlib.import_module(name)
from simulations.benchmarks.engine import gpu
found = gpu.measure(gpu.TOY, gpu.jobs.CPU, rounds=1, side=8)
assert found["clients"] == gpu.TOY.clients
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_way_to_train_gives_the_same_updates(job: jobs.Job) -> None:
    expected = jobs.plain_peft(job)()
    assert relative(jobs.plain_peft(job, rebuilt=True)(), expected) < 1e-6
    assert relative(speed.engine(job, "fp32")(), expected) < 1e-4


def test_record_level_step_is_that_of_opacus(job: jobs.Job) -> None:
    step = jobs.one_step(job)
    found = jobs.private_step(step, step.engine("fp32"), noise_multiplier=0.0)()
    for way in (record_level.opacus_hooks, record_level.opacus_ghost):
        assert relative(found, way(step, noise_multiplier=0.0)()) < 1e-4
    unclipped = jobs.engine_training(step, step.engine("fp32"))()
    assert relative(found, unclipped) > 0.1, "nothing was clipped, so nothing was compared"


def test_a_round_beside_pfl_pays_and_moves_the_adapter(job: jobs.Job, tmp_path: Path) -> None:
    with against_pfl.new_ledger(tmp_path / "ledger.jsonl", job, 2) as ledger:
        work = against_pfl.engine_round(job, "fp32", ledger, 2)
        work()
        work()
        assert [event.round for event in ledger.events] == [1, 2]


def test_waiting_is_on_the_wall_and_not_of_the_processor() -> None:
    cpu, wall = both_clocks(lambda: time.sleep(0.2))
    assert wall >= 0.2
    assert cpu < 0.1


def test_peak_memory_starts_again() -> None:
    def use(size: int) -> None:
        with mmap.mmap(-1, size) as pages:  # given back at once, unlike what malloc holds
            for page in range(0, size, 4096):
                pages[page] = 1

    forget_peak()
    low = peak_memory()
    use(2**26)
    assert 0.9 * 2**26 < peak_memory() - low < 2**27  # the kernel counts pages in batches
    forget_peak()
    assert peak_memory() - low < 2**25
    use(2**25)
    assert 0.9 * 2**25 < peak_memory() - low < 2**26


def test_ratios_are_medians_within_a_round() -> None:
    first, second = ratios("job", {"a": [1.0, 2.0, 30.0], "b": [2.0, 1.0, 10.0]}, "a", 6)
    assert (first["ratio"], first["clients_per_second"]) == (1.0, 3.0)
    assert (second["ratio"], second["lowest_ratio"], second["highest_ratio"]) == (2.0, 0.5, 3.0)


def test_gpu_benchmark_compares_the_same_sums() -> None:
    cpu, shape = torch.device("cpu"), gpu.TOY
    job = gpu.job_of(shape, cpu, 3)
    matrices = sum(p.numel() for p in job.make().parameters() if p.dim() == 2)
    assert matrices == shape.weights() + shape.words * shape.hidden
    expected = jobs.plain_peft(job)().sum(dim=0)
    assert relative(gpu.engine_round(job, job.engine("fp32"), job.start())(), expected) < 1e-4


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_lacquer_sends_one_message_per_worker_and_flower_one_per_client() -> None:
    measured = against_flower.measure(4, 2, "random:bert", None)
    kept, rebuilt = against_flower.rows(measured, 4)
    assert (kept["messages"], kept["reference_messages"], rebuilt["reference_messages"]) == (2, 4, 4)
    assert kept["rounds"] == rebuilt["rounds"] == 1
    assert json.dumps([kept, rebuilt])
    assert all(row[f"{clock}_ratio"] > 0 for row in (kept, rebuilt) for clock in ("wall", "cpu"))


def test_the_scale_benchmark_trains_clients_with_records_of_their_own(tmp_path: Path) -> None:
    phrases, source = tmp_path / "phrases.parquet", tmp_path / "records.parquet"
    table = {"sentence": [f"phrase {number} " for number in range(40)], "label": [0, 1] * 20}
    pyarrow.parquet.write_table(pyarrow.table(table), phrases)
    populations.write_source(source, 260, phrases)
    found = pyarrow.parquet.read_table(source)
    assert len(set(found["text"].to_pylist())) == len(found) == 520, "no two records are alike"
    assert set(Counter(found["client"].to_pylist()).values()) == {2}
    row = populations.measure(60, phrases)
    assert (row["population"], row["records"], row["rounds"]) == (60, 120, populations.ROUNDS - 2)
    assert min(row[name] for name in ("prepare_bytes", "prepared_bytes", "round_seconds", "run_bytes")) > 0
    twice = {**row, "population": 120, "prepare_bytes": 2 * row["prepare_bytes"]}
    assert populations.slopes([row, twice])["prepare_bytes"] == pytest.approx(1)
    assert populations.slopes([row, twice])["round_seconds"] == 0
