"""Whole rounds on Flower and Ray.

Run: `python -m simulations.benchmarks.engine.against_flower [--sst2 train.parquet] [--quick]`.

Lacquer (one message per worker, the cohort engine) beside the usual way (one message per client, PEFT in the ClientApp,
plain FedAvg without privacy). Both run on one Flower, one Ray, the same actors, the same clients, and take turns round
by round: see `flower_server.py` and `flower_client.py`.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from server.config.load import parse
from server.config.schema import RunConfig
from simulations.benchmarks.engine.flower_server import KEPT, LACQUER, MEASURED_FILE, REBUILT
from simulations.benchmarks.harness.timing import one_thread, write
from simulations.engines.launcher import run_flower
from simulations.engines.staging import App

APP = App("simulations.benchmarks.engine.flower_server", "simulations.benchmarks.engine.flower_client")
RECORDS = 30


def configuration(folder: Path, clients: int, cycles: int, model: str, sst2: Path | None, workers: int) -> RunConfig:
    """All clients take part in every round; 30 records each; LoRA of rank 8 on every layer, AdamW."""
    data: dict[str, Any] = {"partition": "iid", "validation-records": 100, "test-records": 100}
    if sst2 is None:
        data |= {"source": "notes", "records-per-client": RECORDS}
    else:
        data |= {"source": f"parquet:{subset(folder, sst2, clients * RECORDS + 200)}", "text-column": "sentence"}
    return parse(
        {
            "rounds": cycles,
            "clients": clients,
            "sampling-rate": 1.0,
            "privacy": {"delta": 1e-5},
            "strategy": {"controller": "fixed"},
            "model": {"name": model, "rank": 8, "alpha": 16.0, "max-length": 64},
            "data": {**data, "cache": str(folder / "cache")},
            "local": {"optimizer": "adamw", "learning-rate": 1e-3, "batch-size": 10},
            "engine": {"workers": workers},
            "simulation": {"clients-per-node": 1},
        }
    )


def subset(folder: Path, sst2: Path, records: int) -> Path:
    """So many records, evenly spaced, as a file of their own."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(sst2, columns=["sentence", "label"])
    path = folder / "subset.parquet"
    parquet.write_table(table.take([i * (len(table) // records) for i in range(records)]), path)
    return path


def measure(
    clients: int, cycles: int, model: str, sst2: Path | None, workers: int = 2
) -> dict[str, list[dict[str, float]]]:
    """Rounds of every variant; the first cycle warms everything up and is left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        run_flower(configuration(Path(folder), clients, cycles, model, sst2, workers), run, app=APP)
        measured: dict[str, list[dict[str, float]]] = json.loads((run / MEASURED_FILE).read_text(encoding="utf-8"))
    return {name: rounds[1:] for name, rounds in measured.items()}


def rows(measured: dict[str, list[dict[str, float]]], clients: int) -> list[dict[str, Any]]:
    """Lacquer's speed over that of each usual way, within each cycle."""
    found = []
    for other in (KEPT, REBUILT):
        row: dict[str, Any] = {
            "variant": LACQUER,
            "reference": other,
            "clients": clients,
            "rounds": len(measured[other]),
        }
        for clock in ("wall", "cpu"):
            pairs = list(zip(measured[other], measured[LACQUER], strict=True))
            ratios = [theirs[clock] / ours[clock] for theirs, ours in pairs]
            row |= {
                f"{clock}_ratio": statistics.median(ratios),
                f"lowest_{clock}_ratio": min(ratios),
                f"highest_{clock}_ratio": max(ratios),
                f"{clock}_seconds": statistics.median(ours[clock] for _, ours in pairs),
                f"reference_{clock}_seconds": statistics.median(theirs[clock] for theirs, _ in pairs),
            }
        row |= {"messages": measured[LACQUER][0]["messages"], "reference_messages": measured[other][0]["messages"]}
        found.append(row)
    return found


def main(
    sst2: Annotated[Path | None, typer.Option(help="train.parquet of SST-2; generated notes without it")] = None,
    clients: Annotated[int, typer.Option(help="clients in every round")] = 100,
    cycles: Annotated[int, typer.Option(help="rounds of every variant, the first not counted")] = 4,
    quick: Annotated[bool, typer.Option(help="a tiny model, few clients: does it run at all?")] = False,
) -> None:
    """Measure and write the results."""
    one_thread()
    measured = measure(6, 2, "random:bert", None) if quick else measure(clients, cycles, "minilm", sst2)
    found = rows(measured, 6 if quick else clients)
    console = Console(width=160)
    for row in found:
        console.print(
            f"{row['variant']} is {row['wall_ratio']:.1f} times as fast as {row['reference']} (CPU "
            f"{row['cpu_ratio']:.1f}): {row['wall_seconds']:.1f} s beside "
            f"{row['reference_wall_seconds']:.1f} s a round, {row['messages']:.0f} messages beside "
            f"{row['reference_messages']:.0f}",
            highlight=False,
        )
    if not quick:
        data = "SST-2" if sst2 is not None else "generated notes"
        path = write("engine-flower", {"data": data, "seeds": [0], "workers": 2, "rows": found, "measured": measured})
        console.print(f"written to {path}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
