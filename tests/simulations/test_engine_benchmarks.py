"""The engine's benchmarks compare like with like, and most of them need neither Flower nor Ray."""

import json
import math
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from torch.profiler import ProfilerActivity, profile

from privacy.ledger import Ledger
from simulations.benchmarks import (
    engine_flower,
    engine_gpu,
    engine_jobs,
    engine_peak,
    engine_pfl,
    engine_population,
    engine_profile,
    engine_record_level,
    engine_speed,
)
from simulations.benchmarks.side_by_side import forget_peak, lines, peak_memory

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and Opacus' own

LIBRARY = ("client.engine", "client.cohort", "client.sequential", "client.prefix", "client.peft_files", "client.models")
SCRIPTS = (
    "engine_speed",
    "engine_peak",
    "engine_record_level",
    "engine_profile",
    "engine_pfl",
    "engine_gpu",
    "engine_tables",
)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def job() -> engine_jobs.Job:
    clients = engine_jobs.uniform_clients(3, 4, 8)
    return engine_jobs.Job(
        "tiny", engine_jobs.tiny, engine_jobs.SPEC, clients, replace(engine_jobs.ADAMW, batch_size=2)
    )


@pytest.mark.slow
def test_engine_and_benchmarks_run_without_flower_and_ray() -> None:
    modules = [*LIBRARY, *(f"simulations.benchmarks.{name}" for name in SCRIPTS)]
    code = f"""
import importlib, sys
sys.modules["flwr"] = sys.modules["ray"] = None  # an import of either fails as if it were not installed
for name in {modules!r}:
    importlib.import_module(name)
from simulations.benchmarks import engine_gpu
cpu = engine_gpu.torch.device("cpu")
found = engine_gpu.measure(engine_gpu.SMALL, cpu, count=2, records=2, sequential=1, rounds=1, side=8)
assert found["clients"] == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_way_to_train_gives_the_same_updates(job: engine_jobs.Job) -> None:
    expected = engine_jobs.plain_peft(job)()
    assert relative(engine_jobs.rebuilt_peft(job)(), expected) < 1e-6
    assert relative(engine_speed.engine(job, "fp32")(), expected) < 1e-4


def test_record_level_step_is_that_of_opacus(job: engine_jobs.Job) -> None:
    step = engine_record_level.one_step(job)
    found = engine_record_level.private(step, "fp32", noise_multiplier=0.0)()
    for way in (engine_record_level.opacus.hooks, engine_record_level.opacus.ghost):
        assert relative(found, way(step, engine_record_level.BOUND, 0.0)()) < 1e-4
    unclipped = engine_record_level.non_private(step, "fp32")()
    assert relative(found, unclipped) > 0.1, "nothing was clipped, so nothing was compared"


def test_training_flops_of_one_token() -> None:
    hidden, intermediate = 384, 1536
    products = 6 * 2 * (4 * hidden**2 + 2 * hidden * intermediate) - 3 * hidden**2
    more = 6 * 2 * 6 * 8 * hidden + 6 * 6 * hidden
    assert engine_peak.training_flops(np.array([1])) == 2 * (products + more)
    two, one = (engine_peak.training_flops(np.array(lengths)) for lengths in ([20, 20], [40]))
    assert two < one


def test_a_round_beside_pfl_pays_and_moves_the_adapter(job: engine_jobs.Job, tmp_path: Path) -> None:
    with engine_pfl.new_ledger(tmp_path / "ledger.jsonl", job, 2) as ledger:
        work = engine_pfl.engine_round(job, "fp32", ledger, 2)
        work()
        work()
        assert [event.round for event in ledger.events] == [1, 2]


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.usefixtures("identity")
@pytest.mark.slow
def test_rounds_of_a_million_clients_draw_the_cohort_of_a_hundred(tmp_path: Path) -> None:
    config = engine_population.configuration(1_000_000, tmp_path / "cache", "random:bert", records=1)
    measured, clients = engine_population.rounds_of(config, tmp_path, 3)
    assert clients == 1_000_000
    assert len(measured) == 2
    assert all(0 < times["draw_and_messages"] < times["wall"] for times in measured)
    with Ledger.open(tmp_path / engine_population.LEDGER_FILE, read_only=True) as ledger:
        assert [event.sampling.expected_units for event in ledger.events] == [pytest.approx(50)] * 3


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
    first, second = lines("job", {"a": [1.0, 2.0, 30.0], "b": [2.0, 1.0, 10.0]}, "a", 6)
    assert (first["ratio"], first["clients_per_second"]) == (1.0, 3.0)
    assert (second["ratio"], second["lowest_ratio"], second["highest_ratio"]) == (2.0, 0.5, 3.0)


def test_gpu_benchmark_compares_the_same_sums() -> None:
    cpu, shape = torch.device("cpu"), engine_gpu.SMALL
    base = engine_gpu.model(shape, cpu, torch.float32)
    vector, cohort = engine_gpu.start(base), engine_gpu.clients(shape, 3, 5)
    assert sum(p.numel() for p in base.parameters() if p.dim() == 2) == shape.weights() + shape.words * shape.hidden
    expected = engine_gpu.plain_peft(engine_gpu.model(shape, cpu, torch.float32), vector, cohort, cpu)()
    engine = engine_gpu.CohortEngine(base, engine_gpu.SPEC, engine_gpu.TASK, precision="fp32")
    assert relative(engine_gpu.engine_round(engine, vector, cohort)(), expected) < 1e-4


def test_flame_graph_is_a_picture_of_what_was_profiled(job: engine_jobs.Job) -> None:
    engine = engine_profile.CohortEngine(job.make(), job.spec, engine_jobs.TASK, precision="fp32")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.train_all(job.start(), job.clients, job.local, job.seeds)
    events = list(profiler.events())
    parts = engine_profile.by_part(events, 1e9)
    assert {"frozen products", "adapters", "attention"} <= {part["part"] for part in parts}
    assert math.isclose(sum(part["share"] for part in parts), 1.0)
    picture = ElementTree.fromstring(engine_profile.flame(events, "a title", 1e-9))
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "a title"
    assert any(title.startswith("_AdaptedFunction") for title in titles)
    shares = [
        float(title.rpartition("(")[2].rstrip(" %)")) for title in titles if title.startswith("frozen products (")
    ]
    assert 0 < shares[0] < 100


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_lacquer_sends_one_message_per_worker_and_flower_one_per_client() -> None:
    measured = engine_flower.measure(4, 2, "random:bert", None)
    kept, rebuilt = engine_flower.rows(measured, 4)
    assert (kept["messages"], kept["reference_messages"], rebuilt["reference_messages"]) == (2, 4, 4)
    assert kept["rounds"] == rebuilt["rounds"] == 1
    assert json.dumps([kept, rebuilt])
    assert all(row[f"{clock}_ratio"] > 0 for row in (kept, rebuilt) for clock in ("wall", "cpu"))
