"""Which code a run ran on, file by file, so that a run that goes on can say what is different."""

import hashlib
import importlib.util
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from server.config import RunConfig

ROOMS = ("privacy", "client", "strategies", "server")
LIBRARIES = ("flwr", "torch", "transformers", "peft", "numpy")


def code_version(config: RunConfig, methods: Iterable[str] = ()) -> dict[str, str]:
    """Digest (SHA-256, 16 digits) of every source file that decides a run's numbers, and the versions of libraries.

    The user's own methods are in it, under the names that the configuration, or `methods`, gives them.
    """
    root = Path(__file__).resolve().parent.parent
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
    """What was changed, added or removed, in words."""
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


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
