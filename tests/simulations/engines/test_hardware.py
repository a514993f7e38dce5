import math

import pytest

from client.models.devices import Cuda
from server.config.load import parse
from simulations.engines import hardware
from simulations.engines.hardware import Resources, available_cores, gpu_share, resources, with_workers


def config(**engine):
    return parse({"engine": engine, "clients": 1000, "sampling-rate": 0.004})


@pytest.mark.parametrize("workers", range(1, 18))
@pytest.mark.parametrize("gpus", range(1, 9))
def test_ray_has_room_for_the_workers_and_no_actor_goes_without_a_gpu(workers, gpus):
    share = gpu_share(workers, gpus)
    assert 0 < share <= 1
    actors_on_one_gpu = math.floor(1 / share)
    assert gpus * actors_on_one_gpu >= workers
    assert int(gpus / share) >= workers, "Flower's own arithmetic for the size of its pool"
    assert round(share * 1e4) == pytest.approx(share * 1e4), "Ray counts in units of 1e-4"


def test_without_cuda_no_gpu_is_asked_for():
    assert gpu_share(4, 0) == 0.0


def test_automatic_workers_follow_cores_gpus_and_cohort():
    assert resources(config(), cores=2, gpus=0) == Resources(2, 1, 0, 0.0)
    assert resources(config(), cores=64, gpus=0).workers == 4, "the cohort has four clients"
    assert resources(config(), cores=16, gpus=2) == Resources(2, 8, 2, 1.0)
    assert resources(config(kind="inprocess"), cores=8, gpus=0) == Resources(1, 8, 0, 0.0)


def test_workers_asked_for_are_given():
    assert resources(config(workers=6), cores=2, gpus=1) == Resources(6, 1, 1, 0.1666)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
)
def test_a_container_limit_is_respected(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert available_cores() == cores


def test_settled_workers_change_nothing_else():
    before = config()
    after = with_workers(before, 3)
    assert after.engine.workers == 3
    assert with_workers(after, 0) == before


@pytest.mark.parametrize(
    ("device", "visible", "names"),
    [("auto", None, ["0", "1"]), ("auto", "5,GPU-7", ["5", "GPU-7"]), ("cpu", "5,GPU-7", [])],
)
def test_gpus_have_the_names_that_hide_the_others(device, visible, names, monkeypatch):
    monkeypatch.setattr(hardware, "find_cuda", lambda: Cuda(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpu_names(device) == names
