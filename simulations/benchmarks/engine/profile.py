"""Where the time of a round goes.

Run: `python -m simulations.benchmarks engine.profile [--sst2 train.parquet] [--flame engine.svg]`.

Local training of a cohort on MiniLM under torch's profiler. Every operator's own time is booked to the part of the
engine it works for; what remains of the CPU time is Python, dispatch and the profiler itself. `--flame` draws the same
times as a flame graph.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.harness.timing import one_thread

PRODUCTS = ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm")
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (  # the first owner found from an operator upwards decides
    ("adapters", ("_AdaptedFunction",)),
    ("heads", ("_HeadFunction",)),
    ("attention", ("_ShortAttention", "scaled_dot_product", "ScaledDotProduct")),
    ("conversions to bfloat16 and back", ("_FrozenFunction",)),
    ("activation (GELU)", ("gelu", "Gelu")),
    ("layer norms", ("layer_norm", "LayerNorm")),
    ("embeddings", ("embedding", "Embedding")),
)
OTHER, REST = "residuals, masks, loss, optimizer", "Python, dispatch, profiler"


def lineage(event: FunctionEvent) -> list[str]:
    """Names from an operator up to the outermost one that called it."""
    names = [event.name]
    while (parent := event.cpu_parent) is not None:
        event = parent
        names.append(event.name)
    return names


def part_of(names: Sequence[str]) -> str:
    """The part of the engine that an operator works for."""
    in_frozen = any("_FrozenFunction" in name for name in names)
    in_adapted = any("_AdaptedFunction" in name for name in names)
    if names[0] in PRODUCTS and (in_frozen or (in_adapted and ("aten::linear" in names or names[0] == PRODUCTS[0]))):
        return "frozen products"
    for name in names:
        for part, marks in PARTS:
            if any(mark in name for mark in marks):
                return part
    return OTHER


def by_part(events: Iterable[FunctionEvent], total: float) -> list[dict[str, Any]]:
    """Seconds and share of every part, largest first; `total` is the time of everything."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        seconds[part_of(lineage(event))] += event.self_cpu_time_total / 1e6
    seconds[REST] = max(0.0, total - sum(seconds.values()))
    whole = sum(seconds.values())
    rows = [{"part": part, "seconds": value, "share": value / whole} for part, value in seconds.items()]
    return sorted(rows, key=lambda row: -float(row["seconds"]))


def stack(event: FunctionEvent) -> tuple[str, ...]:
    """An operator as a path from the part it works for, inwards; autograd's own frames are left out."""
    names = lineage(event)
    inner = [name for name in reversed(names) if not name.startswith("autograd::engine")]
    return part_of(names), *inner


def flame(events: Iterable[FunctionEvent], title: str, total: float) -> str:
    """A flame graph (callers below, callees above) of `total` seconds as one SVG."""
    times: dict[tuple[str, ...], float] = defaultdict(float)
    for event in events:
        path = stack(event)
        for depth in range(1, len(path) + 1):
            times[path[:depth]] += event.self_cpu_time_total / 1e6
    booked = sum(value for path, value in times.items() if len(path) == 1)
    times[REST,] = max(0.0, total - booked)
    total = max(total, booked)
    shown = {path: value for path, value in times.items() if value >= total / 1200}
    boxes: list[str] = []
    offset: dict[tuple[str, ...], float] = defaultdict(float)
    width, row = 1200, 20
    height = (max(map(len, shown)) + 2) * row
    for path in sorted(shown, key=lambda path: (len(path), -shown[path], path)):
        parent = path[:-1]
        left = offset[parent]
        offset[path] = left
        offset[parent] = left + times[path]
        x, w = width * left / total, width * times[path] / total
        y = height - len(path) * row
        text = f"{path[-1]} ({100 * times[path] / total:.1f} %)"
        label = text if 6.3 * len(text) < w - 6 else path[-1] if 6.3 * len(path[-1]) < w - 6 else ""
        hue = 20 + 37 * sum(map(ord, path[0])) % 320
        boxes.append(
            f'<g><title>{escape(text)}</title><rect x="{x:.1f}" y="{y}" width="{max(0.5, w - 0.7):.1f}" '
            f'height="{row - 1}" fill="hsl({hue},55%,{78 - 4 * (len(path) % 3)}%)"/>'
            + (f'<text x="{x + 4:.1f}" y="{y + 14}">{escape(label)}</text>' if label else "")
            + "</g>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11.5"><title>{escape(title)}</title>\n<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="4" y="15" font-weight="bold">{escape(title)}</text>\n' + "\n".join(boxes) + "\n</svg>\n"
    )


def main(
    sst2: jobs.Sst2 = None,
    clients: Annotated[int, typer.Option(help="clients in the round")] = 32,
    quick: jobs.Quick = False,
    flame_graph: Annotated[Path | None, typer.Option("--flame", help="where to draw the bfloat16 flame graph")] = None,
) -> None:
    """Profile both precisions and write the results."""
    one_thread()
    results = {}
    job = jobs.Job("MiniLM", jobs.minilm, jobs.SPEC, jobs.ragged_clients(2 if quick else clients, sst2), jobs.ADAMW)
    for precision in ("fp32", "bf16"):
        work = jobs.engine_training(job, job.engine(precision))
        work()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            began = time.perf_counter()
            work()
            total = time.perf_counter() - began  # the profiler counts wall time too
        events = list(profiler.events())
        results[precision] = by_part(events, total)
        say(*(f"{precision}  {row['part']:34} {100 * row['share']:5.1f} %" for row in results[precision]))
        if flame_graph is not None and precision == "bf16":
            title = "One round of local training, MiniLM, bfloat16: CPU time by part, then by operator"
            flame_graph.write_text(flame(events, title, total), encoding="utf-8")
    if not quick:
        write("engine-profile", {"clients": clients, "parts": results})


if __name__ == "__main__":
    typer.run(main)
