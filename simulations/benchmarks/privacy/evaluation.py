"""Private evaluation: its estimates against the exact values, and what they cost in epsilon and in points.

Run: `python -m simulations.benchmarks privacy.evaluation FOLDER`, half an hour a data set on two cores.

FOLDER holds ``glue_sst2`` and ``diabetes130``. Of 20,000 records of either, dealt to 1,000 and to 10,000 clients, three
runs of one seed: public records validate; a tenth of the clients is held out and asked once, at the end; the same every
tenth round. Epsilon is the target of each. The exact value, which only this script knows, is the mean over the held-out
clients of the adapter that the run ends with, without noise. What private evaluation costs is the clients that are not
trained on: the difference of the runs on the test set.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from client.data.prepare import prepare
from privacy.accountants import composition
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import held_out
from server.config.load import load
from server.config.schema import RunConfig
from server.evaluation.finished import read_finished
from server.evaluation.private import default_bound
from server.run_folder.names import LEDGER_FILE, RESULTS_FILE
from server.run_folder.telemetry import read_metrics
from server.runs.assembly import data_spec
from simulations.benchmarks.harness.markdown import markdown, provenance
from simulations.benchmarks.harness.results import RESULTS, say, write
from simulations.engines.inprocess import run_inprocess
from simulations.presets.load import preset_files

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "SST-2": (
        "sst2",
        {
            "data.source": "parquet:{}/glue_sst2/train.parquet",
            "data.test-source": "parquet:{}/glue_sst2/validation.parquet",
            "model.targets": "",  # the head alone: minutes a run, and as accurate at this epsilon
            "model.layers": 0,
        },
    ),
    "Diabetes narratives": (
        "compare-diabetes",
        {"data.source": "diabetes130:{}/diabetes130@train", "data.test-source": "diabetes130:{}/diabetes130@eval"},
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "public": {},
    "once": {"evaluation.data": "private", "evaluation.every": 10**6},
    "every tenth round": {"evaluation.data": "private", "evaluation.every": 10},
}


def main(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the data sets.")],
    output: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs/private-evaluation"),
    sets: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(SETS),
    clients: Annotated[str, typer.Option(help="Separated by commas.")] = "1000,10000",
    rounds: Annotated[int, typer.Option(help="0 takes the preset's.")] = 0,
    epsilon: Annotated[float, typer.Option(help="Target of a run.")] = 4.0,
) -> None:
    """Run what is missing, then write results/private-evaluation.json from the run folders; other sets' rows stay."""
    file, asked_for = RESULTS / "private-evaluation.json", sets.split(",")
    rows = (
        [row for row in json.loads(file.read_text())["rows"] if row["data"] not in asked_for] if file.exists() else []
    )
    for name in asked_for:
        preset, sources = SETS[name]
        for count in map(int, clients.split(",")):
            for way, asked in WAYS.items():
                where = str(folder.resolve())
                overrides = {k: v.replace("{}", where) if isinstance(v, str) else v for k, v in sources.items()}
                config = load(preset_files()[preset], overrides | common(count, epsilon, rounds) | asked)
                place = (output / f"{preset}-{count}-{way.split()[0]}").resolve()
                if not (place / RESULTS_FILE).is_file():
                    place.mkdir(parents=True)
                    run_inprocess(config, place)
                rows.append({"data": name, "clients": count, "way": way, **measured(config, place)})
                say(json.dumps(rows[-1]))
    write("private-evaluation", {"rows": rows})


def estimates(results: Mapping[str, Any]) -> str:
    """A table: test loss of every run, and its last private estimates beside what they estimate."""
    asks = ("loss", "exact", "accuracy", "exact", "ε")
    header = ("data", "clients", "rounds", "held out, asked", "test loss", "test accuracy", *asks)
    lines = []
    for row in results["rows"]:
        asked = row.get("estimates", [])
        told = [_told(asked[-1], "loss", "{:.3f} ± {:.3f}"), f"{row['exact_loss']:.3f}"] if asked else ["", ""]
        told += [_told(asked[-1], "accuracy", "{:.1%} ± {:.1%}"), f"{row['exact_accuracy']:.1%}"] if asked else ["", ""]
        held_out = f"{row['held_out']:,}, {row['way']}" if asked else "none, public records"
        spent = f"{max(row['epsilons'].values()):.2f}" if asked else ""
        test = (f"{row['test_loss']:.3f}", f"{row['test_accuracy']:.1%}")
        lines.append((row["data"], f"{row['clients']:,}", str(row["rounds_done"]), held_out, *test, *told, spent))
    return markdown(header, lines, "lrrlr") + provenance(results)


def _told(estimate: Mapping[str, float], name: str, form: str) -> str:
    return form.format(estimate[name], estimate[f"{name}_within"])


def common(clients: int, epsilon: float, rounds: int) -> dict[str, Any]:
    """The settings that all runs of a number of clients share: one cohort size, and clients that all have records."""
    cohort = {"clients": clients, "sampling-rate": min(1.0, 50 / clients), "data.partition": "iid"}
    target = {"privacy.epsilon": epsilon, "privacy.delta": min(1e-5, 0.1 / clients), "strategy.controller": "fixed"}
    fixed = {
        "strategy.controller-options": {"clip-norm": 0.5},
        "data.train-records": 20_000,
        "engine.kind": "inprocess",
    }
    return cohort | target | fixed | ({"rounds": rounds} if rounds else {})


def measured(config: RunConfig, place: Path) -> dict[str, Any]:
    """The row of one finished run."""
    results = json.loads((place / RESULTS_FILE).read_text())
    row = {name: results[name] for name in ("test_loss", "test_accuracy", "rounds_done", "seconds")}
    if config.evaluation.data == "public":
        return row
    found = [one for one in read_metrics(place) if one.validation_loss is not None]
    names = ("round", "validation_loss", "validation_loss_within", "validation_accuracy", "validation_accuracy_within")
    with Ledger.open(place / LEDGER_FILE, read_only=True) as ledger:
        floor, delta = ledger.commitment.floor, ledger.commitment.delta
    costs = {step.label: composition.epsilon([step], delta) for step in floor}
    estimates = [{name.removeprefix("validation_"): getattr(one, name) for name in names} for one in found]
    return {**row, "epsilons": costs, "estimates": estimates, **exact(config, place)}


def exact(config: RunConfig, place: Path) -> dict[str, float]:
    """The mean over the held-out clients without noise, each number clipped as it is asked; no run ever tells it."""
    data, (engine, vector) = prepare(data_spec(config)), read_finished(place).engine()
    out = np.flatnonzero(held_out(config.clients, config.evaluation.held_out, config.seed))
    bound = config.evaluation.loss_bound or default_bound(data.num_labels)
    found = [engine.evaluate(vector, data.client(int(client))) for client in out]
    losses = [min(one.loss, bound) for one in found]
    return {
        "held_out": len(out),
        "exact_loss": float(np.mean(losses)),
        "exact_accuracy": float(np.mean([one.accuracy for one in found])),
        "spread_of_accuracy": float(np.std([one.accuracy for one in found]) / math.sqrt(len(out))),
    }


if __name__ == "__main__":
    typer.run(main)
