"""Timing variants of one job side by side, and their peak memory.

Variants run in turn within one process, round after round, and what is reported is the median over rounds of the ratio
within a round: a machine that slows down slows all of them. CPU time, one thread, so that waiting for a busy core does
not count (a busy neighbour still costs cache and clock).
"""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


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
