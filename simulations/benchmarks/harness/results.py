"""The committed result files, and what a benchmark says on the terminal."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from server.run_folder.provenance import describe_environment, processor

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "simulations" / "benchmarks" / "results"


def write(name: str, results: Mapping[str, Any]) -> None:
    """Write `results/NAME.json`, the environment beside the numbers."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n", encoding="utf-8")
    say(f"written to {path}")


def write_ratios(name: str, results: Mapping[str, Any], rows: str) -> None:
    """As :func:`write`; ratios that the file had from another processor are kept beside, under its name."""
    path, here = RESULTS / f"{name}.json", processor()
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    write(name, {**results, "elsewhere": elsewhere(before, rows, here)})


def elsewhere(before: Mapping[str, Any] | None, rows: str, here: str) -> dict[str, Any]:
    """Ratios and commit by processor, of all but this one, that a results file has."""
    if before is None:
        return {}
    last, named = before["environment"], ("job", "variant", "reference", "ratio")
    ratios = [{key: row[key] for key in named if key in row} for row in before[rows]]
    found = {**before.get("elsewhere", {}), last["processor"]: {"commit": last["commit"], "ratios": ratios}}
    return {name: kept for name, kept in found.items() if name != here}


def environment() -> dict[str, Any]:
    """What a run knows of its machine, and the processor, threads and load at the end of a measurement."""
    return {
        **describe_environment(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],  # ours included; over 1, 5 and 15 minutes
    }


def origin() -> dict[str, Any]:
    """Machine and commit, for results whose rows come from several machines."""
    found = describe_environment()
    parts = [found["system"], f"{found['cores']} cores", *found["accelerators"]]
    return {"machine": ", ".join(parts), "commit": found["commit"]}


def say(*texts: object) -> None:
    """One line each, as they are."""
    for text in texts:
        Console(width=160).print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def say_ratios(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows of :func:`simulations.benchmarks.harness.timing.ratios`."""
    for row in rows:
        rate = next((f"{row[key]:9.1f} {key.replace('_per_second', '')}/s" for key in row if "per_second" in key), "")
        say(
            f"{row['job']:34} {row['variant']:30} {row['ratio']:6.2f} x "
            f"({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f}) of {row['reference']:20} {rate}"
        )
