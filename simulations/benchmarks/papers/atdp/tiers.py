"""What the choice of the detector is worth: redaction, JFT and ATDP by four tiers; a table of docs/results/atdp.md.

Run: `python -m simulations.benchmarks papers.atdp.tiers --data FOLDER`, the folder of WikiText-2's parquet files.

The ATDP paper's Table 3 shows perplexity by tier: the more words a tier takes for sensitive, the worse is training on
redacted text, and JFT and ATDP win most of it back. Asked before the first run: is that so here, and **which tiers find
the secrets**, on which all privacy of redaction rests? So each tier has exposure beside perplexity, and beside it what
is known before training: the share of the planted secrets that the detector covers. ``regex``, which finds every one,
is the control.

Three arms a detector: *redacted* (trained without noise on redacted text), *JFT* (the same, then DP-SGD on the
originals), *no DP + ATDP* (trained without noise on the originals, then ATDP with the detector's weights). Exposure is
exact. Appends to ``results/atdp-tiers.json``; a detector that is there for a seed is not measured again.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer

from client.data.canaries import KINDS, secrets
from client.data.sensitive import make_detector
from client.models.base import load_base
from privacy.sensitive_text import TIERS
from server.run_folder.phase_progress import PhaseResult
from server.runs.phase_plan import PhasesConfig
from server.runs.phases import PhasesRun
from simulations.benchmarks.harness.markdown import (
    NOT_MEASURED,
    Row,
    grouped,
    markdown,
    mean_text,
    provenance_of_rows,
)
from simulations.benchmarks.harness.results import RESULTS, origin, say
from simulations.benchmarks.papers.atdp.chains import HERE, NULL, drawn, recipe
from simulations.benchmarks.papers.atdp.frontier import exact_quality
from simulations.history.paired import paired_difference, told_apart
from simulations.report.notation import duration_text, epsilon_text, number_text

DETECTORS = ("regex", *TIERS)
NO_DP, ATDP, REDACTED, JFT = "no DP", "no DP + ATDP", "redacted", "JFT"
CHAINS = {("plain", "atdp"): (NO_DP, ATDP), ("redacted", "private"): (REDACTED, JFT)}
"""Phases in order, and the arm that each prefix is."""


def measured(config: PhasesConfig, test_records: int, plain: list[PhaseResult]) -> list[dict[str, Any]]:
    """One row per arm, of one seed and one detector.

    Args:
        plain: the result of phase "plain", which no detector changes; filled if it is empty.
    """
    data, phases = config.run.data, {phase.name: phase for phase in config.phases}
    model, tokenizer = load_base(config.run.model.name, config.run.model.task)
    found = secrets_found(data.detector, secrets(data.canary_kind, data.canaries, config.run.seed), data.canary_kind)
    rows = []
    for chain, arms in CHAINS.items():
        run = PhasesRun(replace(config, phases=tuple(phases[name] for name in chain)))
        run.test = drawn(run.test, test_records)
        with tempfile.TemporaryDirectory() as folder:
            results = run.train(Path(folder), plain if chain[0] == "plain" else [])
        if chain[0] == "plain":
            plain[:] = results[:1]
        for arm, result in zip(arms, results, strict=True):
            began = time.process_time()
            quality = exact_quality(run, model, tokenizer, result.adapter)
            seconds = result.cpu_seconds + time.process_time() - began
            rows.append({"arm": arm, **quality, "cpu_seconds": round(seconds, 1)})
        if JFT in arms:
            rows[-1]["selective_epsilon"] = run.guarantee.selective_epsilon
    return [{**row, "secrets_found": found, "delta": config.run.privacy.delta} for row in rows]


def secrets_found(detector: str, planted: Sequence[str], kind: str) -> float:
    """The share of the secrets all of whose characters the detector covers in their canary."""
    shape = KINDS[kind]
    spans_of = make_detector(detector).spans([shape.text(secret) for secret in planted])
    covered = []
    for secret, spans in zip(planted, spans_of, strict=True):
        places = {place for span in spans for place in range(span.start, span.stop)}
        covered.append(places.issuperset(range(len(shape.prefix), len(shape.prefix) + len(secret))))
    return mean(covered)


def main(
    preset: Annotated[Path, typer.Argument(help="A recipe with the phases plain, redacted, private and atdp.")] = HERE
    / "atdp-tiers.toml",
    data: Annotated[Path, typer.Option(help="Folder of WikiText-2's parquet files.")] = Path("wikitext2"),
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,1,2",
    detectors: Annotated[str, typer.Option(help="Only these, with commas.")] = ",".join(DETECTORS),
    test_records: Annotated[int, typer.Option(help="Paragraphs to test on, drawn by seed 0; 0 takes all.")] = 300,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the recipe.")] = None,
    out: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "atdp-tiers.json",
) -> None:
    """Measure what is not there yet, and write after each detector."""
    torch.set_num_threads(1)
    configured = recipe(preset, data, settings)
    document: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    for seed in map(int, seeds.split(",")):
        plain: list[PhaseResult] = []
        for detector in detectors.split(","):
            if any((row["seed"], row["detector"]) == (seed, detector) for row in document["rows"]):
                continue
            config = configured({"seed": seed, "data.detector": detector})
            for row in measured(config, test_records, plain):
                document["rows"].append({"seed": seed, "detector": detector, **row, **origin()})
                say(f"seed {seed} {detector}, {row['arm']}: {row['perplexity']:.2f}, {row['exposure']:.2f} bits")
            out.write_text(json.dumps(document, indent=1) + "\n")


def table(results: Mapping[str, Any]) -> str:
    """Perplexity and exposure of every arm by detector, means over seeds; bold where JFT differs from redaction."""
    rows = results["rows"]
    if not rows:
        return NOT_MEASURED
    of = grouped(rows, lambda row: (row["detector"], row["arm"]))
    shown = [detector for detector in DETECTORS if (detector, JFT) in of]
    gains = [
        paired_difference(by_seed(of[detector, JFT], "perplexity"), by_seed(of[detector, REDACTED], "perplexity"))
        for detector in shown
    ]
    perplexities, exposures = [], []
    for detector, gain, told in zip(shown, gains, told_apart(gains), strict=True):
        assert gain is not None
        text = f"{gain.mean:+.2f}" + ("" if gain.half is None else f" ± {gain.half:.2f}")
        redacted, jft, atdp, *bits = [
            mean_text([row[value] for row in of[detector, arm]], 2)
            for value in ("perplexity", "exposure")
            for arm in (REDACTED, JFT, ATDP)
        ]
        marked = f"**{text}**" if told else text
        perplexities.append((f"`{detector}`", redacted, jft, marked, atdp, str(len(gain.values))))
        found = mean(row["secrets_found"] for row in of[detector, JFT])
        exposures.append((f"`{detector}`", f"{found:.0%}", *bits))
    start = {row["seed"]: row for row in rows if row["arm"] == NO_DP}.values()
    perplexity, exposed = (mean_text([row[value] for row in start], 2) for value in ("perplexity", "exposure"))
    epsilon = max(row["selective_epsilon"] for row in rows if row["arm"] == JFT)
    cost = duration_text(sum(row["cpu_seconds"] for row in rows))
    first = markdown(("perplexity", REDACTED, JFT, "JFT less redacted", ATDP, "seeds"), perplexities, "lr")
    second = markdown(("exposure, bits", "secrets found", REDACTED, JFT, ATDP), exposures, "lr")
    return (
        f"{first}\n{second}\nMean ± standard deviation over seeds; differences with 95 % intervals, bold "
        f"where significant (Holm). Without DP, on the originals: perplexity {perplexity}, exposure {exposed} bits; a "
        f"secret never seen has {NULL:.2f} in the mean. JFT has selective-DP ε {epsilon_text(epsilon)}, δ "
        f"{rows[0]['delta']:g}, if the detector were perfect; no row has a guarantee for records. Perplexity over "
        f"{number_text(rows[0]['test_tokens'])} tokens of WikiText-2 validation.\n"
        f"{provenance_of_rows(rows, f'{cost} of one core; ')}"
    )


def by_seed(rows: Sequence[Row], value: str) -> dict[int, float]:
    """A value of each seed's row."""
    return {row["seed"]: row[value] for row in rows}


if __name__ == "__main__":
    typer.run(main)
