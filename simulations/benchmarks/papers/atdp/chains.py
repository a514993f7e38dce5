"""WikiText-2 fine-tuned with and without redaction, noise and an ATDP phase: the tables of docs/results/atdp.md.

Run: `python -m simulations.benchmarks papers.atdp.chains [PRESET] --data FOLDER`.

Four chains of phases, of which every prefix is a row: no DP, redacted, JFT (redacted, then DP-SGD), DP-SGD; each as it
is and with a short ATDP phase behind it. Per row: perplexity on WikiText-2 validation, mean exposure of the planted
secrets with a 95 % confidence interval over secrets, training time, and what the row guarantees. The base model itself,
which never saw a secret, is a row too: its exposure is the null, 1/ln 2 = 1.44 bits in expectation.

Twice: with a detector that finds the secrets, and with the same one that misses them (the papers' "missed canary":
redaction then leaves them readable). A secret planted in k records is a group of k; the epsilon beside it is that of
one record.

Appends to ``results/atdp.json``; a cell that is there already is not run again.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from client.data.canaries import secrets
from client.data.records import Records
from client.models.base import load_base
from client.models.lora import merge_adapter
from privacy.randomness.rng import simulation_generator
from server.run_folder.phase_progress import PhaseResult
from server.runs.guarantee import guarantee_of
from server.runs.phase_config import load_phases
from server.runs.phase_plan import PhasesConfig, plan_noise
from server.runs.phases import PhasesRun
from simulations.audit import exposure
from simulations.benchmarks.harness.markdown import Columns, Row, distinct, grouped, mean_text, table
from simulations.benchmarks.harness.results import RESULTS, environment, say
from simulations.presets.load import absolute_paths, parse_setting
from simulations.report.notation import duration_text, epsilon_text, number_text

HERE = Path(__file__).resolve().parent

CHAINS = {
    ("plain", "atdp"): ("no DP", "no DP + ATDP"),
    ("redacted", "atdp"): ("redacted", "redacted + ATDP"),
    ("redacted", "private", "atdp"): ("", "JFT", "JFT + ATDP"),
    ("private", "atdp"): ("DP-SGD", "DP-SGD + ATDP"),
}
"""Phases in order, and the row that each prefix is."""

DETECTORS = {"missed": "regex:-number,-identifier", "found": "regex"}
"""Whether the detector sees the secrets: both find names, dates, phone numbers, emails."""


def main(
    preset: Annotated[Path, typer.Argument(help="A recipe with the phases plain, redacted, private and atdp.")] = HERE
    / "atdp-small.toml",
    data: Annotated[Path, typer.Option(help="Folder of WikiText-2's parquet files.")] = Path("wikitext2"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...")] = 3,
    first: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    detector: Annotated[str, typer.Option(help="missed, found, or both.")] = "both",
    kind: Annotated[str, typer.Option(help="Kind of canary, a record of its own.")] = "id-record",
    test_records: Annotated[int, typer.Option(help="Paragraphs to test on, drawn by seed 0; 0 takes all.")] = 150,
    candidates: Annotated[int, typer.Option(help="Secrets that were not planted, to rank against.")] = 4095,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the recipe.")] = None,
    out: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "atdp.json",
) -> None:
    """Run what is not there yet, print and write."""
    torch.set_num_threads(1)
    names = tuple(DETECTORS) if detector == "both" else (detector,)
    configured = recipe(preset, data, settings)
    document: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"benchmark": "atdp", "rows": []}
    for seed in range(first, first + seeds):
        for name in names:
            config = configured({"seed": seed, "data.detector": DETECTORS[name], "data.canary-kind": kind})
            cell = {"preset": preset.stem, "kind": kind, "detector": name, "seed": seed}
            if any(cell.items() <= row.items() for row in document["rows"]):
                continue
            for row in cell_rows(config, test_records, candidates):
                document["rows"].append({**cell, **row})
                say(document["rows"][-1])
            document["environment"] = environment()
            out.write_text(json.dumps(document, indent=1) + "\n")


def recipe(preset: Path, data: Path, settings: Sequence[str] | None) -> Callable[[Mapping[str, Any]], PhasesConfig]:
    """What makes the phases of a cell from its own settings, by dotted names.

    Args:
        preset: the file of phases.
        data: folder of WikiText-2's parquet files.
        settings: KEY=VALUE of the file.
    """
    chosen = dict(parse_setting(setting) for setting in settings or [])
    named = load_phases(preset, chosen).run.data
    sources = {
        "data.source": placed(named.source, data.resolve(), "held-back"),
        "data.test-source": placed(named.test_source, data.resolve(), "validation"),
    }

    def configured(cell: Mapping[str, Any]) -> PhasesConfig:
        config = load_phases(preset, {**sources, **chosen, **cell})
        return replace(config, run=absolute_paths(config.run, Path.cwd()))

    return configured


def placed(source: str, folder: Path, part: str) -> str:
    """The part of WikiText-2 that a preset's `source` names, in `folder`; `part` where it names none.

    The noise of a preset is that of its part's size.
    """
    _, at, named = source.rpartition("@")
    return f"wikitext2:{folder}@{named if at and source.startswith('wikitext2:') else part}"


def cell_rows(config: PhasesConfig, test_records: int, candidates: int) -> list[dict[str, Any]]:
    """All rows of one seed and one detector."""
    phases = {phase.name: phase for phase in config.phases}
    found: dict[str, dict[str, Any]] = {}
    ordinary: dict[str, PhaseResult] = {}
    for chain, rows in CHAINS.items():
        chained = replace(config, phases=tuple(phases[name] for name in chain))
        run = PhasesRun(chained)
        run.test = drawn(run.test, test_records)
        if not found:
            found["base model"] = {
                **_guarantee(None, 0),
                **_quality(run, run.assembly.start, candidates),
                "cpu_seconds": 0.0,
                "phases": [],
            }
        with tempfile.TemporaryDirectory() as folder:
            done = [ordinary[chain[0]]] if chain[0] in ordinary else []
            results = run.train(Path(folder), done)
        if chain[0] in ("plain", "redacted"):
            ordinary[chain[0]] = results[0]
        for length, row in enumerate(rows, start=1):
            if row:
                part = replace(chained, phases=chained.phases[:length])
                found[row] = {
                    **_guarantee(part, run.population),
                    **_quality(run, results[length - 1].adapter, candidates),
                    "cpu_seconds": sum(phase.cpu_seconds for phase in results[:length]),
                    "phases": [phase.to_json() for phase in results[:length]],
                }
    size = {
        "population": run.population,
        "records": config.run.data.train_records,
        "copies": config.run.data.canary_copies,
        "delta": config.run.privacy.delta,
        "model": _model_name(config.run.model.name),
        "dimension": run.assembly.layout.dim,
    }
    return [{"row": row, **values, **size} for row, values in found.items()]


def _guarantee(config: PhasesConfig | None, population: int) -> dict[str, Any]:
    """What a row guarantees; the base model has read no private text."""
    if config is None:
        return {"guarantee": "public", "record_epsilon": 0.0, "selective_epsilon": None, "noise_epsilon": 0.0}
    found = guarantee_of(config, plan_noise(config, population))
    return {
        "guarantee": found.kind,
        "record_epsilon": found.to_json()["record_epsilon"],
        "selective_epsilon": found.selective_epsilon,
        "noise_epsilon": found.noise_epsilon,
        "not_private": found.not_private,
    }


def _quality(run: PhasesRun, adapter: Tensor, candidates: int) -> dict[str, Any]:
    """Perplexity on the test paragraphs, and exposure of the planted secrets behind the canary's own prefix."""
    metrics = run.engine.evaluate(adapter, run.test)
    data = run.config.run.data
    model, tokenizer = load_base(run.config.run.model.name, run.config.run.model.task)
    plain = merge_adapter(model, run.assembly.spec, adapter)
    planted = secrets(data.canary_kind, data.canaries, run.config.run.seed)
    others = secrets(data.canary_kind, candidates, run.config.run.seed, "not planted")
    others = [secret for secret in others if secret not in set(planted)]
    each = exposure.planted_exposures(plain, tokenizer, data.canary_kind, planted, others)
    bits = exposure.mean_interval(each)
    return {
        "perplexity": metrics.perplexity,
        "test_tokens": metrics.count,
        "exposure": bits.bits,
        "exposure_low": bits.low,
        "exposure_high": bits.high,
        "exposure_cap": math.log2(len(others) + 1),
        "canaries": len(planted),
    }


