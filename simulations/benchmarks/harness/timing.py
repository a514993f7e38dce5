"""Timing variants of one job side by side, their peak memory, and statistics of methods on the same seeds.

Variants run in turn within one process, round after round, and what is reported is the median over rounds of the ratio
within a round: a machine that slows down slows all of them. CPU time, one thread, so that waiting for a busy core does
not count (a busy neighbour still costs cache and clock).

Methods compared on the same seeds share data, partition and initial adapter of a seed. Their difference on one seed is
free of what the seed itself does, so its mean is known far more sharply than the difference of two means. The interval
is Student's: mean +- t(0.975, n - 1) s / sqrt(n); with two or three seeds t is 12.7 or 4.3, and the interval as wide as
so few seeds deserve.
"""

import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats


def interleaved(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every variant in every round; each runs once before, uncounted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for work in variants.values():
        work()
    for _ in range(rounds):
        for name, work in variants.items():
            seconds[name].append(cpu_seconds(work))
    return seconds


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def both_clocks(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds and seconds on the wall of one call."""
    start = time.perf_counter()
    cpu = cpu_seconds(work)
    return cpu, time.perf_counter() - start


def over_rounds(ratios: Sequence[float], name: str = "ratio") -> dict[str, float]:
    """The median of ratios, and their range."""
    return {name: statistics.median(ratios), f"lowest_{name}": min(ratios), f"highest_{name}": max(ratios)}


def ratios(
    job: str, seconds: Mapping[str, Sequence[float]], reference: str, units: int, unit: str = "clients"
) -> list[dict[str, Any]]:
    """One row per variant: units per CPU second, and its speed over that of `reference` with the range over rounds."""
    rows = []
    for name, times in seconds.items():
        found = over_rounds([base / own for base, own in zip(seconds[reference], times, strict=True)])
        row = {
            "job": job,
            "variant": name,
            "reference": reference,
            **found,
            "seconds": (own := statistics.median(times)),
        }
        rows.append({**row, f"{unit}_per_second": units / own, "rounds": len(times)})
    return rows


def one_thread() -> None:
    """What every worker does: one thread, however many cores."""
    torch.set_num_threads(1)


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a fresh process, whose memory nothing else has touched."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, *arguments))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def _send(connection: Any, work: Callable[..., Any], *arguments: Any) -> None:
    connection.send(work(*arguments))


def growth(work: Callable[[], object]) -> int:
    """Peak bytes of this process during a call, above its size before."""
    gc.collect()
    forget_peak()
    before = peak_memory()
    work()
    return peak_memory() - before


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


def half_width(values: Sequence[float], level: float = 0.95) -> float | None:
    """Half the width of Student's confidence interval for the mean; None for a single value."""
    if len(values) < 2:
        return None
    t = float(stats.t.ppf((1 + level) / 2, len(values) - 1))
    return t * statistics.stdev(values) / math.sqrt(len(values))
