"""The artefacts of a finished run: privacy.json, the adapter as PEFT files with its card, digests, results.json.

One writer for every kind of run. What is paid for comes first (:func:`keep_adapter`) and is on the disk before anything
is measured of it: privacy.json and the adapter. Each measurement after that may fail alone (:func:`attempt_measure`).
results.json comes last, and all else is on the disk by then: a run that has it has ended. It names what failed, and
resuming such a run does that and nothing else.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
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
from client.models.files import fingerprint, hub_id
from client.models.lora import LoraSpec, save_peft
from client.models.tasks import Metrics
from privacy import durable
from server.config.schema import RunConfig
from server.evaluation.card import card
from server.run_folder.names import ADAPTER_FOLDER, PRIVACY_FILE, RESULTS_FILE, STAMP_FILE
from server.run_folder.round_record import FURTHER
from server.run_folder.seal import ENDED, write_seal
from server.run_folder.telemetry import read_metrics
from strategies.adapter.layout import AdapterLayout

log = logging.getLogger(__name__)

REASON = 300
"""Most characters of a reason."""


class Final(NamedTuple):
    """An adapter on the base model as it was loaded: full float32 vector, its layout, its specification."""

    vector: Tensor
    layout: AdapterLayout
    spec: LoraSpec


@dataclass(frozen=True)
class Kept:
    """The adapter and the statement that a run has paid for.

    Attributes:
        statement: guarantee of the run, see :mod:`server.runs.guarantee`; where it guarantees nothing, every folder
            that holds an adapter says so.
        label_names: of the outputs, in their order; empty for a language model.
        note: a sentence for the card.
    """

    adapter: Final
    statement: Mapping[str, Any]
    label_names: Sequence[str]
    note: str = ""


Measure = Callable[[], Mapping[str, Any]]
"""A function that gives entries of results.json."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: how it went, and what is measured of its adapter on public data.

    Attributes:
        measures: what is measured, by the name that says what is missing where it fails.
        rounds_done: released.
        seconds: wall time from configuration to here.
        stopped: why the run ended before its last round, or None.
        dimension: trained values, the most of any round.
        further: results of this kind of run alone.
    """

    data: PreparedData
    measures: Mapping[str, Measure]
    rounds_done: int
    seconds: float
    stopped: str | None
    dimension: int
    further: Mapping[str, Any] = field(default_factory=dict)


def measures(
    evaluate: Callable[[str], Metrics],
    public: Callable[[], Metrics] | None,
    answers: Measure,
    label_names: Sequence[str],
) -> dict[str, Measure]:
    """Make the measurements of a run's adapter, by name.

    Args:
        evaluate: the adapter on a public split: on the validation records that nothing was trained on, and on the test
            set, which is used for nothing else.
        public: of the adapter before round 1, on the test set; None where that was not trained on public records.
        answers: see :func:`server.evaluation.answers.adapter_answers`.
    """

    def test() -> Mapping[str, Any]:
        metrics = evaluate("test")
        return {**split_results("test", metrics), **class_results(metrics, label_names)}

    found: dict[str, Measure] = {
        "validation": lambda: split_results("validation", evaluate("validation")),
        "test": test,
        "answers": answers,
    }
    if public is not None:
        found["test of the public start"] = lambda: _public(public())
    return found


def keep_adapter(folder: Path, config: RunConfig, kept: Kept) -> None:
    """Write privacy.json and adapter/ into the run folder; both are on the disk when this returns."""
    durable.write(folder / PRIVACY_FILE, _json_text(kept.statement))
    save_adapter(folder / ADAPTER_FOLDER, config, kept.adapter)
    stamp_folders(kept.statement, folder / ADAPTER_FOLDER)
    _sync(folder / ADAPTER_FOLDER)
    durable.sync(folder)


def write_results(
    folder: Path, config: RunConfig, kept: Kept, outcome: Outcome, before: Mapping[str, Any] | None
) -> dict[str, str]:
    """Measure an adapter that is kept, then write its card, the digests of the files, and results.json.

    Args:
        before: results.json of a run that ended without all of it: what that has is not measured again.

    Returns:
        What failed, by name, and why.
    """
    results: dict[str, Any] = {
        **_started(folder),
        "majority_accuracy": majority_accuracy(outcome.data),
        "seconds": outcome.seconds,
        "rounds_done": outcome.rounds_done,
        "stopped": outcome.stopped,
        "dimension": outcome.dimension,
        "model": config.model.name,
        "label_names": list(kept.label_names),
        "not_private": kept.statement["not_private"],
        **outcome.further,
        **(before or {}),
    }
    missing = dict[str, str]()
    for name, measure in outcome.measures.items():
        if before is None or name in before["missing"]:
            results |= attempt_measure(name, measure, missing, folder)
    attempt_measure("card", lambda: _write_card(folder, config, kept, results), missing, folder)
    text = _json_text({**results, "missing": missing})
    # The digest of results.json comes behind it: a run that ends for the second time has an older one until then.
    write_seal(folder, ENDED)
    durable.write(folder / RESULTS_FILE, text)
    write_seal(folder, (*ENDED, RESULTS_FILE))
    return missing


def attempt_measure(name: str, measure: Measure, missing: dict[str, str], folder: Path) -> Mapping[str, Any]:
    """Make one of a run's measurements; where it fails, return nothing and note why in ``missing``.

    The one place where a failure does not end a run: what it has paid for is kept, whatever a model, a tokenizer or a
    library for scores raises of it. Only a released adapter and public records are measured, so the reason is public.
    A full disk is raised on: nothing else could be written either, and with room made the run is resumed.
    """
    try:
        return measure()
    except Exception as error:  # of any library that reads a model, a tokenizer or a text
        if durable.full_disk(error, folder):
            raise
        missing[name] = " ".join(f"{type(error).__name__}: {error}".split())[:REASON]
        log.exception("%s failed; the adapter and its guarantee are kept", name)
        return {}


def _write_card(folder: Path, config: RunConfig, kept: Kept, results: Mapping[str, Any]) -> dict[str, Any]:
    text = card(config, kept.statement, results, kept.label_names, kept.adapter.spec, kept.note)
    durable.write(folder / ADAPTER_FOLDER / "README.md", text)
    return {}


def _sync(folder: Path) -> None:
    """Bring a folder and its files to the disk."""
    for path in (*folder.iterdir(), folder):
        durable.sync(path)


def save_adapter(folder: Path, config: RunConfig, final: Final) -> None:
    """Write PEFT's two files and the tokenizer, with the run's chat template, which plain transformers needs."""
    name, task = config.model.name, config.model.task
    kind = None if task == "classification" else TaskType.CAUSAL_LM
    base: dict[str, Any] = {"base": hub_id(name), "task_type": kind, "base_digest": fingerprint(name)}
    save_peft(folder, final.vector, final.layout, final.spec, **base)
    tokenizer: Any = load_tokenizer(name)
    if task == "instruction" or (task == "preference" and config.model.chat_template):
        tokenizer.chat_template = template_of(tokenizer, config.model.chat_template)
    save_tokenizer(tokenizer, task, folder)


def stamp_folders(statement: Mapping[str, Any], *folders: Path) -> None:
    """Write NOT-PRIVATE.txt into folders with an adapter if the statement says that there is no guarantee."""
    if statement["not_private"] is not None:
        for folder in folders:
            (folder / STAMP_FILE).write_text(f"{statement['sentence']}\n", encoding="utf-8")


def _json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values), indent=2) + "\n"


def split_results(split: str, metrics: Metrics) -> dict[str, Any]:
    """The entries of results.json for the metrics of a split."""
    values: dict[str, Any] = {name: getattr(metrics, name) for name in FURTHER}
    values |= {"records": metrics.count or None}
    values |= {"loss_within": metrics.loss_within, "accuracy_within": metrics.accuracy_within}
    values |= {"tokens": metrics.tokens, "tokens_within": metrics.tokens_within}
    if metrics.confusion_within is not None:
        values |= {"confusion": metrics.confusion, "confusion_within": metrics.confusion_within}
    return {
        f"{split}_accuracy": metrics.accuracy,
        f"{split}_loss": metrics.loss,
        **{f"{split}_{name}": value for name, value in values.items() if value is not None},
    }


def class_results(test: Metrics, label_names: Sequence[str]) -> dict[str, Any]:
    """The entries of results.json for the classes of the test set.

    None for a language model, or with very many classes.
    """
    if test.confusion is None:
        return {}
    recall = dict(zip(label_names, recalls(test.confusion), strict=True))
    return {"test_recall": recall, "test_confusion": test.confusion}


def _public(test: Metrics) -> dict[str, float]:
    """The entries of results.json for what public records alone come to on the test set."""
    values = {name: getattr(test, name) for name in ("loss", "accuracy", "perplexity")}
    return {f"public_test_{name}": value for name, value in values.items() if value is not None}


def _started(folder: Path) -> dict[str, float]:
    """The entries of results.json for the model before round 1; none where the run did not measure it."""
    starts = [record for record in read_metrics(folder) if record.phase == "start"]
    if not starts:
        return {}
    values = {name: getattr(starts[0], f"validation_{name}") for name in ("loss", "accuracy", *FURTHER)}
    return {f"start_validation_{name}": value for name, value in values.items() if value is not None}


def majority_accuracy(data: PreparedData) -> float | None:
    """The accuracy on the test set of always answering its most frequent class; None without classes."""
    if data.test.labels is None:
        return None
    return float(np.bincount(np.asarray(data.test.labels)).max() / len(data.test))
