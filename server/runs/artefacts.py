"""What a finished run leaves behind: privacy.json, the adapter as PEFT files with its card, digests, results.json.

One writer for every kind of run. results.json comes last, and all else is on the disk by then: a run that has it has
ended, so a loss of power must leave neither half of it nor it alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from peft import TaskType
from torch import Tensor

from client.data.chat import template_of
from client.data.prepared import PreparedData
from client.models.base import load_tokenizer
from client.models.confusion import recalls
from client.models.export import save_tokenizer
from client.models.files import hub_id
from client.models.lora import LoraSpec, save_peft
from client.models.tasks import Metrics
from privacy import durable
from server.config.schema import RunConfig
from server.evaluation.card import card
from server.run_folder.names import ADAPTER_FOLDER, PRIVACY_FILE, RESULTS_FILE, STAMP_FILE
from server.run_folder.seal import ENDED, write_seal
from server.run_folder.telemetry import read_metrics
from strategies.adapter.layout import AdapterLayout


class Final(NamedTuple):
    """An adapter on the base model as it was loaded: full vector, its layout, its specification."""

    vector: Tensor
    layout: AdapterLayout
    spec: LoraSpec


@dataclass(frozen=True)
class Outcome:
    """Utility of the final adapter on public data, and how the run went.

    Attributes:
        validation: on the public validation records that nothing was trained on.
        test: on the test set, which is used for nothing else.
        public_test: on the test set, of the adapter before round 1; None where that was not trained on public records.
        rounds_done: released.
        seconds: wall time from configuration to here.
        stopped: why the run ended before its last round, or None.
        dimension: trained values, the most of any round.
        note: a sentence for the card.
        further: results of this kind of run alone.
    """

    adapter: Final
    validation: Metrics
    test: Metrics
    data: PreparedData
    rounds_done: int
    seconds: float
    stopped: str | None
    dimension: int
    answers: Mapping[str, Any]
    public_test: Metrics | None = None
    note: str = ""
    further: Mapping[str, Any] = field(default_factory=dict)


def write_artefacts(folder: Path, config: RunConfig, outcome: Outcome, statement: Mapping[str, Any]) -> None:
    """Write privacy.json, adapter/, the digests of all that stays as it is, and results.json into the run folder.

    Args:
        statement: what it guarantees, see :mod:`server.runs.guarantee`; where it guarantees nothing, every folder
            that holds an adapter says so.
    """
    durable.write(folder / PRIVACY_FILE, _json_text(statement))
    final, names = outcome.adapter, outcome.data.label_names
    save_adapter(folder / ADAPTER_FOLDER, config, final)
    text = card(config, statement, outcome.test, outcome.answers, names, final.spec, outcome.note)
    (folder / ADAPTER_FOLDER / "README.md").write_text(text, encoding="utf-8")
    stamp(statement, folder / ADAPTER_FOLDER)
    for path in (*(folder / ADAPTER_FOLDER).iterdir(), folder / ADAPTER_FOLDER):
        durable.sync(path)
    results = {
        **_started(folder),
        **perplexities(outcome.validation, outcome.test),
        **outcome.answers,
        "test_accuracy": outcome.test.accuracy,
        "test_loss": outcome.test.loss,
        "test_records": outcome.test.count,
        **_public(outcome.public_test),
        **of_classes(outcome.test, names),
        "validation_accuracy": outcome.validation.accuracy,
        "validation_loss": outcome.validation.loss,
        "validation_records": outcome.validation.count,
        **({} if outcome.validation.macro_f1 is None else {"validation_macro_f1": outcome.validation.macro_f1}),
        "majority_accuracy": majority_accuracy(outcome.data),
        "seconds": outcome.seconds,
        "rounds_done": outcome.rounds_done,
        "stopped": outcome.stopped,
        "dimension": outcome.dimension,
        "model": config.model.name,
        "label_names": list(names),
        "not_private": statement["not_private"],
        **outcome.further,
    }
    text = _json_text(results)
    write_seal(folder, ENDED, {RESULTS_FILE: text})
    durable.write(folder / RESULTS_FILE, text)


def save_adapter(folder: Path, config: RunConfig, final: Final) -> None:
    """PEFT's two files, and what else plain transformers needs: the tokenizer with the chat template of the run."""
    name, task = config.model.name, config.model.task
    kind = None if task == "classification" else TaskType.CAUSAL_LM
    save_peft(folder, final.vector, final.layout, final.spec, base=hub_id(name), task_type=kind)
    tokenizer: Any = load_tokenizer(name)
    if task == "instruction":
        tokenizer.chat_template = template_of(tokenizer, config.model.chat_template)
    save_tokenizer(tokenizer, task, folder)


def stamp(statement: Mapping[str, Any], *folders: Path) -> None:
    """Where there is no guarantee, every folder that holds an adapter says so."""
    if statement["not_private"] is not None:
        for folder in folders:
            (folder / STAMP_FILE).write_text(f"{statement['sentence']}\n", encoding="utf-8")


def _json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values), indent=2) + "\n"


def perplexities(validation: Metrics, test: Metrics) -> dict[str, float]:
    """Of a language model; nothing of a classifier."""
    if validation.perplexity is None or test.perplexity is None:
        return {}
    return {"test_perplexity": test.perplexity, "validation_perplexity": validation.perplexity}


def of_classes(test: Metrics, label_names: Sequence[str]) -> dict[str, Any]:
    """What results.json says of the classes of the test set; nothing of a language model, or of very many classes."""
    if test.confusion is None:
        return {}
    recall = dict(zip(label_names, recalls(test.confusion), strict=True))
    return {"test_macro_f1": test.macro_f1, "test_recall": recall, "test_confusion": test.confusion}


def _public(test: Metrics | None) -> dict[str, float]:
    """What public records alone come to on the test set; nothing where the run did not start from them."""
    values = {} if test is None else {name: getattr(test, name) for name in ("loss", "accuracy", "perplexity")}
    return {f"public_test_{name}": value for name, value in values.items() if value is not None}


def _started(folder: Path) -> dict[str, float]:
    """The model before round 1, on the validation records of the others; nothing where the run did not measure it."""
    starts = [record for record in read_metrics(folder) if record.phase == "start"]
    if not starts:
        return {}
    values = {name: getattr(starts[0], f"validation_{name}") for name in ("loss", "accuracy", "macro_f1", "perplexity")}
    return {f"start_validation_{name}": value for name, value in values.items() if value is not None}


def majority_accuracy(data: PreparedData) -> float | None:
    """Accuracy on the test set of always answering its most frequent class; None without classes."""
    if data.test.labels is None:
        return None
    return float(np.bincount(np.asarray(data.test.labels)).max() / len(data.test))
