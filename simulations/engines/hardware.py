"""How many workers this host can feed: cores, GPUs, and the share of a GPU that each worker gets."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from client.models.devices import choose_device, find_cuda
from server.config.load import ConfigError
from server.config.schema import RunConfig

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Resources:
    """What the engine gives out.

    ``workers`` processes, each with ``threads`` CPU threads and ``gpu_share`` of one GPU (0 without CUDA), for each of
    which Ray sets ``cores`` aside.
    """

    workers: int
    threads: int
    gpus: int
    gpu_share: float
    cores: int = 1


def available_cores() -> int:
    """Cores this process may use: the scheduler's affinity mask, cut by a container's CPU quota (cgroup v2 or v1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _cgroup_quota() -> float | None:
    """CPUs' worth of run time per period, or None where there is no limit."""
    v2 = _CGROUP / "cpu.max"
    if v2.is_file():
        quota, period = v2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    v1 = _CGROUP / "cpu" / "cpu.cfs_quota_us"
    if v1.is_file():
        microseconds = int(v1.read_text())
        if microseconds > 0:
            return microseconds / int(v1.with_name("cpu.cfs_period_us").read_text())
    return None


def available_gpus(device: str) -> int:
    """CUDA devices that a run with this ``engine.device`` uses (``CUDA_VISIBLE_DEVICES`` is respected).

    Raises:
        ConfigError: there are none that torch can use, and they are asked for, or seen.
    """
    if device == "cpu":
        return 0
    found = find_cuda()
    try:
        choose_device(device, found)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found.devices


def gpu_names(device: str) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls the devices of :func:`available_gpus`, which raises its errors."""
    count, named = available_gpus(device), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def gpu_share(workers: int, gpus: int) -> float:
    """Fraction of a GPU per worker such that Ray makes room for at least ``workers`` actors.

    Ray packs fractions onto single devices, so three workers on two GPUs need halves, not two thirds. Never 0 where a
    GPU exists: Ray hides the GPUs from an actor that asked for none, and the actor would train on the CPU without a
    word.
    """
    return gpu_fraction(math.ceil(workers / gpus)) if gpus else 0.0


def gpu_fraction(workers: int) -> float:
    """Share of a GPU that so many workers have; 0 for none. Ray counts in units of 1e-4, hence the rounding down."""
    return max(1e-4, math.floor(1e4 / workers) / 1e4) if workers else 0.0


def resources(config: RunConfig, cores: int | None = None, gpus: int | None = None) -> Resources:
    """Workers for a run: as asked (``engine.workers``), or as many as the host feeds and the cohort employs.

    Automatic: one worker a GPU where GPUs are used (one process with large batches fills a GPU; more only contend),
    else one a core; never more than the expected cohort has clients. In process there is one worker, with all cores.
    """
    cores = available_cores() if cores is None else cores
    gpus = available_gpus(config.engine.device) if gpus is None else gpus
    if config.engine.workers > 0:
        workers = config.engine.workers
    elif config.engine.kind == "inprocess":
        workers = 1
    else:
        workers = max(1, min(gpus or cores, math.ceil(config.expected_cohort)))
    processes = 1 if config.engine.kind == "inprocess" else workers
    return Resources(workers, max(1, cores // processes), gpus, gpu_share(workers, gpus))


def with_workers(config: RunConfig, workers: int) -> RunConfig:
    """The configuration with ``engine.workers`` settled, as the ServerApp wants it: it waits for that many nodes."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"workers": workers})})
