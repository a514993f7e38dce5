"""Three ratios of the engine to plain PEFT, measured again beside those that are committed.

Run: `python -m simulations.benchmarks engine.guard [--write]`, a minute and a half. Both sides of a ratio are
measured in turn in the same run, so a slow or busy machine slows both. It fails where a ratio is below 0.8 of the
committed one, so that a loss of speed is seen when it happens; the rest is room for hosts that share a name and differ.
On another processor, other vector units or another torch the ratios are others, up to twice as large in what was
measured (AMD EPYC: 3.5, 3.3 and 1.8); there it fails below half of the committed ones, and says so. The best of three
attempts counts: a machine that is busy for a moment slows the variants unequally. The tiny job is that of
`engine.speed`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
import typer

from simulations.benchmarks.engine import jobs
from simulations.benchmarks.harness.results import RESULTS, environment, say, write
from simulations.benchmarks.harness.timing import interleaved, one_thread, ratios

KEPT, KEPT_ELSEWHERE = 0.8, 0.5
"""Of a committed ratio, on the machine where it was measured and on any other."""
ATTEMPTS, ROUNDS = 3, 5
NAME = "engine-guard"


def measured(rounds: int = ROUNDS, clients: int = 128) -> Iterator[dict[str, Any]]:
    """One row a job: CPU time of plain PEFT over the engine's, the median over rounds."""
    cohorts = (
        ("local training, tiny, 4 x 16", jobs.tiny, jobs.uniform_clients(clients, 8, 16), 4),
        ("local training, MiniLM, ragged", jobs.minilm, jobs.ragged_clients(max(1, clients // 16), None), 10),
        ("record gradients, MiniLM, 16 x 64", jobs.minilm, jobs.uniform_clients(max(1, clients // 64), 16, 64), 16),
    )
    tiny, ragged, records = (
        jobs.Job(name, model, jobs.SPEC, cohort, jobs.ADAMW.replace(batch_size=batch))
        for name, model, cohort, batch in cohorts
    )
    private = jobs.one_step(records)
    for job, make in (
        (tiny, jobs.engine_training),
        (ragged, jobs.engine_training),
        (private, jobs.private_step),
    ):
        works = {"plain PEFT": jobs.plain_peft(job), "engine": make(job, job.engine("fp32"))}
        yield ratios(job.name, interleaved(works, rounds), "plain PEFT", len(job.clients))[1]


def lost(found: Mapping[str, float], committed: Mapping[str, float], kept: float = KEPT) -> list[str]:
    """The jobs whose ratio is below `kept` of the committed one, in words; a job that is not committed counts too."""
    words = []
    for job, ratio in found.items():
        if job not in committed:
            words.append(f"{job}: no ratio is committed; run engine.guard --write on a quiet machine")
        elif ratio < kept * committed[job]:
            words.append(f"{job}: {ratio:.2f} times plain PEFT, {committed[job]:.2f} is committed")
    return words


def machine(facts: Mapping[str, Any], capability: str | None = None) -> dict[str, Any]:
    """A machine's facts with its vector units, by default those of this one."""
    return {**facts, "capability": capability or torch.backends.cpu.get_cpu_capability()}


def other_machine(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """What makes two machines' ratios incomparable, in words; empty where nothing does."""
    facts = [
        ("processor", here["processor"], there["processor"]),
        ("vector units", here["capability"], there["capability"]),
        ("torch", here["packages"]["torch"], there["packages"]["torch"]),
    ]
    return "; ".join(f"{name} {mine}, not {theirs}" for name, mine, theirs in facts if mine != theirs)


def main(
    write_them: Annotated[bool, typer.Option("--write", help="commit to the ratios found now")] = False,
    quick: jobs.Quick = False,
) -> None:
    """Measure; compare or write."""
    one_thread()
    if quick:
        say(*measured(1, 2))
        return
    if write_them:
        rows = list(measured())
        say(*(f"{row['job']}: {row['ratio']:.2f}" for row in rows))
        write(NAME, {"seeds": [0], "capability": torch.backends.cpu.get_cpu_capability(), "ratios": rows})
        return
    committed = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))
    kept = KEPT
    if other := other_machine(machine(environment()), machine(committed["environment"], committed["capability"])):
        kept = KEPT_ELSEWHERE
        say(f"judged by {kept:g} of the committed ratios and not by {KEPT:g}: {other}")
    wanted = {row["job"]: row["ratio"] for row in committed["ratios"]}
    best: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        for row in measured():
            best[row["job"]] = max(best.get(row["job"], 0.0), row["ratio"])
        if not lost(best, wanted, kept):
            break
    say(*(f"{job}: {ratio:.2f} times plain PEFT, {wanted.get(job, 0):.2f} is committed" for job, ratio in best.items()))
    if words := lost(best, wanted, kept):
        say("", "The engine has become slower:", *words)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
