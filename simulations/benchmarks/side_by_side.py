"""Timing variants of one job side by side.

Variants run in turn within one process, round after round, and what is reported is the median over rounds of the ratio
within a round: a machine that slows down slows all of them. CPU time, one thread, so that waiting for a busy core does
not count (a busy neighbour still costs cache and clock).
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from server.environment import describe_environment

RESULTS = Path(__file__).resolve().parent / "results"


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
