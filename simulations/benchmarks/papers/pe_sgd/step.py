"""What one noisy step is worth, before any learning rate is chosen: the first tables of docs/results/pe-sgd.md.

Run: `python -m simulations.benchmarks papers.pe_sgd.step SETTINGS --data FOLDER`.

At the common start of ``training.py`` each method releases once, with the noise of a whole run of its settings. Two
things are told: the cosine of that step with the direction in which the mean loss of all private texts falls fastest,
and how far the test loss falls when the step is taken at several lengths (L2 norm in the adapter's values). A method
whose step points the right way need not be the one that may go far along it: noise inside the span of texts' gradients
lies where the loss is curved, noise spread over all values does not.

Of PE-SGD and FixSample the first step is the same. The mean gradient is looked at for this measurement only and moves
no model. The rows go to ``results/pesgd-step.json``; what is there is not measured again.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from simulations.benchmarks.harness.markdown import (
    NOT_MEASURED,
    Row,
    grouped,
    markdown,
    mean_text,
    provenance_of_rows,
)
from simulations.benchmarks.harness.results import RESULTS, origin, say
from simulations.benchmarks.papers.pe_sgd.tables import difference_texts
from simulations.benchmarks.papers.pe_sgd.training import Bench, Seed, read_settings, seed_of
from simulations.history.paired import Estimate

LENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
SHOWN = 0.1
"""The length that the table shows beside the best."""

VALUES = 28_672
"""What rank 8 trains of the small model."""

FIRST_STEP = ("PE-SGD", "PDP-SGD", "GEP", "DP-SGD")
NAMES = {"PE-SGD": "PE-SGD, FixSample"}


def falling(seed: Seed) -> Tensor:
    """Minus the mean gradient of all private texts at the start, float64 ``[d]``; private."""
    engine = seed.bench.engine
    engine.train_factors("both")
    total = torch.zeros(engine.layout.dim, dtype=torch.float64)
    for chunk in engine.per_record_gradients(seed.start, seed.private):
        total += chunk.rows.cpu().double().sum(dim=0)
    return -total / len(seed.private)


def step_of(seed: Seed, method: str) -> Tensor:
    """The change of the trained values by one release, float64 ``[d]``."""
    layout = seed.bench.engine.layout
    with seed.training(method, seed.site(method, "fedavg", {"learning-rate": 1.0})) as training:
        training.step()
        return (layout.trainable_values(training.state.adapter) - layout.trainable_values(seed.start)).double()


def measured(seed: Seed, towards: Tensor, method: str, draws: int, lengths: Sequence[float]) -> dict[str, Any]:
    """Means over so many draws of batch and noise; `towards` is of :func:`falling`."""
    engine = seed.bench.engine
    start = engine.layout.trainable_values(seed.start)
    cosines, falls, gains = [], [], []
    for _ in range(draws):
        step = step_of(seed, method)
        cosines.append(float(step @ towards / (step.norm() * towards.norm())))
        unit = (step / step.norm()).to(start.dtype)
        found = [
            engine.evaluate(engine.layout.with_trainable(seed.start, start + length * unit), seed.test)
            for length in lengths
        ]
        falls.append([seed.start_loss - metrics.loss for metrics in found])
        gains.append([metrics.accuracy - seed.start_accuracy for metrics in found])
    return {
        "cosine": round(statistics.mean(cosines), 5),
        "lengths": list(lengths),
        "falls": [round(statistics.mean(column), 5) for column in zip(*falls, strict=True)],
        "accuracy_gains": [round(statistics.mean(column), 5) for column in zip(*gains, strict=True)],
        "draws": draws,
        "start_loss": round(seed.start_loss, 5),
        "start_accuracy": round(seed.start_accuracy, 5),
    }


def main(
    settings_file: Path,
    data: Annotated[Path, typer.Option(help="folder with test.parquet and, where there is one, validation.parquet")],
    seeds: Annotated[str, typer.Option(help="seeds, with commas")] = "0,1,2",
    draws: Annotated[int, typer.Option(min=1, help="releases of each method")] = 2,
    model: Annotated[str, typer.Option(help="folder of the settings' model, where it is not installed")] = "",
    epsilon: Annotated[float, typer.Option(help="instead of the settings'")] = 0.0,
    rank: Annotated[int, typer.Option(help="instead of the settings'; alpha changes in proportion")] = 0,
    out: Annotated[Path, typer.Option(help="result file")] = RESULTS / "pesgd-step.json",
) -> None:
    """Measure what is missing and write after each row."""
    torch.set_num_threads(1)
    settings, corpus = read_settings(settings_file), data.name.removeprefix("pesgd_")
    if epsilon:
        settings = settings.model_copy(update={"epsilon": epsilon})
    if rank:
        settings = settings.model_copy(update={"rank": rank, "alpha": settings.alpha * rank / settings.rank})
    bench = Bench(settings, model or settings.model)
    document: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    keys = ("settings", "corpus", "seed", "method", "epsilon", "values")
    for number in map(int, seeds.split(",")):
        varied = (settings.epsilon, bench.engine.layout.dim)
        cells = [(settings_file.stem, corpus, number, method, *varied) for method in FIRST_STEP]
        done = {tuple(row[key] for key in keys) for row in document["rows"]}
        missing = [cell for cell in cells if cell not in done]
        if not missing:
            continue
        seed = seed_of(bench, data, number, tuning=False)
        towards = falling(seed)
        for cell in missing:
            began = time.process_time()
            method = cell[3]
            found = measured(seed, towards, method, draws, LENGTHS)
            row = dict(zip(keys, cell, strict=True)) | {"model": settings.model, **found}
            row |= {"cpu_seconds": round(time.process_time() - began, 1), **origin()}
            document["rows"].append(row)
            out.write_text(json.dumps(document, indent=1) + "\n")
            say(f"{corpus} seed {number} {method}: cosine {row['cosine']:.3f}, falls {row['falls']}")


def of_the_paper_sizes(row: Row) -> bool:
    """Whether a row is of the small model with rank 8, at epsilon 1."""
    return bool(row["model"] == "lacquer-small" and row["epsilon"] == 1.0 and row["values"] == VALUES)


def steps(results: Row) -> str:
    """The three corpora with the small model: one line per method."""
    return _steps([row for row in results["rows"] if of_the_paper_sizes(row)])


def varied(results: Row) -> str:
    """PubMed with one thing changed: epsilon, the adapter's rank, or the model with its prompts."""
    changed = [row for row in results["rows"] if row["corpus"] == "pubmed" and not of_the_paper_sizes(row)]
    return _steps(changed) if changed else NOT_MEASURED


