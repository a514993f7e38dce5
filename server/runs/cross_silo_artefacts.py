"""What a federation of silos leaves behind; its privacy.json repeats what the silos say of their own commitments."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from client.models.frozen_linear import batch_invariance_note
from client.models.lora import LoraSpec, as_one_adapter, save_peft
from client.models.tasks import Metrics
from privacy.ledger.statement import rounded_up
from server.run_folder.names import ADAPTER_FOLDER, PRIVACY_FILE, RESULTS_FILE
from server.run_folder.progress import Progress, Said
from server.runs.artefacts import how_to_use, majority_accuracy, perplexities, rouge_sentence
from server.runs.guarantee import not_covered
from server.runs.record_level_assembly import Federation
from strategies.adapter.layout import AdapterLayout
from strategies.cross_silo import GlobalModel


class Final(NamedTuple):
    """An adapter on the base model as it was loaded."""

    vector: Tensor
    layout: AdapterLayout
    spec: LoraSpec


@dataclass(frozen=True)
class Outcome:
    """Of a federation of silos.

    Attributes:
        validation, test: of the last adapter.
        stopped: why it ended before the last round, or None.
        adapter: to be saved, see :func:`final_adapter`.
        rouge: what :func:`server.evaluation.rouge.adapter_rouge` found of it.
    """

    validation: Metrics
    test: Metrics
    stopped: str | None
    adapter: Final
    rouge: Mapping[str, Any]


def final_adapter(ready: Federation, model: GlobalModel) -> Final:
    """The adapter of a federation, with what its aggregation adds to the base in it."""
    final = Final(model.served, ready.described.layout, ready.described.spec)
    if model.residual is None:
        return final
    return Final(*as_one_adapter(final.vector, model.residual, final.layout, final.spec))


def write_silo_artefacts(folder: Path, ready: Federation, progress: Progress, outcome: Outcome) -> None:
    """Write adapter/, privacy.json and results.json."""
    config, silo, validation, test = ready.config, ready.silo, outcome.validation, outcome.test
    statement = _statement(ready, progress.silos)
    (folder / PRIVACY_FILE).write_text(json.dumps(statement, indent=2) + "\n")
    results = {
        **perplexities(validation, test),
        **outcome.rouge,
        "test_accuracy": test.accuracy,
        "test_loss": test.loss,
        "test_records": test.count,
        "validation_accuracy": validation.accuracy,
        "validation_loss": validation.loss,
        "validation_records": validation.count,
        "majority_accuracy": majority_accuracy(ready.data),
        "seconds": progress.seconds,
        "rounds_done": progress.round,
        "stopped": outcome.stopped,
        "dimension": ready.described.layout.dim,
        "model": config.model.name,
        "label_names": list(ready.data.label_names),
        "not_private": silo.not_private,
    }
    (folder / RESULTS_FILE).write_text(json.dumps(results, indent=2) + "\n")
    final, note = outcome.adapter, ""
    if progress.model.residual is not None:
        rank = final.spec.rank
        note = f"\n\nIts rank is {rank}, for it holds what {config.strategy.aggregation} adds to the base too."
    save_peft(folder / ADAPTER_FOLDER, final.vector, final.layout, final.spec, base=config.model.name)
    use = how_to_use(config, ready.data.label_names)
    base = f"Base model: `{config.model.name}`.{rouge_sentence(outcome.rouge)}{note}"
    card = f"# Adapter of run {config.name}\n\n{statement['sentence']}\n\n{base}\n\n{use}"
    (folder / ADAPTER_FOLDER / "README.md").write_text(card, encoding="utf-8")


def _statement(ready: Federation, silos: Mapping[int, Said]) -> dict[str, Any]:
    """privacy.json of a federation of silos: what each says of its own commitment."""
    silo = ready.silo
    unit = silo.unit.removeprefix("group:")
    worst = max((reply.epsilon for reply in silos.values()), default=0.0)
    sentence = (
        f"This run is NOT PRIVATE: {silo.not_private}."
        if silo.not_private
        else f"With respect to adding or removing one {unit} of any one silo, everything that silo sends in this run "
        f"is differentially private with epsilon at most {rounded_up(worst, 2):.2f} at delta {silo.delta:g}, against "
        "anyone, the server and the other silos included; other runs on the same data are not included and add to it."
    )
    return {
        "sentence": sentence,
        "format": 1,
        "private": silo.not_private is None,
        "not_private": silo.not_private,
        "unit": silo.unit,
        "adjacency": "add_remove",
        "epsilon": rounded_up(worst, 4),
        "delta": silo.delta,
        "mode": silo.mode,
        "mechanism": "DP-SGD in every silo, with the silo's own ledger; the server averages and adds nothing",
        "trust_model": "every silo trusts itself only",
        "silos": {
            str(number): {
                "population": reply.population,
                "epsilon": rounded_up(reply.epsilon, 4),
                "noise_multiplier": reply.noise_multiplier,
            }
            for number, reply in sorted(silos.items())
        },
        "silos_asked": ready.config.clients,
        "not_covered": [
            *not_covered(ready.config, steered=ready.methods.steered),
            *batch_invariance_note(ready.config.engine.precision),
        ],
    }
