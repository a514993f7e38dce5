"""What the mechanism costs per round.

Run: `python -m simulations.benchmarks privacy.noise_throughput`. Half a minute.

Noise of both private kinds, normals per second, and `contribute`, bytes of float32 rows per second, for adapters of
75 thousand and 1.1 million parameters. One thread; CPU time, best of several, so that a busy machine does not show.
The non-private generator of numpy stands beside them for comparison.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import typer

from privacy.clipping.clip_map import ClipMap
from privacy.clipping.norms import AutomaticClip, FlatClip, PerAdapterClip, PsacClip
from privacy.clipping.units import Units
from privacy.contribution import Plan, contribute
from privacy.queries import NormBit
from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise
from privacy.randomness.rng import simulation_generator, torch_generator
from simulations.benchmarks.harness import markdown
from simulations.benchmarks.harness.markdown import Columns, Row
from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.harness.timing import cpu_seconds

# Rank-8 adapters on query and value: of TinyLlama 1.1B, and of a 22-million-parameter encoder (MiniLM). The large one
# comes first, so that the allocator keeps its memory, as it does in a worker that has trained a model.
DIMENSIONS = (1_126_400, 75_000)
ROWS = 16
NOISE_MULTIPLIER = 1.7618  # epsilon 4 at 100 of 1000 clients, 200 rounds


def least_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Least CPU time of one call; the first one, which warms caches, does not count."""
    work()
    return min(cpu_seconds(work) for _ in range(repeats))


def noise_lines(dim: int) -> list[dict[str, Any]]:
    """One line per kind of noise."""
    blocks = [(NOISE_MULTIPLIER, dim)]
    seeded = simulation_generator(0, "benchmark")
    kinds: dict[str, Callable[[], object]] = {
        "gaussian": lambda: GaussianNoise().draw(blocks),
        "discrete gaussian (exact)": lambda: DiscreteGaussianNoise().draw(blocks),
        "numpy PCG64, not private": lambda: np.rint(seeded.standard_normal(dim) * 2.0**40).astype(np.int64),
    }
    lines = []
    for kind, work in kinds.items():
        seconds = least_seconds(work)
        lines.append({"noise": kind, "dim": dim, "seconds": seconds, "normals_per_second": dim / seconds})
    return lines


def contribution_lines(dim: int) -> list[dict[str, Any]]:
    """One line per clip map, and one with a norm bit beside the flat one."""
    rows = torch.randn(ROWS, dim, generator=torch_generator(0, "benchmark"))
    blocks = 24
    sizes = (dim // blocks,) * (blocks - 1) + (dim - dim // blocks * (blocks - 1),)
    clips: dict[str, tuple[ClipMap, tuple[NormBit, ...]]] = {
        "flat": (FlatClip(1.0, dim), ()),
        "flat, norm bit": (FlatClip(1.0, dim), (NormBit(1.0, 5.0),)),
        "per-adapter, 24 blocks": (PerAdapterClip((1.0,) * blocks, sizes), ()),
        "automatic": (AutomaticClip(1.0, dim), ()),
        "psac": (PsacClip(1.0, dim), ()),
    }
    lines = []
    for name, (clip, queries) in clips.items():
        plan = Plan(clip, NOISE_MULTIPLIER, queries)
        seconds = least_seconds(lambda plan=plan: contribute(Units(rows), plan), repeats=3)  # type: ignore[misc]
        lines.append(
            {
                "clip": name,
                "dim": dim,
                "seconds_per_unit": seconds / ROWS,
                "gigabytes_per_second": rows.numel() * 4 / seconds / 1e9,
            }
        )
    return lines


def main() -> None:
    """Measure and write the results."""
    torch.set_num_threads(1)
    noise = [line for dim in DIMENSIONS for line in noise_lines(dim)]
    contributions = [line for dim in DIMENSIONS for line in contribution_lines(dim)]
    for line in noise:
        say(
            f"{line['noise']:28} {line['dim']:>9,}  {line['normals_per_second'] / 1e6:6.1f} million normals/s"
            f"  {1000 * line['seconds']:7.1f} ms per release"
        )
    for line in contributions:
        say(
            f"{line['clip']:28} {line['dim']:>9,}  {line['gigabytes_per_second']:6.2f} GB/s"
            f"  {1000 * line['seconds_per_unit']:7.2f} ms per unit"
        )
    write("noise_throughput", {"noise": noise, "contribute": contributions})


def table(results: Row) -> str:
    """What one release costs by kind of noise, on one core."""
    columns: Columns = {
        "noise": "{noise}",
        "coordinates": "{dim:,}",
        "one release": lambda row: f"{1000 * row['seconds']:.1f} ms",
        "draws per second": lambda row: f"{row['normals_per_second'] / 1e6:.1f} million",
    }
    return markdown.table(results["noise"], columns) + markdown.provenance(results)


if __name__ == "__main__":
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
