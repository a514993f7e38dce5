"""What a private run was worth beside public records alone, from the runs of the sweep ``worth``.

Run: `python -m simulations.benchmarks planning.worth RUNS`, RUNS the sweep's folder of runs (`runs/sweeps/worth`).

Of every run that is not in the results yet, the test loss of what it ended with; of one without noise that of its
public start, too. Test records are dealt into 50 blocks and a block's mean loss is kept, so that an interval resamples
seeds and test records both.
Writes results/worth.json after every run.

A run's share of the way is (public - run) / (public - without noise), of mean losses: 0 is what the public records
give, 1 what training without noise gives from the same start in as many rounds.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from client.data.prepare import prepare
from privacy.accountants.calibration import calibrate
from privacy.events import Poisson
from privacy.randomness.rng import simulation_generator
from server.evaluation.finished import read_finished
from server.run_folder.names import RESULTS_FILE
from server.runs.assembly import data_spec
from simulations.audit.losses import adapter_losses, reference_losses
from simulations.benchmarks.harness.markdown import NOT_MEASURED, markdown, provenance_of_rows
from simulations.benchmarks.harness.results import RESULTS, origin, say
from simulations.planning.signal import default_agreement, signal_to_noise
from simulations.sweep.cells import CELL_FILE

FILE = RESULTS / "worth.json"
BLOCKS, RESAMPLES = 50, 2000
CEILING = "no-noise"
COHORT, DELTA = 300.0, 1e-5
"""Clients expected in a round, and delta, of the sweep."""
PRIVATE = ("private", "private-least", "rank-2", "both-factors", "small-cohorts")
"""Variants of which the signal differs; the others train the same values with another rule."""
CHOSEN = "learning-rate=0.01"
BENCHES = {
    "sentences": "sentences", "utterances": "utterances", "patients": "patients", "conversations": "conversations",
    "ladder": "sentences, seed of the tuning", "tuning-rate": "sentences, rates",
    "clients-4000": "sentences of 4,000", "clients-10000": "sentences of 10,000",
}  # fmt: skip
"""Names of the grids in the table, in its order."""
VARIANTS = {
    "base": "base model", "public": "public records alone", "private": "private, from the public start",
    "private-cold": "private, from cold", "private-least": "private, rank 1 in the top layer",
    "start-of-one-factor": "the start, too, trains B alone", "both-factors": "both factors", "rank-2": "rank 2",
    "fedavg": "FedAvg with momentum", "last-iterate": "the last iterate is served", 
    "small-cohorts": "a quarter of the cohort, four times the rounds",
    CEILING: "without noise",
}  # fmt: skip
"""Names of the variants in the table, in its order."""

Floats = NDArray[np.float64]


def main(
    runs: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The sweep's folder of runs.")],
) -> None:
    """Measure the runs that are not in the results."""
    torch.set_num_threads(1)
    cells: dict[str, Any] = json.loads(FILE.read_text())["cells"] if FILE.exists() else {}
    for results in sorted(runs.glob(f"*/**/{RESULTS_FILE}")):
        cell = json.loads((results.parent / CELL_FILE).read_text())
        if cell["kind"] == "public-only" or cells.get(cell["cell"], {}).get("digest") == cell["digest"]:
            continue
        bench, variant, *_ = cell["cell"].split("/")
        if bench == "tuning-rate" and CHOSEN in cell["cell"]:  # the ladder's own cells are these runs
            bench = "ladder"
        named = {"bench": re.sub("-(private|others)$", "", bench), "variant": variant, "digest": cell["digest"]}
        cells[cell["cell"]] = named | measured(results.parent, variant) | origin()
        FILE.write_text(json.dumps({"cells": dict(sorted(cells.items()))}, indent=1) + "\n", encoding="utf-8")
        say(cell["cell"])


def measured(folder: Path, variant: str) -> dict[str, Any]:
    """Settings of a finished run, and block means of its test losses; of the ceiling, those of its public start too."""
    run = read_finished(folder)
    config, data = run.config, prepare(data_spec(run.config))
    losses = {"end": _blocks(adapter_losses(run, [data.test])[0])}
    if variant == CEILING:
        losses["public"] = _blocks(reference_losses(run, data, [data.test])[0])
    return {
        "seed": config.seed,
        "epsilon": None if config.privacy.noise == "insecure-zero" else config.privacy.epsilon,
        "clients": data.num_clients,
        "rounds": config.rounds,
        "dimension": run.results["dimension"],
        "test_records": len(data.test),
        "losses": losses,
    }


def _blocks(losses: Floats) -> list[float]:
    return [round(float(losses[block::BLOCKS].mean()), 5) for block in range(BLOCKS)]


def share(public: Floats, run: Floats, ceiling: Floats) -> tuple[float, float, float]:
    """A run's share of the way, and its 95 % interval: a bootstrap that resamples seeds and blocks together.

    Args:
        public, run, ceiling: ``[seeds, blocks]``, mean losses of the same seeds and blocks.
    """
    random = simulation_generator(0, "worth-bootstrap")
    seeds, blocks = public.shape

    def ratio(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> float:
        start, end, best = (losses[np.ix_(rows, columns)].mean() for losses in (public, run, ceiling))
        return float((start - end) / (start - best))

    draws = [[random.integers(size, size=(size,)) for size in (seeds, blocks)] for _ in range(RESAMPLES)]
    found = [ratio(rows, columns) for rows, columns in draws]
    low, high = np.quantile(found, [0.025, 0.975])
    return ratio(np.arange(seeds), np.arange(blocks)), float(low), float(high)


def shares(results: Mapping[str, Any]) -> str:
    """One table: perplexity of every bench and variant, and its share of the way, over the seeds it has in common."""
    cells = [cell for cell in results["cells"].values() if cell["bench"] != "tuning-rate"]
    if not cells:
        return NOT_MEASURED
    starts = [
        cell | {"variant": "public", "epsilon": None, "losses": {"end": cell["losses"]["public"]}, "dimension": 0}
        for cell in cells
        if cell["variant"] == CEILING
    ]
    header = ("units", "trained", "ε", "values trained", "perplexity", "share of the way", "seeds")
    return markdown(header, _lines(cells + starts), "lllrrlr") + provenance_of_rows(cells)


def headline(results: Mapping[str, Any]) -> str:
    """The table of the front page: a line per population that has a private run of ten seeds."""
    cells = [cell for cell in results["cells"].values() if cell["bench"] in ("sentences", "utterances")]
    benches = [bench for bench in BENCHES if any(cell["bench"] == bench for cell in cells)]
    if not benches:
        return NOT_MEASURED
    header = ("records", "clients", "public records alone", "ε = 1", "ε = 4", "without noise", "seeds")
    lines = []
    for bench in benches:
        of = {key: group for key, group in _groups(cells).items() if key[0] == bench}
        best = of[bench, CEILING, None]
        start = math.exp(np.mean([cell["losses"]["public"] for cell in best.values()]))
        found = []
        for epsilon in (1.0, 4.0):
            value, low, high = _share_of(of[bench, "private", epsilon], best)
            found.append(
                f"{_perplexity(of[bench, 'private', epsilon])}: {value:.0%} [{low:.0%}, {high:.0%}] of the way"
            )
        clients = next(iter(best.values()))["clients"]
        lines.append((bench, f"{clients:,}", f"{start:.2f}", *found, _perplexity(best), str(len(best))))
    return markdown(header, lines, "lrrrrrr") + provenance_of_rows(cells)


def prediction(results: Mapping[str, Any]) -> str:
    """A table of shares beside the signal S of `lacquer plan`, and the S at which the share would be a half."""
    cells = list(results["cells"].values())
    groups = _groups(
        [cell for cell in cells if cell["bench"] != "tuning-rate" and cell["variant"] in (*PRIVATE, CEILING)]
    )
    header = ("units", "trained", "ε", "N", "values trained", "S", "share of the way", "S of half the way", "seeds")
    lines = []
    for (bench, variant, epsilon), group in sorted(
        groups.items(), key=lambda one: (list(BENCHES).index(one[0][0]), -(one[0][2] or 0))
    ):
        best = groups.get((bench, CEILING, None), {})
        if variant == CEILING or not set(group) & set(best):
            continue
        cell, value = next(iter(group.values())), _share_of(group, best)[0]
        signal = predicted_signal(cell)
        half = f"{signal * math.sqrt(1.0 / value - 1.0):.2f}" if 0.0 < value < 1.0 else ""
        numbers = (
            f"{cell['clients']:,}",
            f"{cell['dimension']:,}",
            f"{signal:.2f}",
            f"{value:.0%}",
            half,
            str(len(group)),
        )
        lines.append((BENCHES[bench], VARIANTS[variant], f"{epsilon:g}", *numbers))
    return markdown(header, lines, "llrrrrrrr") + provenance_of_rows(cells)


def predicted_signal(cell: Mapping[str, Any]) -> float:
    """The signal S of a cell of the sweep, of one record a client, as `lacquer plan` has it."""
    cohort = COHORT / 4 if cell["variant"] == "small-cohorts" else COHORT
    sampling = Poisson(cohort / cell["clients"], cell["clients"])
    multiplier = calibrate(cell["epsilon"], DELTA, sampling, cell["rounds"])
    agreement = default_agreement("causal-lm", 1).value
    return signal_to_noise((multiplier,) * cell["rounds"], cohort, cell["dimension"], agreement)


Group = dict[int, dict[str, Any]]


def _groups(cells: list[dict[str, Any]]) -> dict[tuple[str, str, float | None], Group]:
    """Cells by bench, variant and epsilon, then by seed."""
    groups: dict[tuple[str, str, float | None], Group] = {}
    for cell in cells:
        groups.setdefault((cell["bench"], cell["variant"], cell["epsilon"]), {})[cell["seed"]] = cell
    return groups


def _perplexity(group: Group) -> str:
    return f"{math.exp(np.mean([cell['losses']['end'] for cell in group.values()])):.2f}"


def _share_of(group: Group, best: Group) -> tuple[float, float, float]:
    """The share of the way of a group and its interval, over the seeds that it has in common with the best."""
    common = sorted(seed for seed in group if seed in best)
    stacked = [
        np.array([source[seed]["losses"][part] for seed in common])
        for source, part in ((best, "public"), (group, "end"), (best, "end"))
    ]
    return share(*stacked)


def _lines(cells: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    groups = _groups(cells)
    order = (list(BENCHES), list(VARIANTS))
    for bench, variant, epsilon in sorted(
        groups, key=lambda key: (order[0].index(key[0]), order[1].index(key[1]), -(key[2] or 0))
    ):
        group, best = groups[bench, variant, epsilon], groups.get((bench, CEILING, None), {})
        common = sorted(seed for seed in group if seed in best)
        text = ""
        if common and variant not in (CEILING, "public", "base"):
            value, low, high = _share_of(group, best)
            text = f"{value:.0%}" + (f" [{low:.0%}, {high:.0%}]" if len(common) > 1 else " (one seed)")
        perplexity = math.exp(np.mean([cell["losses"]["end"] for cell in group.values()]))
        spent = "none" if epsilon is None else f"{epsilon:g}"
        trained = f"{next(iter(group.values()))['dimension']:,}" if variant not in ("public", "base") else ""
        yield BENCHES[bench], VARIANTS[variant], spent, trained, f"{perplexity:.3f}", text, str(len(group))


if __name__ == "__main__":
    typer.run(main)
