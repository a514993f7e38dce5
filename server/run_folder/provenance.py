"""The code of a run file by file, so that a resumed run can say what is different, and its environment.

The environment is the versions of the libraries that decide its numbers, the machine, and the commit if it is known.
"""

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from server.config.schema import RunConfig
from server.run_folder.names import ENVIRONMENT_FILE

ROOMS = ("privacy", "client", "strategies", "server")
LIBRARIES = ("flwr", "torch", "transformers", "peft", "numpy")
DISTRIBUTION = "lacquer-dp"
"""`lacquer` is somebody else's on PyPI."""
NOT_CODE = (":(exclude)simulations/benchmarks/results", ":(exclude)docs", ":(exclude)*.md")
PACKAGES = ("flwr", "ray", "torch", "transformers", "peft", "dp-accounting", "opacus", "numpy")


def code_version(config: RunConfig, methods: Iterable[str] = ()) -> dict[str, str]:
    """Digests (SHA-256, 16 digits) of the source files that decide a run's numbers, and versions of libraries.

    The user's own methods are among them, under the names that the configuration, or `methods`, gives them.

    The user's own methods are in it, under the names that the configuration, or `methods`, gives them.
    """
    root = Path(__file__).resolve().parents[2]
    found = {
        str(path.relative_to(root)): _digest(path) for room in ROOMS for path in sorted((root / room).rglob("*.py"))
    }
    strategy = config.strategy
    for name in sorted({strategy.controller, strategy.aggregation, strategy.optimizer, *methods}):
        module, colon, _ = name.partition(":")
        if colon and (origin := _origin(module)):
            found[name] = _digest(Path(origin))
    return found | {library: text for library in LIBRARIES if (text := _version(library))}


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """List what was changed, added or removed between two versions of the code, in words."""
    words = []
    for name in sorted(before.keys() | now.keys()):
        if name in LIBRARIES and before.get(name) != now.get(name):
            words.append(f"{name} {before.get(name, 'absent')} -> {now.get(name, 'absent')}")
        elif name not in now:
            words.append(f"{name} is gone")
        elif name not in before:
            words.append(f"{name} is new")
        elif before[name] != now[name]:
            words.append(f"{name} was changed")
    return words


def _origin(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None  # the configuration is refused elsewhere, with the name that was not found
    return None if spec is None else spec.origin


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def describe_environment() -> dict[str, Any]:
    """Describe Python, system, cores, accelerators, packages and commit; names no path and no host."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "accelerators": _accelerators(),
        "packages": {
            "lacquer": own_version(),
            **{name: found for name in PACKAGES if (found := _version(name)) is not None},
        },
        "commit": commit_of(Path(__file__).resolve().parents[2]),
    }


def write_environment(run_folder: Path) -> None:
    """Write environment.json into a run's folder.

    A resumed run overwrites it: the file tells of the last process that trained.
    """
    text = json.dumps(describe_environment(), indent=2)
    (Path(run_folder) / ENVIRONMENT_FILE).write_text(text + "\n", encoding="utf-8")


def own_version() -> str:
    """The version of this code, installed or used from a checkout."""
    if found := _version(DISTRIBUTION):
        return found
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if not file.is_file():
        return "of unknown version"
    return str(tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerators() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def processor() -> str:
    """The name of the processor, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit_of(folder: Path) -> str | None:
    """The commit of the checkout in `folder`, "+" behind it if code differs; None outside a checkout.

    Results of benchmarks and the pages that are made from them are no code: the first to be written would put a "+"
    behind the commit of the next.
    """
    if not (folder / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_CODE],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # no git here, or a checkout it will not read: the commit is unknown, and is said to be
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
