"""What a finished run leaves behind: privacy.json, the adapter as PEFT files with its card, results.json.

One writer for every kind of run. results.json comes last, and all else is on the disk by then: a run that has it has
ended, so a loss of power must leave neither half of it nor it alone.
"""

import json
import pprint
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from client.data.prepared import PreparedData
from client.models.lora import LoraSpec, save_peft
from client.models.tasks import Metrics
from privacy import durable
from server.config.schema import RunConfig
from server.evaluation.answers import rouge_terms, rouge_text
from server.run_folder.names import ADAPTER_FOLDER, PRIVACY_FILE, RESULTS_FILE, STAMP_FILE
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
    note: str = ""
    further: Mapping[str, Any] = field(default_factory=dict)


def write_artefacts(folder: Path, config: RunConfig, outcome: Outcome, statement: Mapping[str, Any]) -> None:
    """Write privacy.json, adapter/ and results.json into the run folder.

    Args:
        statement: what it guarantees, see :mod:`server.runs.guarantee`; where it guarantees nothing, every folder
            that holds an adapter says so.
    """
    _write_json(folder / PRIVACY_FILE, statement)
    final, model, names = outcome.adapter, config.model.name, outcome.data.label_names
    save_peft(folder / ADAPTER_FOLDER, final.vector, final.layout, final.spec, base=model)
    card = _card(config, str(statement["sentence"]), outcome)
    (folder / ADAPTER_FOLDER / "README.md").write_text(card, encoding="utf-8")
    stamp(statement, folder / ADAPTER_FOLDER)
    for path in (*(folder / ADAPTER_FOLDER).iterdir(), folder / ADAPTER_FOLDER):
        durable.sync(path)
    results = {
        **perplexities(outcome.validation, outcome.test),
        **outcome.answers,
        "test_accuracy": outcome.test.accuracy,
        "test_loss": outcome.test.loss,
        "test_records": outcome.test.count,
        "validation_accuracy": outcome.validation.accuracy,
        "validation_loss": outcome.validation.loss,
        "validation_records": outcome.validation.count,
        "majority_accuracy": majority_accuracy(outcome.data),
        "seconds": outcome.seconds,
        "rounds_done": outcome.rounds_done,
        "stopped": outcome.stopped,
        "dimension": outcome.dimension,
        "model": model,
        "label_names": list(names),
        "not_private": statement["not_private"],
        **outcome.further,
    }
    _write_json(folder / RESULTS_FILE, results)


def stamp(statement: Mapping[str, Any], *folders: Path) -> None:
    """Where there is no guarantee, every folder that holds an adapter says so."""
    if statement["not_private"] is not None:
        for folder in folders:
            (folder / STAMP_FILE).write_text(f"{statement['sentence']}\n", encoding="utf-8")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    durable.write(path, json.dumps(dict(values), indent=2) + "\n")


def perplexities(validation: Metrics, test: Metrics) -> dict[str, float]:
    """Of a language model; nothing of a classifier."""
    if validation.perplexity is None or test.perplexity is None:
        return {}
    return {"test_perplexity": test.perplexity, "validation_perplexity": validation.perplexity}


def _rouge_sentence(rouge: Mapping[str, Any]) -> str:
    """Of a card, with a blank in front; empty where nothing was written."""
    text = rouge_text(rouge)
    return f" Its answers: {text} ({rouge_terms(rouge)})." if text else ""


def majority_accuracy(data: PreparedData) -> float | None:
    """Accuracy on the test set of always answering its most frequent class; None without classes."""
    if data.test.labels is None:
        return None
    return float(np.bincount(np.asarray(data.test.labels)).max() / len(data.test))


def how_to_use(config: RunConfig, label_names: Sequence[str]) -> str:
    """The part of an adapter's card in Python: load it and, where there are classes, say that of one text,
    or write the summary of one.

    The report and the summary of a run show it too, see :mod:`simulations.report.page`.

    Args:
        label_names: of the outputs, in their order; empty for a language model.
    """
    labels = f", num_labels={len(label_names)}" if label_names else ""
    writes = config.model.task == "summarisation"
    lines = [
        "from peft import PeftModel",
        *(["from client.generation import Decoding, summaries"] if writes else []),
        "from client.models.base import load_base",
        "",
        f'base, tokenizer = load_base({json.dumps(config.model.name)}, "{config.model.task}"{labels})',
        f'model = PeftModel.from_pretrained(base, "{ADAPTER_FOLDER}")',
    ]
    if writes:
        longest = config.evaluation.rouge_tokens or config.model.max_length // 2
        lines += ["", f'print(summaries(model, tokenizer, ["a text"], Decoding(longest={longest}))[0])']
    if label_names:
        text = '"a text", "the text it is paired with"' if config.data.text_pair_column else '"a text"'
        cut = f"truncation=True, max_length={config.model.max_length}"  # as the records were in training
        lines += [
            "",
            f"labels = {pprint.pformat(list(label_names), width=108, compact=True)}",
            f'tokens = tokenizer({text}, {cut}, return_tensors="pt")',
            "print(labels[model(**tokens).argmax()])",
        ]
    return "\n".join(["```python", *lines, "```", ""])


def _card(config: RunConfig, sentence: str, outcome: Outcome) -> str:
    test = outcome.test
    if test.perplexity is None:
        quality = f"test accuracy {test.accuracy:.4f} on {test.count} records"
    else:
        quality = f"test perplexity {test.perplexity:.3f} on {test.count} tokens"
    note = f"\n\n{outcome.note}" if outcome.note else ""
    return f"""# Adapter of run {config.name}

{sentence}

Base model: `{config.model.name}`; LoRA rank {outcome.adapter.spec.rank} on {config.model.targets};
{quality}.{_rouge_sentence(outcome.answers)}{note}

{how_to_use(config, outcome.data.label_names)}"""
