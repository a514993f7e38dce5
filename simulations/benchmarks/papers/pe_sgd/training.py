"""Five ways to spend epsilon 1 on a few hundred texts: the tables of docs/results/pe-sgd.md.

Run: `python -m simulations.benchmarks papers.pe_sgd.training SETTINGS --data FOLDER --output FILE [--tuned FILE]`.

SETTINGS is a file of numbers, read strictly (``pesgd-small.toml``, ``pesgd-paper.toml`` beside this module). DP-SGD,
PDP-SGD, GEP, FixSample and PE-SGD train the same adapter on the same private texts at the same epsilon, from the same
start: an adapter tuned on the first synthetic set, which is public. Releases are charged to a real ledger.

Without `--tuned` it tries the learning rates of every method, with a seed that is not reported and on texts that are
neither private in, nor tested by, any reported cell. With `--tuned FILE`, the output of that, it runs the best rates
with every seed: each method at its own. With `--common` it runs every rate with every seed: all methods at the same.
Cells that are in the output are not run again.
"""

import hashlib
import json
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import pyarrow.parquet
import torch
import typer
from pydantic import BaseModel, ConfigDict, model_validator

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import make_task
from client.record_level.calibration import commit
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.public_subspace import PublicSpan, in_public_span, public_bounds
from client.record_level.settings import RecordLevelSettings
from client.record_level.synthetic_texts import Synthesis, Synthesiser
from client.record_level.training import private_training
from client.record_level.units import UnitIndex
from privacy import checks
from privacy.ledger.ledger import Ledger
from privacy.randomness.rng import simulation_generator
from privacy.randomness.sampling import CohortSampler
from simulations.benchmarks.harness.results import origin, say
from strategies.adapter.trainable import TrainedSubset
from strategies.controllers.controller import PublicSignals


