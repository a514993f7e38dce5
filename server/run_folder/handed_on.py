"""The calibrated noise of a run in its folder, from the process that checked the settings to the one that trains.

Calibrating takes seconds to minutes. ``commitment.json`` holds the noise and a digest of all that decides it: every
setting but those of where and how fast it trains, the phases, the code and the libraries that calibrate. A file whose
digest is another, or that cannot be read, is passed over. Nobody trusts one that fits: see
:mod:`server.runs.commitment`.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from privacy import durable
from privacy.events import Json
from server.config.load import flatten
from server.config.schema import RunConfig
from server.run_folder.names import COMMITMENT_FILE, LEDGER_FILE
from server.run_folder.origin import FREE, Tables, methods_of
from server.run_folder.provenance import code_version

_LIBRARIES = ("dp-accounting", "numpy", "scipy")

T = TypeVar("T")


def write_noise(folder: Path, config: RunConfig, noise: Json, phases: Tables = ()) -> None:
    """Put the calibrated noise of a run into its folder, unless a ledger there commits to one already."""
    if (folder / LEDGER_FILE).is_file():
        return
    durable.write(folder / COMMITMENT_FILE, json.dumps({"of": _digest(config, phases), "noise": noise}) + "\n")


def read_noise(folder: Path, config: RunConfig, from_json: Callable[[Any], T], phases: Tables = ()) -> T | None:
    """Read the noise that :func:`write_noise` kept for the same settings and code; None if there is none.

    Args:
        from_json: makes it from its JSON form.
    """
    try:
        document = json.loads((folder / COMMITMENT_FILE).read_text(encoding="utf-8"))
        return from_json(document["noise"]) if document["of"] == _digest(config, phases) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(config: RunConfig, phases: Tables) -> str:
    settings = {key: value for key, value in flatten(config.to_table()).items() if key not in FREE}
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    parts = [settings, list(phases), code_version(config, methods_of(phases)), libraries]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