def _steps(found: Sequence[Row]) -> str:
    """One line per method and setting: cosine, fall of the loss at a short length and at the best one."""
    lines = []
    for where, rows in grouped(found, _setting).items():
        for method, own in grouped(rows, lambda row: row["method"]).items():
            short = [row["falls"][row["lengths"].index(SHOWN)] for row in own]
            best = [max(zip(row["falls"], row["lengths"], row["accuracy_gains"], strict=True)) for row in own]
            lines.append(
                (
                    where,
                    NAMES.get(method, method),
                    mean_text([row["cosine"] for row in own], 3),
                    mean_text(short, 4),
                    mean_text([fall for fall, _, _ in best], 4),
                    " ".join(f"{length:g}" for length in sorted({length for _, length, _ in best})),
                    mean_text([100 * gain for _, _, gain in best], 2),
                    str(len(own)),
                )
            )
    header = (
        "setting", "method", "cosine", f"fall of the loss at length {SHOWN:g}", "best fall", "at length",
        "next-token accuracy, points", "seeds",
    )  # fmt: skip
    tried = sorted({tuple(row["lengths"]) for row in found}, key=len)
    lengths = "; ".join(", ".join(f"{length:g}" for length in each) for each in tried)
    draws = " or ".join(str(number) for number in sorted({row["draws"] for row in found}))
    return (
        f"{markdown(header, lines, 'llr')}\nMean ± standard deviation over seeds, {draws} releases a seed; "
        f"lengths tried: {lengths}. The best is "
        "chosen on the same test texts, for every method; accuracy is that at the best.\n"
        f"{provenance_of_rows(found)}"
    )


def _setting(row: Row) -> str:
    """Corpus and model, and what is not as in the paper's sizes."""
    text = f"{row['corpus']}, {row['model']}"
    text += "" if row["epsilon"] == 1.0 else f", ε = {row['epsilon']:g}"
    return text if row["model"] != "lacquer-small" or row["values"] == VALUES else f"{text}, d = {row['values']:,}"


def pairs(results: Row) -> str:
    """The small model's steps less that of DP-SGD, a pair per corpus and seed."""
    return _pairs([row for row in results["rows"] if of_the_paper_sizes(row)])


def pairs_of_smollm2(results: Row) -> str:
    """The same of SmolLM2 in the paper's form, a pair per seed."""
    found = [row for row in results["rows"] if row["model"] == "smollm2"]
    return _pairs(found) if found else NOT_MEASURED


def _pairs(pooled: Sequence[Row]) -> str:
    """Each step less that of DP-SGD, Holm-corrected over the table; bold is significant."""
    values: dict[str, Callable[[Row], float]] = {
        "cosine": lambda row: row["cosine"],
        f"fall at {SHOWN:g}": lambda row: row["falls"][row["lengths"].index(SHOWN)],
        "best fall": lambda row: max(row["falls"]),
    }
    of = grouped(pooled, lambda row: row["method"])
    rows = {method: {(row["corpus"], row["model"], row["seed"]): row for row in own} for method, own in of.items()}
    differences, counts = {}, set()
    for method in FIRST_STEP[:-1]:
        shared = sorted(rows.get(method, {}).keys() & rows.get("DP-SGD", {}).keys())
        counts.add(len(shared))
        for name, value in values.items():
            found = [value(rows[method][pair]) - value(rows["DP-SGD"][pair]) for pair in shared]
            differences[method, name] = Estimate.of(found) if found else None
    texts = difference_texts(differences)
    lines = [
        (f"{NAMES.get(method, method)} less DP-SGD", *(texts[method, name] for name in values))
        for method in FIRST_STEP[:-1]
    ]
    return f"{markdown(('', *values), lines, 'lr')}\n{' or '.join(map(str, sorted(counts)))} pairs in every cell.\n"


if __name__ == "__main__":
    typer.run(main)