class Settings(BaseModel):
    """One comparison: a settings file, whose names have hyphens.

    Attributes:
        model: base model, see :mod:`client.models.base`.
        rank, alpha, targets: of the adapter.
        longest: tokens of a text, private, synthetic or of the test.
        private: private texts, M; each is a unit.
        test: texts the loss is reported on.
        samples, variants, openings, form, rule: of the synthetic texts, see
            :class:`client.record_level.synthetic_texts.Synthesis`.
        instruction: what asks for a variation, in the instruction form, which needs one; the other has none.
        steps: T.
        batch: expected private texts in a step.
        epsilon, delta: the guarantee.
        directions: k of PDP-SGD and GEP.
        warm_start_epochs, warm_start_learning_rate: training on the first synthetic texts before step 1.
        rates: learning rates that are tried.
        evaluate_at: steps after which the test loss is noted, besides the last.
        token_budget: tokens of a micro-batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"))

    model: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    longest: int
    private: int
    test: int
    samples: int
    variants: int
    openings: tuple[str, ...]
    form: str
    rule: str
    steps: int
    batch: int
    epsilon: float
    delta: float
    directions: int
    warm_start_epochs: int
    warm_start_learning_rate: float
    rates: tuple[float, ...]
    evaluate_at: tuple[int, ...]
    token_budget: int
    instruction: str = ""

    @model_validator(mode="after")
    def _texts_can_be_made(self) -> Self:
        if (self.form == "instruction") != bool(self.instruction):
            raise ValueError(
                f"instruction must be set with form = 'instruction' and only there, got {self.instruction!r} with form "
                f"= {self.form!r}"
            )
        _ = self.synthesis
        return self

    @property
    def synthesis(self) -> Synthesis:
        """How the texts are made; ValueError for what cannot be."""
        named = {"samples", "longest", "openings", "variants", "form", "rule", "instruction"}
        return Synthesis(**self.model_dump(include=named, exclude_defaults=True))

    def to_json(self) -> dict[str, Any]:
        """Plain values; without an instruction where there is none."""
        return self.model_dump(mode="json", exclude_defaults=True)


def read_settings(path: Path) -> Settings:
    """Settings from a TOML file; ValueError for a name that is missing or unknown, or a value that cannot be."""
    try:
        return Settings.model_validate(tomllib.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


METHODS = {
    "DP-SGD": None,
    "PDP-SGD": "projection",
    "GEP": "embedding-residual",
    "FixSample": "coefficients",
    "PE-SGD": "coefficients",
}
"""Name -> what ``PublicSpan`` calls it; FixSample is PE-SGD with texts that never change."""

TUNING_SEED = 1000
TUNING_TEXTS = 1000
"""The first so many test texts are for tuning only: stand-ins for the private ones, and a validation set."""


@dataclass
class Bench:
    """One base model at work, and one that writes."""

    settings: Settings
    model: str
    spec: LoraSpec = field(init=False)
    engine: CohortEngine = field(init=False)

    def __post_init__(self) -> None:
        chosen = self.settings
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.spec = LoraSpec(chosen.rank, chosen.alpha, tuple(chosen.targets))
        self.writer, self.tokenizer = load_base(self.model, "causal-lm")
        worker, _ = load_base(self.model, "causal-lm")
        self.adapter = initial_adapter(adapter_layout(worker, self.spec), worker, 0)
        self.engine = CohortEngine(
            worker, self.spec, make_task("causal-lm"), token_budget=chosen.token_budget, device=device
        )

    def records(self, texts: list[str]) -> Records:
        """Tokens with the end-of-text token behind, as prepared data has them."""
        longest, end = self.settings.longest, self.tokenizer.eos_token_id
        rows = self.tokenizer(texts, truncation=True, max_length=longest - 1, return_attention_mask=False)["input_ids"]
        return Records.from_lists([[*row[: longest - 1], end] for row in rows])

    def weights(self) -> str:
        """A digest of the base model's weights, as they were loaded."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.writer.state_dict().items()):
            digest.update(name.encode() + tensor.float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def synthesiser(self, seed: int) -> Synthesiser:
        """PE-SGD's writer, whose public draws come from `seed`."""
        synthesis = self.settings.synthesis
        return Synthesiser(self.writer, self.tokenizer, self.spec, synthesis, seed, self.engine.device)


@dataclass
class Seed:
    """What all methods of one seed share: private and test texts, the first synthetic set, the start."""

    bench: Bench
    seed: int
    private: Records
    test: Records

    def __post_init__(self) -> None:
        chosen, bench = self.bench.settings, self.bench
        self.base_loss = bench.engine.evaluate(bench.adapter, self.test).loss
        self.synthesiser = bench.synthesiser(self.seed)
        self.texts = self.synthesiser.initial(bench.adapter)
        local = LocalTraining(
            optimizer="adamw",
            learning_rate=chosen.warm_start_learning_rate,
            batch_size=8,
            epochs=chosen.warm_start_epochs,
        )
        layout = bench.engine.layout
        moved = bench.engine.train_all(bench.adapter, [self.texts], local, [self.seed])[0]
        self.start = layout.with_trainable(bench.adapter, layout.trainable_values(bench.adapter) + moved.float())
        at_start = bench.engine.evaluate(self.start, self.test)
        self.start_loss, self.start_accuracy = at_start.loss, at_start.accuracy
        span = PublicSpan(bench.engine, self.texts, "projection", rank=chosen.directions)
        self.bounds = public_bounds(span, self.start, TrainedSubset())

    def site(self, method: str, optimizer: str, options: dict[str, Any]) -> RecordLevelSettings:
        """The settings of a method; thresholds are medians over the first synthetic texts."""
        chosen, (whole, embedded, _) = self.bench.settings, self.bounds
        return RecordLevelSettings(
            unit="record",
            steps=chosen.steps,
            batch_size=chosen.batch,
            epsilon=chosen.epsilon,
            delta=chosen.delta,
            controller="fixed",
            controller_options={"clip-norm": embedded if method == "GEP" else whole},
            optimizer=optimizer,
            optimizer_options=options,
            seed=self.seed,
        )

    @contextmanager
    def training(self, method: str, site: RecordLevelSettings) -> Iterator[PrivateSgd]:
        """A training that has begun at the start, on a ledger of its own."""
        bench, kind, index = self.bench, METHODS[method], UnitIndex.of(self.private, grouped=False)
        commitment, multipliers = commit(site, len(index))
        with (
            tempfile.TemporaryDirectory() as folder,
            Ledger.create(Path(folder) / "ledger.jsonl", commitment) as ledger,
        ):
            training = private_training(site, bench.engine, index, ledger, multipliers, CohortSampler.create())
            if kind is not None:
                evolve = self.synthesiser.evolve_texts if method == "PE-SGD" else None
                span = PublicSpan(bench.engine, self.texts, kind, bench.settings.directions, self.bounds[2], evolve)
                training = in_public_span(training, span)
            training.begin(self.start, PublicSignals(0, None))
            yield training

    def cell(self, method: str, rate: float) -> dict[str, Any]:
        """Train once; what is reported of it."""
        chosen, bench, began = self.bench.settings, self.bench, time.process_time()
        adam = {"learning-rate": rate, "bias-correction": False, "beta2": 0.999, "weight-decay": 0.01}
        site = self.site(method, "fedadamw", adam)
        losses = []
        with self.training(method, site) as training:
            for step in range(1, chosen.steps + 1):
                training.step()
                training.observe(PublicSignals(step, None))
                if step in chosen.evaluate_at or step == chosen.steps:
                    metrics = bench.engine.evaluate(training.state.adapter, self.test)
                    losses.append([step, round(metrics.loss, 5)])
            spent, multiplier = training.ledger.epsilon_spent(), training.planner.info.noise_multiplier(1)
        return {
            "method": method,
            "seed": self.seed,
            "learning_rate": rate,
            "loss": losses[-1][1],
            "accuracy": round(metrics.accuracy, 5),
            "losses": losses,
            "start_loss": round(self.start_loss, 5),
            "start_accuracy": round(self.start_accuracy, 5),
            "base_loss": round(self.base_loss, 5),
            "epsilon": spent,
            "noise_multiplier": multiplier,
            "clip_norm": site.controller_options["clip-norm"],
            "values": bench.engine.layout.dim,
            "cpu_seconds": round(time.process_time() - began, 1),
        }


def texts_of(path: Path) -> list[str]:
    """The column `text` of a parquet file."""
    texts: list[str] = pyarrow.parquet.read_table(path).column("text").to_pylist()
    return texts


def seed_of(bench: Bench, data: Path, seed: int, tuning: bool) -> Seed:
    """Private and test texts of a seed: from the validation file and behind the tuning texts of the test file.

    A corpus without a validation file lends the second half of its test file.
    """
    chosen, draws = bench.settings, simulation_generator(seed, "pesgd texts")
    others = texts_of(data / "test.parquet")
    if tuning:
        order = draws.permutation(TUNING_TEXTS)
        private = [others[i] for i in order[: chosen.private]]
        test = [others[i] for i in order[chosen.private :][: chosen.test]]
    else:
        apart = data / "validation.parquet"
        half = len(others) if apart.is_file() else len(others) // 2
        pool = texts_of(apart) if apart.is_file() else others[half:]
        private = [pool[i] for i in draws.choice(len(pool), chosen.private, replace=False)]
        fixed = simulation_generator(0, "pesgd test texts").choice(half - TUNING_TEXTS, chosen.test, replace=False)
        test = [others[TUNING_TEXTS + i] for i in np.sort(fixed)]
    return Seed(bench, seed, bench.records(private), bench.records(test))


def wanted(
    settings: Settings,
    tuned: Path | None,
    seeds: list[int],
    methods: list[str],
    limits: tuple[float, float],
    common: bool = False,
) -> Iterator[tuple[int, str, float]]:
    """Cells: all rates of every method with the tuning seed, or with each of `seeds`, or the best rates of `tuned`."""
    rates = [rate for rate in settings.rates if limits[0] <= rate <= limits[1]]
    if tuned is None:
        for seed in seeds if common else [TUNING_SEED]:
            yield from ((seed, method, rate) for method in methods for rate in rates)
        return
    rows = json.loads(tuned.read_text())["cells"]
    for seed in seeds:
        for method in methods:
            yield seed, method, min((r["loss"], r["learning_rate"]) for r in rows if r["method"] == method)[1]


def main(
    settings_file: Path,
    data: Annotated[Path, typer.Option(help="folder with validation.parquet and test.parquet")],
    output: Annotated[Path, typer.Option(help="JSON of cells, added to")],
    tuned: Annotated[Path | None, typer.Option(help="output of a run without this option, which tunes")] = None,
    common: Annotated[bool, typer.Option("--common", help="every rate with every seed, in place of tuning")] = False,
    seeds: Annotated[str, typer.Option(help="reported seeds, with commas")] = "0,1,2",
    model: Annotated[str, typer.Option(help="folder of the settings' model, where it is not installed")] = "",
    methods: Annotated[str, typer.Option(help="only these, with commas")] = ",".join(METHODS),
    rates: Annotated[tuple[float, float], typer.Option(help="least and largest rate to try")] = (0.0, 1.0),
    threads: int = 1,
) -> None:
    """Run the cells that are missing and write after each."""
    torch.set_num_threads(threads)
    settings = read_settings(settings_file)
    bench = Bench(settings, model or settings.model)
    found: dict[str, Any] = {"settings": settings.to_json(), "cells": []}
    if output.exists():
        found = json.loads(output.read_text())
        if found["settings"] != settings.to_json():
            raise typer.BadParameter(f"{output} holds cells of other settings; move it away")
    done = {(row["seed"], row["method"], row["learning_rate"]) for row in found["cells"]}
    numbers = [int(seed) for seed in seeds.split(",")]
    checks.not_empty(seeds=numbers)
    prepared: dict[int, Seed] = {}
    names = methods.split(",")
    for name in names:
        checks.one_of(METHODS, method=name)
    for seed, method, rate in wanted(settings, tuned, numbers, names, rates, common):
        if (seed, method, rate) in done:
            continue
        if seed not in prepared:
            prepared = {seed: seed_of(bench, data, seed, seed == TUNING_SEED)}
        row = prepared[seed].cell(method, rate)
        where = {**origin(), "date": datetime.now(UTC).date().isoformat()}
        found["cells"].append({**row, "model": settings.model, "weights": bench.weights(), **where})
        output.write_text(json.dumps(found, indent=1) + "\n")
        say(f"{row['method']} seed {seed} rate {rate:g}: {row['loss']:.4f} ({row['cpu_seconds']} CPU s)")


if __name__ == "__main__":
    typer.run(main)
