"""What a run ran on: versions of the libraries that decide its numbers, cores and accelerators, the commit if known."""

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ENVIRONMENT_FILE = "environment.json"

PACKAGES = ("lacquer", "flwr", "ray", "torch", "transformers", "peft", "dp-accounting", "opacus", "numpy")


def describe_environment() -> dict[str, Any]:
    """Python, system, cores, accelerators, package versions and the source commit; no path and no host name."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "accelerators": _accelerators(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "commit": _commit(Path(__file__).parent),
    }


def write_environment(run_folder: Path) -> None:
    """Write environment.json. A resumed run overwrites it: the file tells of the last process that trained."""
    text = json.dumps(describe_environment(), indent=2)
    (Path(run_folder) / ENVIRONMENT_FILE).write_text(text + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerators() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit(folder: Path) -> str | None:
    """The commit of the checkout this file lies in, "+" behind it if files differ; None outside a checkout."""
    if not (folder.parent / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # no git here, or a checkout it will not read: the commit is unknown, and is said to be
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
