"""How well one client's (or record's) clipped update agrees with the mean: the `a` of `lacquer plan`.

Run: `python -m simulations.benchmarks.planning.agreement DATA`, DATA the folder of the presets' files.

Runs without noise and with a fixed threshold; their clients are simulated on public data. Two rounds in a row draw
their cohorts apart from each other, so the inner product of their means estimates ``a^2 C^2``, the squared norm of the
expected clipped update, without the bias ``1/m`` of one mean's own squared norm. It is taken for the adapters and for
the classification head by itself. Writes results/agreement.json.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from privacy.mechanism import Release
from server.config.load import load
from server.run_folder.names import RESULTS_FILE
from simulations.benchmarks.harness.markdown import Columns, Row, distinct, table
from simulations.benchmarks.harness.results import RESULTS, origin, say
from simulations.engines.inprocess import run_inprocess
from simulations.presets.load import absolute_paths, preset_files
from simulations.report.read_run import read_run
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.fixed import Fixed

FILE = RESULTS / "agreement.json"
QUIET = {
    "privacy.noise": "insecure-zero",
    "privacy.non-private": True,
    "evaluation.every": 1000,
    "strategy.controller": "simulations.benchmarks.planning.agreement:Meter",
    "strategy.controller-options.clip-norm": 0.1,
    "engine.kind": "inprocess",
    "engine.workers": 1,
}
SST2 = {"rounds": 40}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SST-2, 10 records a client": ("compare-sst2", SST2),
    "SST-2, 2 records a client": ("compare-sst2", {**SST2, "data.train-records": 2000}),
    "SST-2, 40 records a client": ("compare-sst2", {**SST2, "data.train-records": 40000}),
    "SST-2, 10 records a client, three layers": ("compare-sst2", {**SST2, "model.layers": 3}),
    "SST-2, 10 records a client, head alone": ("compare-sst2", {**SST2, "model.targets": "", "model.layers": 0}),
    "Diabetes 130, one record": (
        "site-diabetes",
        # a site records the steps that it evaluates
        {"rounds": 40, "data.test-limit": 50, "data.validation-records": 20, "evaluation.every": 1},
    ),
}
"""What is measured: a preset, and what is changed in it."""


@dataclass(frozen=True)
class Seen:
    """The last mean, and its inner products with the one before: of the adapters and of the head."""

    last: Tensor
    adapters: float = 0.0
    head: float = 0.0


@dataclass(frozen=True)
class Meter(Fixed):
    """A fixed threshold that tells how alike two means in a row are, in units of C^2."""

    head: bool = True

    def init(self, info: RunInfo, public: PublicSignals) -> Seen:  # type: ignore[override]
        return Seen(torch.zeros(info.dimension(1)))

    def update(self, state: Seen, info: RunInfo, released: Release, public: PublicSignals) -> Seen:  # type: ignore[override]
        mean = released.update.double().cpu() / self.clip_norm
        products, split = mean * state.last, info.blocks(1)[-1] if self.head else 0
        cut = len(mean) - split
        return Seen(mean, float(products[:cut].sum()), float(products[cut:].sum()))

    def released_values(self, state: Seen, info: RunInfo) -> dict[str, float]:  # type: ignore[override]
        return {"clip-bound": self.clip_norm, "adapters": state.adapters, "head": state.head}


def main(
    data: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the presets' files.")],
    only: Annotated[str, typer.Option(help="Measure the cases whose name begins so, and keep the others.")] = "",
) -> None:
    """Measure, and write simulations/benchmarks/results/agreement.json."""
    torch.set_num_threads(1)
    rows = {row["case"]: row for row in json.loads(FILE.read_text())["cases"]} if FILE.is_file() else {}
    for name, (preset, changes) in CASES.items():
        if not name.startswith(only):
            continue
        head = {"strategy.controller-options.head": not preset.startswith("site-")}
        config = absolute_paths(load(preset_files()[preset], {**QUIET, **changes, **head}), data.resolve())
        with TemporaryDirectory() as folder:
            run_inprocess(config, Path(folder))
            rows[name] = {"case": name, **measured(Path(folder)), **origin()}
        say(json.dumps(rows[name]))
    cases = [rows[name] for name in CASES if name in rows]
    FILE.write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")


def measured(folder: Path) -> dict[str, Any]:
    """Agreements of a finished run over all its rounds, of the first ten, and of the last ten."""
    run = read_run(folder)
    values = [(record.extra["adapters"], record.extra["head"]) for record in run.rounds[1:]]
    parts = {"adapters": [a for a, _ in values], "head": [h for _, h in values], "both": [a + h for a, h in values]}
    stretches = {"": slice(None), "first_": slice(0, 10), "last_": slice(-10, None)}
    return {
        "cohort": run.rounds[0].expected_cohort,
        "dimension": json.loads((folder / RESULTS_FILE).read_text())["dimension"],
        **{f"{when}{part}": root(found[over]) for part, found in parts.items() for when, over in stretches.items()},
    }


def root(squares: list[float]) -> float:
    """The root of their mean; 0 where it is negative, which is noise."""
    return math.sqrt(max(sum(squares) / len(squares), 0.0))


def agreements(results: Row) -> str:
    """The table: one line a case."""
    columns: Columns = {
        "updates of": "{case}",
        "values": "{dimension:,}",
        "a of all values": "{both:.3f}",
        "of the adapters": "{adapters:.3f}",
        "of the head": "{head:.3f}",
        "first ten rounds": "{first_both:.3f}",
        "last ten": "{last_both:.3f}",
    }
    rows = results["cases"]
    commits = ", ".join(f"`{commit}`" for commit in distinct(rows, "commit"))
    return (
        table(rows, columns, "lr") + f"\nOne seed; machine: {'; '.join(distinct(rows, 'machine'))}; commit {commits}.\n"
    )


if __name__ == "__main__":
    typer.run(main)
