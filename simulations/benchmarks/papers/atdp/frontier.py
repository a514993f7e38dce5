r"""Exposure against perplexity behind training without noise: the curves of docs/results/atdp.md.

Run: `python -m simulations.benchmarks papers.atdp.frontier --data FOLDER`, the folder of WikiText-2's parquet files.

A short phase with noise lowers the exposure of what was memorised before, and raises perplexity. So does any damage to
the adapter. The question, stated before the first run: **at equal perplexity, does ATDP's phase lie below, on or above
the curve of noise alone, which reads no record?** Below, its gradients do something; on it, the noise does all; above,
they teach the secret again. One model is fine-tuned without noise per seed, and every arm starts from it:

===============  =======================================================================================
ATDP             weighted tokens, rise-reset noise
unweighted       the same, every token weighs 1
constant noise   the same as ATDP, with one multiplier, the root mean square of the drawn schedule
noise alone      the steps of ATDP with an empty batch each: nothing but noise is released
shrinking        no training: what fine-tuning changed of the adapter, times a factor
other text       training without noise on public paragraphs (WikiText-2 test) that hold no secret
===============  =======================================================================================

Four or five strengths each: the learning rate of the noisy phases, the factor, the steps on other text. Exposure is
exact: the rank of each secret among all 10^6 numbers, 19.9 bits at most. The figure of merit is the difference of
exposures at the same perplexity, read off each arm's curve and paired by seed; beside it stands the smallest difference
that so many seeds find four times in five.

No arm has a guarantee: the start has read the secrets without noise. Private phases are charged to a real ledger whose
commitment says so. Appends to ``results/atdp-frontier.json``; what is there is not measured again.
"""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from client.data.canaries import DIGITS, secrets
from client.data.prepare import prepare
from client.data.records import Records
from client.engine.local_training import LocalTraining
from client.models.base import load_base
from client.models.lora import merge_adapter
from client.record_level.training import private_training
from privacy.randomness.sampling import CohortSampler
from server.runs.assembly import data_spec
from server.runs.phase_plan import DpPhase, PhasesConfig
from server.runs.phases import PhasesRun
from server.runs.public_data import train_without_noise
from simulations.audit import exposure
from simulations.benchmarks.harness.results import RESULTS, environment, origin, say
from simulations.benchmarks.papers.atdp.chains import HERE, drawn, recipe
from strategies.controllers.controller import PublicSignals
from strategies.controllers.schedules import RiseReset

RATES = (1.5e-3, 2.5e-3, 3.25e-3, 4e-3, 5e-3)
STRENGTHS: dict[str, tuple[float, ...]] = {
    "ATDP": RATES,
    "unweighted": RATES[1:],
    "constant noise": RATES[1:],
    "noise alone": RATES,
    "shrinking": (0.85, 0.7, 0.55, 0.4, 0.2),
    "other text": (10, 20, 40, 80, 160),
}
"""Arm -> its strengths, weakest first; the two variants of ATDP leave out the weakest, which hardly moves."""

LENGTH = 6
"""Digits of a secret."""

START, BASE = "start", "base model"
"""The fine-tuned model before any arm, and the model before fine-tuning; rows of strength 0."""

OTHER_TEXT = LocalTraining(optimizer="adamw", learning_rate=2e-3, batch_size=16, epochs=10)
"""As the fine-tuning; steps are an arm's strength."""


class Start:
    """A model of one seed, fine-tuned without noise, and what every arm is trained and measured with.

    Args:
        config: phases "plain" and "atdp".
        test_records: paragraphs that perplexity is measured on.
        folder: where the fine-tuning with these settings is kept, or was before.
    """

    def __init__(self, config: PhasesConfig, test_records: int, folder: Path) -> None:
        self.config = config
        plain, atdp = config.phases
        assert isinstance(atdp, DpPhase)
        self.plain, self.atdp = plain, atdp
        run = PhasesRun(replace(config, phases=(plain,)))
        folder.mkdir(parents=True, exist_ok=True)
        (result,) = run.train(folder)
        self.base, self.adapter, self.cpu_seconds = run.assembly.start, result.adapter, result.cpu_seconds
        self.run = run
        run.test = drawn(run.test, test_records)
        self.model, self.tokenizer = load_base(config.run.model.name, config.run.model.task)
        self._phase_runs: dict[str, PhasesRun] = {}

    def adapter_of(self, arm: str, strength: float) -> Tensor:
        """The adapter that an arm makes of the start."""
        match arm:
            case "base model":
                return self.base
            case "start":
                return self.adapter
            case "shrinking":
                return self.base + strength * (self.adapter - self.base)
            case "other text":
                local = OTHER_TEXT.model_copy(update={"max_steps": int(strength)})
                return train_without_noise(self.run.engine, self.adapter, self._others, local, self.config.run.seed)
            case _:
                return self._noisy(arm, strength)

    @cached_property
    def _others(self) -> Records:
        """Paragraphs of WikiText-2's test file, which nothing here is tested on."""
        source, _, _ = self.config.run.data.test_source.rpartition("@")
        return prepare(data_spec(self.config.run).replace(test_source=f"{source}@test")).test

    def _noisy(self, arm: str, rate: float) -> Tensor:
        """Behind the file's private phase, or its variant, at this learning rate."""
        run = self._phase_run(arm)
        phase = run.config.private_phases[0]
        phase = replace(phase, optimizer_options={**phase.optimizer_options, "learning-rate": rate})
        site, index = run.config.record_level(phase, run.guarantee.not_private), [*run.index.values()][-1]
        with tempfile.TemporaryDirectory() as folder:
            ledger = run.ledger(Path(folder))
            assert ledger is not None
            with ledger:
                sampler, multipliers = CohortSampler.create(), run.planned.multipliers[0]
                training = private_training(site, run.engine, index, ledger, multipliers, sampler)
                if arm == "noise alone":
                    training.gradients = Unread()  # type: ignore[assignment]
                training.begin(self.adapter, PublicSignals(0, None))
                for step in range(1, phase.steps + 1):
                    training.step()
                    training.observe(PublicSignals(step, None))
                adapter: Tensor = training.state.served
        return adapter

    def _phase_run(self, arm: str) -> PhasesRun:
        arm = arm if arm in ("unweighted", "constant noise") else "ATDP"
        if arm not in self._phase_runs:
            phases = (self.plain, variant(self.atdp, arm))
            self._phase_runs[arm] = PhasesRun(replace(self.config, phases=phases))
        return self._phase_runs[arm]

    def measured(self, adapter: Tensor) -> dict[str, Any]:
        """As :func:`exact_quality`, on the test paragraphs."""
        return exact_quality(self.run, self.model, self.tokenizer, adapter)