def _model_name(name: str) -> str:
    """The name of a base model, without the place of a folder; of a checkpoint of ours, the step it is from."""
    log = Path(name) / "training.jsonl"
    if not log.is_file():
        return Path(name).name if Path(name).is_dir() else name
    return f"lacquer-small, unfinished, step {json.loads(log.read_text().splitlines()[-1])['step']}"


def drawn(records: Records, count: int) -> Records:
    """So many of the test records, the same for every seed."""
    if not 0 < count < len(records):
        return records
    rows = simulation_generator(0, "test paragraphs").permutation(len(records))[:count]
    return records.select(np.sort(rows))


ORDER = (
    "base model",
    "no DP",
    "no DP + ATDP",
    "redacted",
    "redacted + ATDP",
    "JFT",
    "JFT + ATDP",
    "DP-SGD",
    "DP-SGD + ATDP",
)

SETS = {"missed": "Detector that misses the secrets", "found": "Detector that finds the secrets"}

NULL = 1.4427
"""Mean exposure in bits of a secret that was never seen: its rank is uniform, and the mean of -log2 u is 1/ln 2."""


def comparison(results: Mapping[str, Any]) -> str:
    """One table for every preset, kind of canary and detector: means over seeds."""
    groups = grouped(results["rows"], lambda row: (row["preset"], row["kind"], row["detector"]))
    return "\n".join(
        f"**{SETS[detector]}** ({kind}, preset `{preset}`)\n\n{_one(groups[preset, kind, detector])}"
        for preset, kind, detector in sorted(groups)
    )


