"""What the attacks of `lacquer audit` find in whole runs: without privacy, and at epsilon 8, 4, 2 and 0.5.

Run: `python -m simulations.benchmarks privacy.audit`. 40 minutes of one core; cells that are there are kept.

Records of one site, generated notes, base model lacquer-small: 350 notes, in 160 more records ten secrets in 16 copies
each; 175 of the 510 units are canaries. The same steps, threshold and data everywhere; only the noise differs. Shadow
runs attack every cell too: units share their run's noise, so intervals over units are too narrow, and seeds are needed.

Writes results/audit.json, the table and the figure of docs/results/audit.md.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from matplotlib.axes import Axes

from client.data.prepare import prepare
from server.config.load import parse, unflatten
from server.evaluation.finished import FinishedRun, read_finished
from server.runs.assembly import data_spec
from server.runs.start import run_in_folder
from simulations.audit.findings import audit_run
from simulations.audit.shadows import shadow_findings
from simulations.audit.units import audited_units
from simulations.benchmarks.harness.markdown import Columns, Row, mean_text, provenance, table
from simulations.benchmarks.harness.results import RESULTS, ROOT, environment, say
from simulations.benchmarks.privacy.jaccard import record_jaccard
from simulations.report import plots
from simulations.report.svg import write_themes

FILE = RESULTS / "audit.json"

EPSILONS = (None, 8.0, 4.0, 2.0, 0.5)
"""None is no privacy: the same threshold, and no noise."""

SHADOWS = 4
"""Each costs the run once more."""

SETTINGS: dict[str, Any] = {
    "rounds": 50, "clients": 1, "sampling-rate": 1.0,
    "privacy.unit": "record", "privacy.delta": 1e-5,
    "strategy.controller": "fixed", "strategy.controller-options": {"clip-norm": 0.5},
    "strategy.optimizer": "fedadam", "strategy.optimizer-options": {"learning-rate": 0.02},
    "site.batch-size": 100,
    "model.name": "lacquer-small", "model.task": "causal-lm", "model.targets": "auto",
    "model.rank": 16, "model.max-length": 48,
    "data.source": "notes", "data.partition": "iid", "data.records-per-client": 350,
    "data.validation-records": 50, "data.test-records": 200,
    "data.canaries": 10, "data.canary-copies": 16, "data.canary-kind": "id-record",
    "evaluation.every": 50, "evaluation.examples": 0, "evaluation.rouge-records": 0,
    "engine.kind": "inprocess", "engine.workers": 1,
    "audit.canaries": 175,
}  # fmt: skip


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...")] = 3,
    stem: Annotated[Path, typer.Option(help="Where the figure is written.")] = ROOT / "docs" / "audit",
) -> None:
    """Run what is not there yet, print, write and draw."""
    torch.set_num_threads(1)
    document: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {"rows": []}
    for seed in range(seeds):
        for epsilon in EPSILONS:
            cell = {"epsilon": epsilon, "seed": seed}
            if any(cell.items() <= row.items() for row in document["rows"]):
                continue
            document["rows"].append({**cell, **attacked(epsilon, seed)})
            say(document["rows"][-1])
            document["environment"] = environment()
            FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    say(attacks(document), *write_themes(lambda palette: figure(document["rows"], palette), stem))


def attacked(epsilon: float | None, seed: int) -> dict[str, Any]:
    """One run, and what its audit finds."""
    private: dict[str, Any] = {"privacy.epsilon": epsilon or 8.0}
    if epsilon is None:
        private |= {"privacy.non-private": True, "privacy.noise": "insecure-zero"}
    config, start = parse(unflatten({**SETTINGS, **private, "seed": seed})), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run_in_folder(config, Path(folder))
        trained = time.process_time()
        run = read_finished(Path(folder))
        found = audit_run(run, 1000)
        (level,), game, exposed = found["membership"], found["canaries"], found["exposure"]
        cpu = {"run": trained - start, "audit": time.process_time() - trained}
        return {
            "ledger": None if found["upper_bound"] is None else found["upper_bound"]["epsilon"],
            "verdict": found["verdict"].partition(":")[0],
            "perplexity": run.results["test_perplexity"],
            "exchangeable": level["exchangeable"]["holds"],
            "membership": {attack["score"]: attack["auc"] for attack in level["attacks"]},
            "tpr": {attack["score"]: attack["tpr"][0] for attack in level["attacks"]},
            "membership_bound": level["bound"],
            "canaries": {
                key: game[key]
                for key in ("auc", "epsilon_lower", "ceiling", "one_shot", "noise", "presence", "repeated")
            },
            "exposure": {who: exposed[who] for who in ("adapter", "base")},
            "most_bits": exposed["most_bits"],
            "extraction": found["extraction"],
            "jaccard": overlap(run),
            "cpu_seconds": cpu,
            **shadowed(run),
        }


def overlap(run: FinishedRun) -> dict[str, Any] | None:
    """How much of the records of members and of others the model writes."""
    data = prepare(data_spec(run.config))
    members, others = audited_units(run.config, data, 1000, run.config.audit.canaries)[-1].rows
    return record_jaccard(run, run.language_model(), (data.train.select(members), data.test.select(others)))


def shadowed(run: FinishedRun) -> dict[str, Any]:
    """What shadow runs add, and what they cost."""
    start, data = time.process_time(), prepare(data_spec(run.config))
    (level,) = audited_units(run.config, data, 1000, run.config.audit.canaries)
    found = shadow_findings(run, data, level, SHADOWS)
    return {
        "shadows": {attack["score"]: {"auc": attack["auc"], "tpr": attack["tpr"]} for attack in found["attacks"]},
        "shadow_targets": found["members"],
        "shadow_cpu_seconds": time.process_time() - start,
    }


def _name(epsilon: float | None) -> str:
    return "no privacy" if epsilon is None else f"ε = {epsilon:g}"


def _of(rows: Sequence[Mapping[str, Any]], epsilon: float | None) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["epsilon"] == epsilon]


ATTACKS: Mapping[str, Callable[[Row], float]] = {
    "membership, loss": lambda row: row["membership"]["loss"]["estimate"],
    "membership, against the start": lambda row: row["membership"]["loss against the public start"]["estimate"],
    "membership, LiRA online": lambda row: row["shadows"]["LiRA, online"]["auc"]["estimate"],
    "membership, LiRA offline": lambda row: row["shadows"]["LiRA, offline"]["auc"]["estimate"],
    "canaries": lambda row: row["canaries"]["auc"]["estimate"],
}
"""AUC by attack."""

DRAWN = ("membership, loss", "membership, LiRA online", "canaries")


def attacks(results: Mapping[str, Any]) -> str:
    """The table of docs/results/audit.md: means over seeds, with their standard deviation."""
    rows = [{"name": _name(epsilon), "runs": runs} for epsilon in EPSILONS if (runs := _of(results["rows"], epsilon))]

    def auc(value: Callable[[Row], float]) -> Callable[[Row], str]:
        return lambda row: mean_text([value(run) for run in row["runs"]], 3)

    columns: Columns = {
        "": lambda row: row["name"],
        **{f"AUC: {name}": auc(value) for name, value in ATTACKS.items()},
        "ε ≥, canaries": lambda row: mean_text([run["canaries"]["epsilon_lower"] for run in row["runs"]], 2),
        "ε ≈, canaries": lambda row: mean_text(
            [run["canaries"]["one_shot"]["epsilon_equal_spread"] for run in row["runs"]], 2
        ),
        "exposure, bits": lambda row: mean_text([mean(run["exposure"]["adapter"]["bits"]) for run in row["runs"]], 2),
        "secrets said, of ten: greedy": lambda row: mean_text(
            [run["extraction"]["adapter"]["greedy"]["count"] for run in row["runs"]], 1
        ),
        "in 10,000 samples": lambda row: mean_text(
            [run["extraction"]["adapter"]["sampled"]["count"] for run in row["runs"]], 1
        ),
        "Jaccard excess, 2-grams": lambda row: mean_text(
            [run["jaccard"]["adapter"][1]["estimate"] for run in row["runs"]], 3
        ),
        "noise over charged": lambda row: mean_text([run["canaries"]["noise"]["estimate"] for run in row["runs"]], 3),
        "perplexity": lambda row: mean_text([run["perplexity"] for run in row["runs"]], 1),
    }
    counts = sorted({len(row["runs"]) for row in rows})
    seeds = " or ".join(map(str, counts))
    held = sum(row["exchangeable"] for row in results["rows"])
    seconds = mean(sum(row["cpu_seconds"].values()) for row in results["rows"])
    audit = mean(row["cpu_seconds"]["audit"] for row in results["rows"])
    shadows = mean(row["shadow_cpu_seconds"] for row in results["rows"])
    return (
        f"{table(rows, columns, 'l' + 'r' * (len(columns) - 1))}\n{seeds} seeds a row, mean and standard deviation; "
        f"members and held-out notes were exchangeable in {held} of {len(results['rows'])} runs; a run with its audit "
        f"took {seconds:.0f} s of one core, {audit:.0f} s of them the audit, and its {SHADOWS} shadow runs "
        f"{shadows:.0f} s.\n"
        f"{provenance(results)}"
    )


RATES: Mapping[str, Callable[[Row], float]] = {
    "loss, FPR 1 %": lambda row: row["tpr"]["loss"]["estimate"],
    "against the start, FPR 1 %": lambda row: row["tpr"]["loss against the public start"]["estimate"],
    "LiRA online, FPR 1 %": lambda row: row["shadows"]["LiRA, online"]["tpr"][0]["estimate"],
    "LiRA online, FPR 0.1 %": lambda row: row["shadows"]["LiRA, online"]["tpr"][1]["estimate"],
    "LiRA offline, FPR 1 %": lambda row: row["shadows"]["LiRA, offline"]["tpr"][0]["estimate"],
    "LiRA offline, FPR 0.1 %": lambda row: row["shadows"]["LiRA, offline"]["tpr"][1]["estimate"],
}
"""TPR by attack; of the loss the rate at 0.1 % was not kept."""


def rates(results: Mapping[str, Any]) -> str:
    """The second table of docs/results/audit.md: who is found at a low false positive rate."""
    rows = [{"name": _name(epsilon), "runs": runs} for epsilon in EPSILONS if (runs := _of(results["rows"], epsilon))]

    def percent(value: Callable[[Row], float]) -> Callable[[Row], str]:
        return lambda row: f"{mean_text([100 * value(run) for run in row['runs']], 1)} %"

    columns: Columns = {"": "{name}", **{name: percent(value) for name, value in RATES.items()}}
    targets = results["rows"][0]["shadow_targets"]
    return (
        f"{table(rows, columns, 'l' + 'r' * len(RATES))}\nMean and standard deviation over seeds. At 0.1 % the "
        f"threshold is the highest score of at most {targets} held-out notes, so the rate is coarse.\n"
    )


def figure(rows: Sequence[Mapping[str, Any]], palette: plots.Palette) -> Any:
    """AUC of every attack, and the lower bound beside the ledger, by the guarantee."""
    places = range(len(EPSILONS))

    def aucs(axes: Axes, palette: plots.Palette) -> None:
        colors = (palette.first, palette.second, palette.third)
        for name, color, dash in zip(DRAWN, colors, ("-", "--", ":"), strict=True):
            value = ATTACKS[name]
            means = [mean([value(run) for run in _of(rows, epsilon)]) for epsilon in EPSILONS]
            axes.plot(places, means, color=color, linestyle=dash, label=name)
            for place, epsilon in zip(places, EPSILONS, strict=True):
                values = [value(run) for run in _of(rows, epsilon)]
                axes.plot([place] * len(values), values, marker="o", markersize=3.5, linestyle="none", color=color)
        axes.axhline(0.5, color=palette.muted, linestyle=":", linewidth=1.2)
        axes.set(ylabel="AUC", ylim=(0.4, 1.02))
        axes.legend(loc="upper right", labelcolor="linecolor", fontsize=9)
        axes.set_xticks(list(places), [_name(epsilon) for epsilon in EPSILONS])

    def bounds(axes: Axes, palette: plots.Palette) -> None:
        for place, epsilon in zip(places, EPSILONS, strict=True):
            values = [run["canaries"]["epsilon_lower"] for run in _of(rows, epsilon)]
            axes.plot([place] * len(values), values, marker="o", markersize=4, linestyle="none", color=palette.third)
            if epsilon is not None:
                axes.plot([place - 0.3, place + 0.3], [epsilon] * 2, color=palette.second)
        axes.plot([], [], color=palette.second, label="upper bound, by the ledger")
        axes.plot([], [], marker="o", linestyle="none", color=palette.third, label="lower bound, canaries (95 %)")
        axes.set(ylabel="ε", ylim=(-0.3, 10))
        axes.legend(loc="upper right", labelcolor="linecolor", fontsize=9)
        axes.set_xticks(list(places), [_name(epsilon) for epsilon in EPSILONS])

    return plots.draw_figure([aucs, bounds], palette, (11.0, 3.2))


if __name__ == "__main__":
    typer.run(main)
