"""How long `lacquer run quickstart` takes until clients are asked for the first time, and on what.

Run: `python -m simulations.benchmarks scale.start_up [--runs 5]`, three minutes.

The first run prepares data and calibrates, as a new user's does; the others find both in their caches. A run writes its
files in a fixed order, which tells its steps apart: its folder, when the command has imported and checked everything;
``run.lock``, when the ServerApp runs; ``sampling.key``, when that has opened data and base model; the first line of
``metrics.jsonl``, when the public start is trained and evaluated, and clients are asked. The goal is for all that is no
training. A file is seen within a hundredth of a second. Wall time: nothing else may run on the machine.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from server.run_folder.names import LOCK_FILE, METRICS_FILE, RESULTS_FILE, SAMPLING_SECRET
from simulations.benchmarks.harness.markdown import table as rows_of
from simulations.benchmarks.harness.results import say, write

GOAL = 12.0
HELP_GOAL = 0.5


TRAINED = "the public start, trained and evaluated"
STEPS: dict[str, Callable[[Path], bool]] = {
    "the command: imports, data, noise": lambda folder: True,
    "Flower, Ray and the ServerApp": lambda folder: (folder / LOCK_FILE).is_file(),
    "data and base model in the ServerApp": lambda folder: (folder / SAMPLING_SECRET).is_file(),
    TRAINED: lambda folder: (folder / METRICS_FILE).is_file(),
}
"""What is over when the folder looks like this."""


def started(scratch: Path, name: str) -> dict[str, float]:
    """Seconds of every step of one run, and of all of them."""
    output = scratch / name
    command = [sys.executable, "-m", "simulations", "run", "quickstart", "--set=rounds=1"]
    command += [f"--set=output={output}", f"--set=data.cache={scratch / 'cache'}"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(scratch / "xdg")}
    begun, seconds, passed = time.perf_counter(), dict[str, float](), 0.0
    with (scratch / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        for step, is_over in STEPS.items():
            while not any(map(is_over, output.glob("*"))):
                if process.poll() is not None:
                    raise RuntimeError(f"the run ended before {step!r}: {(scratch / f'{name}.log').read_text()}")
                time.sleep(0.01)
            now = time.perf_counter() - begun
            seconds[step], passed = now - passed, now
        if process.wait() or not any((folder / RESULTS_FILE).is_file() for folder in output.glob("*")):
            raise RuntimeError(f"the run failed: {(scratch / f'{name}.log').read_text()}")
    return {**seconds, "to the first round": passed, "to the first round, without training": passed - seconds[TRAINED]}


def help_seconds() -> float:
    """Seconds of `lacquer --help`."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "simulations", "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


def table(results: Mapping[str, Any]) -> str:
    """One row a step: the first run, and the median of the later ones with their range."""
    first, *later = results["runs"]
    rows = [
        {
            "step": step,
            "first": first[step],
            "median": statistics.median(values := [run[step] for run in later]),
            "lowest": min(values),
            "highest": max(values),
        }
        for step in first
    ]
    columns = {
        "": "{step}",
        "first run": "{first:.1f} s",
        "later runs": "{median:.1f} s ({lowest:.1f}-{highest:.1f})",
    }
    found, wanted = statistics.median(results["help"]), results["goals"]
    environment = results["environment"]
    return (
        f"{rows_of(rows, columns)}\n`lacquer --help`: {found:.2f} s. Goals: {wanted['start']:g} s to the first round, "
        f"{wanted['help']:g} s for the help. {environment['processor']}, {environment['cores']} cores; load before "
        f"{results['load_before']:.1f}; commit `{environment['commit']}`.\n"
    )


def main(runs: Annotated[int, typer.Option(min=2, help="runs; the first has empty caches")] = 5) -> None:
    """Measure and write the results."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        found = [started(Path(scratch), f"run-{number}") for number in range(runs)]
    helped = [help_seconds() for _ in range(runs)]
    say(*found, helped)
    goals = {"start": GOAL, "help": HELP_GOAL}
    write("scale-start-up", {"load_before": before, "goals": goals, "runs": found, "help": helped})


if __name__ == "__main__":
    typer.run(main)