def _one(rows: Sequence[Row]) -> str:
    runs = grouped(rows, lambda row: row["row"])
    columns: Columns = {
        "": lambda row: row["name"],
        "perplexity": lambda row: mean_text(_values(row, "perplexity"), 2),
        "exposure, bits": lambda row: mean_text(_values(row, "exposure"), 2),
        "95 %": lambda row: " to ".join(f"{mean(_values(row, end)):.2f}" for end in ("exposure_low", "exposure_high")),
        "training": lambda row: duration_text(mean(_values(row, "cpu_seconds"))),
        "guarantee": lambda row: _guarantee_text(row["runs"][0]),
    }
    shown = table([{"name": name, "runs": runs[name]} for name in ORDER if name in runs], columns, "lrrrrl")
    one, seeds = rows[0], distinct(rows, "seed")
    counted = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"
    return (
        f"{shown}\n{counted}; {number_text(one['population'])} protected records, of which {one['canaries']} secrets "
        f"are planted in {one['copies']} each; model `{one['model']}`, {number_text(one['dimension'])} values trained; "
        f"perplexity over {number_text(one['test_tokens'])} tokens of WikiText-2 validation; exposure by this sample "
        f"is at most {one['exposure_cap']:.1f} bits, and {NULL:.2f} bits in the mean for secrets never seen; intervals "
        "are over secrets, means of the seeds' limits; training is processor time of one core.\n"
    )


def _values(row: Row, name: str) -> list[float]:
    return [run[name] for run in row["runs"]]


def _guarantee_text(row: Row) -> str:
    """The guarantee of a row in plain words; every epsilon rounded up."""
    at = f"δ {row['delta']:g}"
    match row["guarantee"]:
        case "public":
            return "has read no private text"
        case "record":
            return f"record level: ε {epsilon_text(row['record_epsilon'])}, {at}"
        case "selective":
            if not row["selective_epsilon"]:
                return "record level: none (ε infinite); selective-DP ε 0 if the detector were perfect"
            return (
                f"record level: none (ε infinite); selective-DP ε {epsilon_text(row['selective_epsilon'])}, {at}, if "
                "the detector were perfect"
            )
        case _:
            return "none (ε infinite)"


if __name__ == "__main__":
    typer.run(main)