def exact_quality(run: PhasesRun, model: nn.Module, tokenizer: Any, adapter: Tensor) -> dict[str, Any]:
    """Perplexity on the run's test paragraphs and exact exposure of every six-digit secret, in bits.

    Args:
        model: the run's base model.
        tokenizer: of that model.
    """
    metrics, data = run.engine.evaluate(adapter, run.test), run.config.run.data
    plain = merge_adapter(model, run.assembly.spec, adapter)
    prefix, rows = exposure.split_tokens(tokenizer, data.canary_kind, list(DIGITS))
    scores = exposure.all_numbers(plain, prefix, [row[0] for row in rows], LENGTH)
    planted = [int(secret) for secret in secrets(data.canary_kind, data.canaries, run.config.run.seed)]
    bits = [found.bits for found in exposure.exact_exposures(scores, planted)]
    return {
        "perplexity": round(math.exp(metrics.loss), 4),
        "exposure": round(mean(bits), 4),
        "bits": [round(each, 2) for each in bits],
        "test_tokens": metrics.count,
    }


class Unread:
    """In place of a site's gradients: no unit brings anything, so a release is noise."""

    def of(self, *_: Any) -> Iterator[Any]:
        return iter(())

    of_made_up = of


def variant(phase: DpPhase, arm: str) -> DpPhase:
    """The private phase as an arm has it."""
    if arm == "unweighted":
        return replace(phase, text="original")
    if arm == "constant noise":
        options = phase.controller_options
        named = {name.replace("-", "_"): value for name, value in options.items()}
        shares = RiseReset(**named).profile(phase.steps)  # type: ignore[arg-type]
        multiplier = phase.noise_multiplier * mean(share**2 for share in shares) ** 0.5
        kept = {"clip-norm": options["clip-norm"]}
        return replace(phase, controller="fixed", controller_options=kept, noise_multiplier=multiplier)
    return phase


def main(
    preset: Annotated[Path, typer.Argument(help="A recipe with the phases plain and atdp.")] = HERE
    / "atdp-frontier.toml",
    data: Annotated[Path, typer.Option(help="Folder of WikiText-2's parquet files.")] = Path("wikitext2"),
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,1,2",
    arms: Annotated[str, typer.Option(help="Only these, with commas.")] = ",".join(STRENGTHS),
    test_records: Annotated[int, typer.Option(help="Paragraphs to test on, drawn by seed 0; 0 takes all.")] = 300,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the recipe.")] = None,
    starts: Annotated[Path, typer.Option(help="Folder that keeps the fine-tuned models.")] = Path("atdp-starts"),
    out: Annotated[Path, typer.Option(help="Result file.")] = RESULTS / "atdp-frontier.json",
) -> None:
    """Measure what is not there yet, and write after each point."""
    torch.set_num_threads(1)
    configured = recipe(preset, data, settings)
    document: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    for seed in map(int, seeds.split(",")):
        done = {(row["arm"], row["strength"]) for row in document["rows"] if row["seed"] == seed}
        points = [(BASE, 0), (START, 0), *((arm, at) for arm in arms.split(",") for at in STRENGTHS[arm])]
        missing = [point for point in points if point not in done]
        if not missing:
            continue
        config = configured({"seed": seed})
        start = Start(config, test_records, starts / f"seed-{seed}")
        for arm, strength in missing:
            began = time.process_time()
            found = start.measured(start.adapter_of(arm, strength))
            seconds = time.process_time() - began + (start.cpu_seconds if arm == START else 0.0)
            row = {"seed": seed, "arm": arm, "strength": strength, **found, "cpu_seconds": round(seconds, 1)}
            document["rows"].append({**row, **origin()})
            document["environment"] = environment()
            out.write_text(json.dumps(document, indent=1) + "\n")
            say(f"seed {seed} {arm} {strength:g}: perplexity {row['perplexity']:.2f}, exposure {row['exposure']:.2f}")


if __name__ == "__main__":
    typer.run(main)
