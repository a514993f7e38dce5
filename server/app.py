"""The ServerApp: reads the run's configuration, runs or resumes it, and leaves its folder complete."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server.asking import Target, ask_in_folder
from server.config.load import load, parse, unflatten
from server.config.schema import RunConfig
from server.network.instructions import SigningGrid
from server.network.patience import make_patient
from server.run_folder.names import CONFIG_FILE
from server.runs.start import run_in_folder

app = ServerApp()
SPECIAL_KEYS = ("config-file", "run-folder", "resume", "other-code")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what ``context.run_config`` describes, or resume the run in the folder that its ``resume`` names."""
    keys = context.run_config
    config, folder = configuration(keys), run_folder(context)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if config.is_deployed:
        grid = SigningGrid(make_patient(grid))
    if target := Target.read(folder):
        ask_in_folder(config, folder, grid, target)
        return
    run_in_folder(
        config, folder, grid, resume=bool(keys.get("resume", "")), other_code=bool(keys.get("other-code", False))
    )


def run_folder(context: Context) -> Path:
    """The folder that a run writes to: the one it resumes or was given, else a new one below ``output``."""
    keys = context.run_config
    if given := str(keys.get("resume", "")) or str(keys.get("run-folder", "")):
        return Path(given)
    config = configuration(keys)
    return Path(config.output).expanduser().resolve() / f"{config.name}-{context.run_id}"


def configuration(run_config: Mapping[str, Any]) -> RunConfig:
    """The configuration of a Flower run: the file it names, that of the run it resumes, else its flat keys."""
    if file := str(run_config.get("config-file", "")):
        return load(Path(file))
    if folder := str(run_config.get("resume", "")):
        return load(Path(folder) / CONFIG_FILE)
    return parse(unflatten({key: value for key, value in run_config.items() if key not in SPECIAL_KEYS}))
