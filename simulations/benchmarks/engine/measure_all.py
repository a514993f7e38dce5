"""Every number of docs/results/engine.md by one command, at one commit and on a quiet machine.

Run: `python -m simulations.benchmarks engine.measure_all FOLDER [--only NAME ...] [--busy]`, about an hour on two
cores. FOLDER holds SST-2's parquet files. It starts the benchmarks one after the other, each in a process of its own,
makes the environment for pfl-research itself, and writes the tables at the end. It refuses a checkout with changed
code, because its results would name a commit that is not what was measured, and a machine on which others work; with
`--busy` it goes on, and every result tells the load.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Annotated

import typer

from server.run_folder.provenance import commit_of
from simulations.benchmarks.harness.results import ROOT, say

BUSY = 0.15
"""Cores that others may take."""
PFL_NEEDS = ("torch", "transformers", "peft", "jaxtyping", "httpx")


def steps(sst2: Path, flame: Path) -> dict[str, list[str]]:
    """The benchmarks in their order, and their options."""
    train = ["--sst2", str(sst2 / "train.parquet")]
    return {
        "engine.guard": ["--write"],
        "engine.speed": train,
        "engine.record_level": train,
        "engine.against_pfl": train,
        "engine.against_flower": train,
        "engine.population": [],
        "scale.start_up": [],
        "scale.populations": train[1:],
        "engine.memory": [],
        "faults.message_overhead": [],
        "privacy.batch_invariance": [],
        "engine.profile": [*train, "--clients", "48", "--flame", str(flame)],
    }


def others_take(seconds: float = 3.0) -> float:
    """Cores that are at work while this process sleeps. Linux only."""

    def at_work() -> int:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _waiting, interrupt, soft = map(int, fields[:7])
        return user + nice + system + interrupt + soft

    before, begun = at_work(), time.monotonic()
    time.sleep(seconds)
    return (at_work() - before) / 100 / (time.monotonic() - begun)


def pfl_environment(folder: Path) -> Path:
    """The interpreter of a new environment with pfl-research and the versions of this one."""
    venv.create(folder, with_pip=True)
    pins = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in PFL_NEEDS]
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "pfl[pytorch]==0.6.0", *pins], check=True)
    return python


def main(
    sst2: Annotated[Path, typer.Argument(help="folder of SST-2's parquet files", exists=True, file_okay=False)],
    only: Annotated[list[str] | None, typer.Option(help="these benchmarks; all by default")] = None,
    busy: Annotated[bool, typer.Option(help="measure on a machine on which others work")] = False,
) -> None:
    """Measure, and write results and tables."""
    wanted = steps(sst2.resolve(), ROOT / "docs" / "engine-flame.svg")
    if unknown := sorted(set(only or ()) - wanted.keys()):
        raise typer.BadParameter(f"{', '.join(unknown)}; there are {', '.join(wanted)}")
    commit = commit_of(ROOT)
    if commit is None or commit.endswith("+"):
        say(f"The checkout is at {commit}: commit its changes first, so that the results name what was measured.")
        raise typer.Exit(2)
    for name in only or wanted:
        if (cores := others_take()) > BUSY and not busy:
            say(f"Before {name}: others take {cores:.1f} cores. End them, or give --busy; what is written stays.")
            raise typer.Exit(2)
        say(f"{name}: others take {cores:.2f} cores")
        with tempfile.TemporaryDirectory() as folder:
            first = [str(pfl_environment(Path(folder)))] if name == "engine.against_pfl" else []
            command = [sys.executable, "-m", "simulations.benchmarks", name, *first, *wanted[name]]
            subprocess.run(command, check=True, cwd=ROOT)
    subprocess.run([sys.executable, "-m", "simulations.benchmarks", "harness.tables"], check=True, cwd=ROOT)


if __name__ == "__main__":
    typer.run(main)
