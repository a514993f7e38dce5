"""Preset ``sst2`` over seeds: the table of README.md.

Run: `python -m simulations.benchmarks papers.sst2 FOLDER`.

FOLDER holds SST-2 as ``train.parquet`` and ``validation.parquet`` (columns ``sentence``, ``label``). The official
validation file serves as the test set: it is read once, at the end of each run; everything was chosen on the public
records that the preset carves out of the training file. A seed whose run folder holds results is not run again.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from server.config.load import load
from server.run_folder.names import CONFIG_FILE, ENVIRONMENT_FILE, PRIVACY_FILE, RESULTS_FILE
from simulations.benchmarks.harness.markdown import Columns, Row, grouped, mean_text, provenance_of_rows, table
from simulations.benchmarks.harness.results import RESULTS
from simulations.engines.inprocess import run_inprocess
from simulations.engines.launcher import run_flower
from simulations.presets.load import preset_files
from simulations.report.notation import duration_text, number_text

FILE = RESULTS / "sst2.json"


def main(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of SST-2's parquet files.")],
    output: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs/sst2"),
    seeds: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1,2",
    epsilon: Annotated[float, typer.Option(help="Target.")] = 4.0,
    engine: Annotated[str, typer.Option(help="flower or inprocess.")] = "flower",
    note: Annotated[str, typer.Option(help="What else a reader of the times must know.")] = "",
) -> None:
    """Run what is missing, then write simulations/benchmarks/results/sst2.json from the run folders."""
    rows = []
    for seed in map(int, seeds.split(",")):
        run_folder = (output / f"epsilon{epsilon:g}-seed{seed}").resolve()
        if not (run_folder / RESULTS_FILE).is_file():
            run_folder.mkdir(parents=True)
            overrides: dict[str, Any] = {
                "data.source": f"parquet:{folder.resolve() / 'train.parquet'}",
                "data.test-source": f"parquet:{folder.resolve() / 'validation.parquet'}",
                "privacy.epsilon": epsilon,
                "seed": seed,
                "engine.kind": engine,
            }
            config = load(preset_files()["sst2"], overrides)
            if engine == "flower":
                run_flower(config, run_folder)
            else:
                run_inprocess(config, run_folder)
        rows.append({**row(run_folder), "note": note})
    done = {(new["epsilon"], new["seed"]) for new in rows}
    kept = [old for old in _previous() if (old["epsilon"], old["seed"]) not in done]
    FILE.write_text(json.dumps(sorted(kept + rows, key=lambda r: (r["epsilon"], r["seed"])), indent=2) + "\n")


def row(run_folder: Path) -> dict[str, Any]:
    """What the documentation needs of one finished run."""
    results = json.loads((run_folder / RESULTS_FILE).read_text())
    environment = json.loads((run_folder / ENVIRONMENT_FILE).read_text())
    statement = json.loads((run_folder / PRIVACY_FILE).read_text())
    config = load(run_folder / CONFIG_FILE)
    measured = ("test_accuracy", "test_loss", "test_records", "validation_accuracy", "validation_loss", "seconds")
    return {
        "seed": config.seed,
        "epsilon": config.privacy.epsilon,
        "epsilon_stated": statement["epsilon"],
        "delta": config.privacy.delta,
        "rounds": results["rounds_done"],
        "controller": config.strategy.controller,
        **{name: results[name] for name in (*measured, "dimension")},
        "workers": config.engine.workers,
        "engine": config.engine.kind,
        "commit": environment["commit"],
        "machine": f"{environment['cores']} cores, {environment['system']}",
        "packages": environment["packages"],
    }


def _previous() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text()) if FILE.is_file() else []


def accuracies(results: Sequence[Row]) -> str:
    """One line per privacy level, mean and standard deviation over seeds."""
    settings = ("epsilon", "rounds", "dimension")
    groups = grouped(results, lambda row: tuple(row[name] for name in settings))
    columns: Columns = {
        "ε": lambda row: number_text(row["epsilon"]),
        "test accuracy": lambda row: mean_text([100 * run["test_accuracy"] for run in row["runs"]], unit=" %"),
        "validation accuracy": lambda row: mean_text(
            [100 * run["validation_accuracy"] for run in row["runs"]], unit=" %"
        ),
        "rounds": lambda row: number_text(row["rounds"]),
        "values trained": lambda row: number_text(row["dimension"]),
        "time": lambda row: duration_text(statistics.mean(run["seconds"] for run in row["runs"])),
        "seeds": lambda row: str(len(row["runs"])),
    }
    rows = [{**groups[key][0], "runs": groups[key]} for key in sorted(groups)]
    return table(rows, columns, "r") + provenance_of_rows(results)


if __name__ == "__main__":
    typer.run(main)
