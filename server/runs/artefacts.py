"""What a finished run leaves behind: the adapter as PEFT files, its card, privacy.json, results.json."""

import json
import pprint
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client.data.spec import PreparedData
from client.models.frozen_linear import batch_invariance_note
from client.models.lora import save_peft
from client.models.tasks import Metrics
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from server.config.schema import RunConfig
from server.evaluation.rouge import rouge_terms, rouge_text
from server.run_folder.names import ADAPTER_FOLDER, PRIVACY_FILE, RESULTS_FILE
from server.runs.assembly import Assembly
from strategies.private_training import ServerState


@dataclass(frozen=True)
class RunResult:
    """Utility of the served adapter on public data, and how the run went.

    Attributes:
        validation: on the public validation records (those a warm start did not use).
        test: on the test set, which is used for nothing else.
        rounds_done: rounds released.
        seconds: wall time from configuration to here.
        stopped: why the run ended before its last round, or None.
        rouge: what :func:`server.evaluation.rouge.adapter_rouge` found.
    """

    validation: Metrics
    test: Metrics
    rounds_done: int
    seconds: float
    stopped: str | None
    rouge: Mapping[str, Any]


def write_artefacts(
    folder: Path,
    assembly: Assembly,
    state: ServerState,
    ledger: Ledger,
    result: RunResult,
    *,
    trust_model: str | None = None,
    not_covered: Sequence[str] | None = None,
) -> None:
    """Write adapter/, privacy.json and results.json into the run folder."""
    further = batch_invariance_note(assembly.config.engine.precision)
    statement = privacy_statement(ledger, trust_model=trust_model, not_covered=not_covered, further=further)
    (folder / PRIVACY_FILE).write_text(json.dumps(statement, indent=2) + "\n")
    results = {
        **perplexities(result.validation, result.test),
        **result.rouge,
        "test_accuracy": result.test.accuracy,
        "test_loss": result.test.loss,
        "test_records": result.test.count,
        "validation_accuracy": result.validation.accuracy,
        "validation_loss": result.validation.loss,
        "validation_records": result.validation.count,
        "majority_accuracy": majority_accuracy(assembly.data),
        "seconds": result.seconds,
        "rounds_done": result.rounds_done,
        "stopped": result.stopped,
        "dimension": max(map(sum, assembly.setting.layouts)),
        "model": assembly.config.model.name,
        "label_names": list(assembly.data.label_names),
        "not_private": ledger.not_private,
    }
    (folder / RESULTS_FILE).write_text(json.dumps(results, indent=2) + "\n")
    save_peft(folder / ADAPTER_FOLDER, state.served, assembly.layout, assembly.spec, base=assembly.config.model.name)
    card = _card(assembly, statement["sentence"], result)
    (folder / ADAPTER_FOLDER / "README.md").write_text(card, encoding="utf-8")


def perplexities(validation: Metrics, test: Metrics) -> dict[str, float]:
    """Of a language model; nothing of a classifier."""
    if validation.perplexity is None or test.perplexity is None:
        return {}
    return {"test_perplexity": test.perplexity, "validation_perplexity": validation.perplexity}


def rouge_sentence(rouge: Mapping[str, Any]) -> str:
    """Of a card, with a blank in front; empty where no summaries were written."""
    text = rouge_text(rouge)
    return f" Its summaries: {text} ({rouge_terms(rouge)})." if text else ""


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
        config: of the data and the model.
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


def _card(assembly: Assembly, sentence: str, result: RunResult) -> str:
    config, test = assembly.config, result.test
    if test.perplexity is None:
        quality = f"test accuracy {test.accuracy:.4f} on {test.count} records"
    else:
        quality = f"test perplexity {test.perplexity:.3f} on {test.count} tokens"
    return f"""# Adapter of run {config.name}

{sentence}

Base model: `{config.model.name}`; LoRA rank {config.model.rank} on {config.model.targets};
{quality}.{rouge_sentence(result.rouge)}

{how_to_use(config, assembly.data.label_names)}"""
