"""`python -m simulations.benchmarks.engine.full_run FOLDER`: wall time of one whole run of preset ``sst2``, on Ray.

FOLDER holds SST-2 as ``train.parquet`` and ``validation.parquet``. 200 rounds, 1,000 clients, one worker a core. A wall
time means something only if nothing else runs on the machine: the load before the start is written down beside it.
``--quick`` runs a few rounds of a very small model in this process and writes nothing.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from client.models.base import load_base
from server.config.load import load
from server.config.schema import RunConfig
from server.run_folder.names import RESULTS_FILE
from simulations.benchmarks.harness.timing import write
from simulations.engines.hardware import resources
from simulations.engines.inprocess import run_inprocess
from simulations.engines.launcher import run_flower
from simulations.presets.load import preset_files

SMALL = {
    "rounds": 2,
    "clients": 12,
    "sampling-rate": 0.5,
    "privacy.delta": 1e-3,
    "model.name": "random:bert",
    "model.layers": 0,
    "public.warm-start-epochs": 0,
    "data.source": "notes",
    "data.test-source": "",
    "data.text-column": "text",
    "data.validation-records": 20,
    "data.test-records": 20,
    "data.records-per-client": 4,
}


def timed_run(config: RunConfig, folder: Path, *, flower: bool) -> dict[str, Any]:
    """What the table needs of one run."""
    load_before = os.getloadavg()[0]
    (run_flower if flower else run_inprocess)(config, folder)
    results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    model, _ = load_base(config.model.name, config.model.task, 2)
    return {
        "seconds": results["seconds"],
        "rounds": results["rounds_done"],
        "test_accuracy": results["test_accuracy"],
        "clients": config.clients,
        "expected_cohort": config.expected_cohort,
        "workers": resources(config).workers,
        "load_before": round(load_before, 2),
        "model": config.model.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "epsilon": config.privacy.epsilon,
        "seed": config.seed,
    }


def main(
    folder: Annotated[Path | None, typer.Argument(file_okay=False, help="Folder of SST-2's parquet files.")] = None,
    quick: Annotated[bool, typer.Option(help="a few rounds of a very small model: does it run at all?")] = False,
) -> None:
    """Run once and write the results."""
    if folder is None and not quick:
        raise typer.BadParameter("give the folder of SST-2's parquet files, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        overrides: dict[str, Any] = {**SMALL, "data.cache": f"{scratch}/cache"}
        if folder is not None:
            files = {"data.source": "train.parquet", "data.test-source": "validation.parquet"}
            overrides = {key: f"parquet:{folder.resolve() / name}" for key, name in files.items()}
        run = Path(scratch) / "run"
        run.mkdir()
        found = timed_run(load(preset_files()["sst2"], overrides), run, flower=folder is not None)
    console = Console(width=160)
    console.print(f"{found['rounds']} rounds in {found['seconds'] / 60:.1f} minutes", highlight=False)
    if folder is not None:
        console.print(f"written to {write('engine-full-run', found)}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
