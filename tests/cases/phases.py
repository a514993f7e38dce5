"""Whole runs in phases. Not a test."""

import json
from pathlib import Path
from typing import Any

from server.run_folder.names import ORIGIN_FILE, PHASES_FILE
from server.runs.phase_plan import PhasesConfig
from server.runs.start import run_in_folder


def train(config: PhasesConfig, folder: Path) -> dict[str, Any]:
    """Run in a folder, which is made, or go on with the run there; its results."""
    folder.mkdir(exist_ok=True)
    begun = (folder / ORIGIN_FILE).is_file()
    (folder / PHASES_FILE).write_text(config.to_toml(), encoding="utf-8")
    run_in_folder(config.run, folder, resume=begun)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results
