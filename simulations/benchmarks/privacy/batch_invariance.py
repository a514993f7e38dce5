"""How far a unit moves what others contribute, because it is computed together with them.

Run: `python -m simulations.benchmarks privacy.batch_invariance [--device cuda]`. Tables: docs/results/engine.md. On a
GPU a model of SmolLM2's shape with random weights takes the place of MiniLM, so that no weights need to be there.

The accountant takes contributions of units as independent of each other. A product of another shape may sum in another
order, though, and round otherwise. Measured for every arithmetic of the engine, in one thread and in two, over draws of
64 beginnings of our notes (5 to 40 words) and one of 60 that is added: the change of everybody else's clipped sum in
units of the clip bound C, where every gradient is brought to length C; how often another record changes its bin of
DC-SGD's histogram of norms; and how far a record together with others is from what it is alone. 0 is what the
accountant takes it to be.
"""

from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from client.data.catalog import notes
from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import make_task
from privacy.randomness.rng import simulation_generator
from simulations.benchmarks.engine import gpu
from simulations.benchmarks.harness import markdown
from simulations.benchmarks.harness.markdown import Columns, Row
from simulations.benchmarks.harness.results import say, write
from strategies.controllers.released_norms import norm_edges

SOME = list(range(0, 64, 8))
"""Records that are computed alone too."""

PRECISIONS = ("fp32", "bf16", "bf16-model")
JOBS = {
    "minilm": ("classification", 3, LoraSpec(4, 8.0, ("query", "value"), heads=("classifier",))),
    "lacquer-small": ("causal-lm", 0, LoraSpec(8, 16.0, ("q_proj", "v_proj"))),
}
GPU_JOBS = {name: JOBS["lacquer-small"] for name in ("lacquer-small", gpu.SMALL.name)}


def main(
    draws: Annotated[int, typer.Option(min=1, help="sets of records")] = 10,
    records: Annotated[int, typer.Option(min=64, help="in a set, before one is added")] = 64,
    device: Annotated[str, typer.Option(help="cpu, or a CUDA device")] = "cpu",
) -> None:
    """Measure, print and write."""
    if device == "cpu":
        rows = [row for name in JOBS for threads in (1, 2) for row in measured(name, draws, records, threads, device)]
        name, found = "company", {}
    else:
        rows = [row for name in GPU_JOBS for row in measured(name, draws, records, 1, device)]
        name, found = "company-gpu", {"device": torch.cuda.get_device_name(torch.device(device))}
    say(*rows)
    write(name, {"benchmark": name, **found, "rows": rows})


def table(results: Row) -> str:
    """One line per model, arithmetic and number of threads."""
    columns: Columns = {
        "model": "{model}",
        "arithmetic": "{precision}",
        "threads": "{threads}",
        "clipped sum of the others, / C": "{sum_moved_most:.1g}",
        "a record, alone and not, / C": "{alone_moved_most:.1g}",
        "another bin": "{draws_with_other_bins} of {draws}",
    }
    return markdown.table(results["rows"], columns) + markdown.provenance(results)


def gpu_table(results: Row) -> str:
    """The same on a GPU."""
    return f"{table(results)}On one {results['device']}.\n"


def measured(name: str, draws: int, records: int, threads: int, device: str) -> list[dict[str, Any]]:
    """A row per arithmetic."""
    torch.set_num_threads(threads)
    task, classes, spec = (JOBS | GPU_JOBS)[name]
    texts, _, _ = notes.split(draws * (records + 1), 1, 1, 0)
    rows = []
    for precision in PRECISIONS:
        model, tokenizer = load_base(name if name in JOBS else "lacquer-small", task, classes or None)
        if name not in JOBS:
            model = gpu.model(gpu.SMALL, torch.device(device), torch.float32)
        vector = initial_adapter(adapter_layout(model, spec), model, 0)
        vector = vector + 0.02 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1))
        engine = CohortEngine(model, spec, make_task(task, classes), precision=precision, device=device)
        found = []
        for draw in range(draws):
            some = texts[draw * (records + 1) : (draw + 1) * (records + 1)]
            words = simulation_generator(draw, "company").integers(5, 41, len(some))
            words[-1] = 60
            cut = [" ".join(note.text.split()[:count]) for note, count in zip(some, words, strict=True)]
            tokens = tokenizer(cut, truncation=True, max_length=96)["input_ids"]
            labels = np.arange(len(some)) % classes if classes else None
            before = gradients(engine, vector, tokens[:-1], None if labels is None else labels[:-1])
            after = gradients(engine, vector, tokens, labels)[:-1]
            alone = [
                gradients(engine, vector, tokens[i : i + 1], labels if labels is None else labels[i : i + 1])
                for i in SOME
            ]
            found.append((*compared(before, after), compared(torch.cat(alone), before[SOME])[2]))
        moved, bins, _, single = (np.array(column) for column in zip(*found, strict=True))
        rows.append(
            {
                "model": name,
                "precision": precision,
                "threads": threads,
                "draws": draws,
                "records": records,
                "sum_moved_most": float(moved.max()),
                "sum_moved_median": float(np.median(moved)),
                "alone_moved_most": float(single.max()),
                "draws_with_other_bins": int((bins > 0).sum()),
            }
        )
    return rows


def gradients(engine: CohortEngine, vector: Tensor, tokens: list[list[int]], labels: np.ndarray | None) -> Tensor:
    """Float64 ``[records, dim]``."""
    found = torch.zeros(len(tokens), engine.layout.dim, dtype=torch.float64)
    for chunk in engine.per_record_gradients(vector, Records.from_lists(tokens, labels)):
        found[torch.from_numpy(chunk.records)] = chunk.rows.double().cpu()
    return found


def compared(before: Tensor, after: Tensor) -> tuple[float, int, float]:
    """Of the same records: change of the clipped sum, records in another bin, largest change of one clipped row."""
    edges = torch.tensor(norm_edges(1 / 256, 64.0), dtype=torch.float64)
    norms = before.norm(dim=1), after.norm(dim=1)
    bins = [torch.bucketize(norm, edges) for norm in norms]
    clipped = [rows / norm[:, None] for rows, norm in zip((before, after), norms, strict=True)]
    moved = clipped[1] - clipped[0]
    return float(moved.sum(0).norm()), int((bins[0] != bins[1]).sum()), float(moved.norm(dim=1).max())


if __name__ == "__main__":
    typer.run(main)
