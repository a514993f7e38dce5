"""What a recipe's run ends with, and the files it leaves behind: every one says so where there is no guarantee."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from client.models.frozen_linear import batch_invariance_note
from client.models.lora import LoraSpec, save_peft
from client.models.tasks import Metrics
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from server.run_folder.names import ADAPTER_FOLDER, PRIVACY_FILE, RESULTS_FILE
from server.run_folder.phase_progress import PhaseResult
from server.run_folder.provenance import write_environment
from server.run_folder.resume import read_resumed
from server.runs.artefacts import how_to_use, perplexities, rouge_sentence
from server.runs.guarantee import NOT_COVERED, TRUST, Guarantee
from server.runs.phase_config import PhasesConfig
from server.runs.phase_plan import DpPhase, Phase, PlannedNoise
from strategies.adapter.layout import AdapterLayout

STAMP_FILE = "NOT-PRIVATE.txt"
"""In the run folder and beside the adapter, wherever there is no record-level guarantee."""


@dataclass(frozen=True)
class PhasesResult:
    """What a recipe's run ended with.

    Attributes:
        promise: its guarantee.
        planned: the noise.
        phases: one result each.
        test: of the final adapter.
        validation: of the final adapter.
        adapter: full vector, of the layout of `spec` on the base model.
        spec: the adapters.
        dimension: values trained.
        population: protected units.
        label_names: of the classes, in the order of the model's outputs; empty for a language model.
        rouge: what :func:`server.evaluation.rouge.adapter_rouge` found.
    """

    promise: Guarantee
    planned: PlannedNoise
    phases: tuple[PhaseResult, ...]
    test: Metrics
    validation: Metrics
    adapter: Tensor
    spec: LoraSpec
    dimension: int
    population: int
    label_names: tuple[str, ...]
    rouge: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Training time of all phases."""
        return sum(phase.seconds for phase in self.phases)


def write_phases_artefacts(
    folder: Path, config: PhasesConfig, result: PhasesResult, layout: AdapterLayout, ledger: Ledger | None
) -> None:
    """adapter/, privacy.json, results.json; without a record-level guarantee every one of them says so."""
    promise, run = result.promise, config.run
    statement: dict[str, Any] = {**promise.to_json(), "private": promise.kind == "record"}
    statement["phases"] = [_described(config, phase) for phase in config.recipe.phases]
    if ledger is not None:
        further = batch_invariance_note(run.engine.precision)
        statement["ledger"] = privacy_statement(ledger, trust_model=TRUST, not_covered=NOT_COVERED, further=further)
    _write_json(folder / PRIVACY_FILE, statement)
    results = {
        **perplexities(result.validation, result.test),
        **result.rouge,
        **(_accuracies(result) if result.label_names else {}),
        "test_loss": result.test.loss,
        "validation_loss": result.validation.loss,
        "seconds": result.seconds,
        "phases": [phase.to_json() for phase in result.phases],
        "dimension": result.dimension,
        "population": result.population,
        "model": run.model.name,
        "label_names": list(result.label_names),
        "guarantee": promise.sentence,
        "not_private": promise.not_private,
        "resumed": [asdict(resumed) for resumed in read_resumed(folder)],
    }
    write_environment(folder)
    save_peft(folder / ADAPTER_FOLDER, result.adapter, layout, result.spec, base=run.model.name)
    card = f"# Adapter of recipe {run.name}\n\n{promise.sentence}\n\nBase model: `{run.model.name}`."
    card += f"{rouge_sentence(result.rouge)}\n\n"
    card += how_to_use(run, result.label_names)
    (folder / ADAPTER_FOLDER / "README.md").write_text(card, encoding="utf-8")
    stamp(promise, folder, folder / ADAPTER_FOLDER)
    _write_json(folder / RESULTS_FILE, results)  # last: with this file the run has ended


def stamp(promise: Guarantee, *folders: Path) -> None:
    """Without a record-level guarantee, every folder that holds an adapter says so."""
    if promise.not_private is not None:
        for folder in folders:
            (folder / STAMP_FILE).write_text(promise.sentence + "\n", encoding="utf-8")


def _accuracies(result: PhasesResult) -> dict[str, float]:
    return {"test_accuracy": result.test.accuracy, "validation_accuracy": result.validation.accuracy}


def _described(config: PhasesConfig, phase: Phase) -> dict[str, Any]:
    kind = "private" if isinstance(phase, DpPhase) else "ordinary"
    detector = None if phase.text == "original" else config.recipe.detector_of(phase)
    return {"kind": kind, **vars(phase), "detector": detector}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
