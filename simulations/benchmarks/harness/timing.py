"""Timing variants of one job side by side.

Variants run in turn within one process, round after round, and what is reported is the median over rounds of the ratio
within a round: a machine that slows down slows all of them. CPU time, one thread, so that waiting for a busy core does
not count (a busy neighbour still costs cache and clock).

Statistics of methods compared on the same seeds: data, partition and initial adapter of a seed are shared by all.

The difference of two methods on one seed is free of what the seed itself does, so its mean is told far more sharply
than the difference of two means. The interval is Student's: mean +- t(0.975, n - 1) s / sqrt(n); with two or three
seeds t is 12.7 or 4.3, and the interval as wide as so few seeds deserve.
"""

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from scipy import stats

from server.run_folder.provenance import describe_environment

RESULTS = Path(__file__).resolve().parents[1] / "results"


def interleaved(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every variant in every round; each runs once before, uncounted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for work in variants.values():
        work()
    for _ in range(rounds):
        for name, work in variants.items():
            start = time.process_time()
            work()
            seconds[name].append(time.process_time() - start)
    return seconds


def lines(
    job: str, seconds: Mapping[str, Sequence[float]], reference: str, units: int, unit: str = "clients"
) -> list[dict[str, Any]]:
    """One row per variant: units per CPU second, and its speed over that of `reference` with the range over rounds."""
    rows = []
    for name, times in seconds.items():
        ratios = [base / own for base, own in zip(seconds[reference], times, strict=True)]
        rows.append(
            {
                "job": job,
                "variant": name,
                "reference": reference,
                "ratio": statistics.median(ratios),
                "lowest_ratio": min(ratios),
                "highest_ratio": max(ratios),
                "seconds": statistics.median(times),
                f"{unit}_per_second": units / statistics.median(times),
                "rounds": len(times),
            }
        )
    return rows


def one_thread() -> None:
    """What every worker does: one thread, however many cores."""
    torch.set_num_threads(1)


def peak_memory() -> int:
    """Highest resident size of this process since `forget_peak`, in bytes. Linux only.

    Not `getrusage`: a started process inherits its parent's peak there.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let `peak_memory` start again at the present size."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def processor() -> str:
    """Name of the processor, as the system tells it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(name: str, results: Mapping[str, Any]) -> Path:
    """Write `results/NAME.json` with the environment beside the numbers."""
    path = RESULTS / f"{name}.json"
    environment = {
        **describe_environment(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],  # ours included; over 1, 5 and 15 minutes, at the end
    }
    path.write_text(json.dumps({"environment": environment, **results}, indent=1) + "\n", encoding="utf-8")
    return path


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows on the terminal."""
    for row in rows:
        rate = next((f"{row[key]:9.1f} {key.replace('_per_second', '')}/s" for key in row if "per_second" in key), "")
        console.print(
            f"{row['job']:34} {row['variant']:30} {row['ratio']:6.2f} x "
            f"({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f}) of {row['reference']:20} {rate}",
            highlight=False,
        )


@dataclass(frozen=True)
class Paired:
    """A mean difference over seeds; `half_width` of its 95 % confidence interval, None with a single seed."""

    mean: float
    half_width: float | None
    seeds: tuple[int, ...]


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Paired | None:
    """`values` less `reference`, seed by seed, over the seeds both have; None where there is none."""
    seeds = tuple(sorted(values.keys() & reference.keys()))
    if not seeds:
        return None
    differences = [values[seed] - reference[seed] for seed in seeds]
    return Paired(statistics.mean(differences), half_width(differences), seeds)


def half_width(values: list[float], level: float = 0.95) -> float | None:
    """Half the width of Student's confidence interval for the mean; None for a single value."""
    if len(values) < 2:
        return None
    t = float(stats.t.ppf((1 + level) / 2, len(values) - 1))
    return t * statistics.stdev(values) / math.sqrt(len(values))
