"""The card of an adapter: what it is, what its run guarantees, how good it is on public data, how to load it.

The header is what the hub reads (base model, library, task), with a block on privacy beside it. An adapter of a
language model is loaded by plain transformers and PEFT; a classifier has a head of our own, so Lacquer loads it.
"""

import json
import pprint
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from client.models.files import RANDOM_PREFIX, hub_id
from client.models.lora import LoraSpec
from server.config.schema import RunConfig
from server.evaluation.answers import rouge_terms, rouge_text
from server.lineage import together_with_start
from server.run_folder.names import ADAPTER_FOLDER

NOT_ON_THE_HUB = ("lacquer-small", RANDOM_PREFIX)
"""How the names of base models begin that only Lacquer can load."""

BASE_LICENSES = {"minilm": "apache-2.0", "smollm2": "apache-2.0", "lacquer-small": "cc-by-sa-3.0"}
"""Licences of the base models that come in packages, as the hub spells them; of others the user knows it."""

CLASSIFIER_NEEDS_LACQUER = (
    "These lines need Lacquer, whose classifier has a head and names of its own. Plain transformers and PEFT warn of "
    "missing keys and go on without the trained LoRA weights. "
    "`lacquer export RUN my-model` makes a classifier that loads anywhere."
)
MODEL_NEEDS_LACQUER = (
    "These lines need Lacquer. `lacquer export RUN my-model --merged` makes a model that plain transformers loads."
)
"""Before code that loads an adapter with Lacquer: of a classifier, and of a language model."""


def card(
    config: RunConfig,
    statement: Mapping[str, Any],
    results: Mapping[str, Any],
    label_names: Sequence[str],
    spec: LoraSpec,
    note: str = "",
) -> str:
    """The Markdown text of an adapter's card, with the header that the hub reads.

    Args:
        config: settings of the run.
        statement: content of privacy.json.
        results: content of results.json; the card leaves out what it lacks.
        label_names: names of the outputs, in their order; empty for a language model.
        spec: form of the adapter.
        note: a sentence more.
    """
    base = hub_id(config.model.name)
    header = ModelCardData(
        base_model=base,
        library_name="peft",
        pipeline_tag="text-classification" if label_names else "text-generation",
        tags=["lora", "federated-learning", "differential-privacy"],
        privacy=privacy_block(statement),
        license=BASE_LICENSES.get(config.model.name),
        model_name=config.name,
        eval_results=_results(config, results),
    )
    if label_names:
        header["id2label"] = dict(enumerate(label_names))
    if "test_loss" not in results:
        quality = "not measured on the test set"
    elif "test_perplexity" in results:
        quality = f"test perplexity {results['test_perplexity']:.3f} on {results['test_records']} tokens"
    else:
        kind = "preference accuracy" if config.model.task == "preference" else "accuracy"
        quality = f"test {kind} {results['test_accuracy']:.4f} on {results['test_records']} records"
    rouge = rouge_text(results)
    written = f" Its answers: {rouge} ({rouge_terms(results)})." if rouge else ""
    kind = config.engine.quantisation
    rounded = "" if kind == "none" else f" It was trained and measured beside block weights rounded to {kind}."
    layers = ", ".join(spec.targets) or "the head alone"
    needed = CLASSIFIER_NEEDS_LACQUER if label_names else MODEL_NEEDS_LACQUER
    lines = [
        f"# Adapter of run {config.name}",
        str(statement["sentence"]),
        f"Base model: `{base}`; LoRA rank {spec.rank} on {layers};\n{quality}.{written}{rounded}",
        *([note] if note else []),
        *([] if _plain(config, label_names) else [needed]),
        how_to_use(config, label_names),
    ]
    return str(ModelCard(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(lines)))


def _results(config: RunConfig, results: Mapping[str, Any]) -> list[EvalResult]:
    """Metrics on the test set in the hub's form; the data set stays unnamed."""
    task, measured = "text-generation", {"perplexity": results.get("test_perplexity")}
    if measured["perplexity"] is None:
        task = "text-classification" if config.model.task == "classification" else task
        measured = {"accuracy": results.get("test_accuracy"), "f1": results.get("test_macro_f1")}
    kind = config.data.source.partition(":")[0]
    return [
        EvalResult(task, kind, "held-out test records", name, value, metric_name="macro-F1" if name == "f1" else None)
        for name, value in measured.items()
        if value is not None
    ]


def privacy_block(statement: Mapping[str, Any]) -> dict[str, Any]:
    """The guarantee for a card's header: what is protected, how well, against whom, and the ledger's head."""
    keys = {"unit": "unit", "epsilon": "epsilon", "delta": "delta", "adjacency": "adjacency", "trust": "trust_model"}
    block = {name: statement[key] for name, key in keys.items() if key in statement}
    if (pair := together_with_start(dict(statement))) is not None:
        block["epsilon_with_start"], block["delta_with_start"] = pair
    ledger = statement.get("ledger")
    if isinstance(ledger, Mapping):
        block["ledger_head"] = ledger.get("head")
    if statement["not_private"] is not None:
        block["not_private"] = statement["not_private"]
    return block


def how_to_use(config: RunConfig, label_names: Sequence[str]) -> str:
    """The part of a card in Python: load the adapter and use it on one text.

    The report and the summary of a run show it too, see :mod:`simulations.report.page`.
    """
    task, name = config.model.task, config.model.name
    lines = ["from peft import PeftModel"]
    if _plain(config, label_names):
        lines += [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{ADAPTER_FOLDER}")',
            f"base = AutoModelForCausalLM.from_pretrained({json.dumps(hub_id(name))})",
        ]
    else:
        labels = f", num_labels={len(label_names)}" if label_names else ""
        lines += [
            *(["from client.generation import Decoding, summaries"] if task == "summarisation" else []),
            "from client.models.base import load_base",
            "",
            f'base, tokenizer = load_base({json.dumps(name)}, "{task}"{labels})',
        ]
    lines.append(f'model = PeftModel.from_pretrained(base, "{ADAPTER_FOLDER}")')
    longest = config.evaluation.rouge_tokens or config.model.max_length // 2
    if task == "summarisation":
        lines += ["", f'print(summaries(model, tokenizer, ["a text"], Decoding(longest={longest}))[0])']
    elif task == "instruction":
        lines += [
            "",
            'messages = [{"role": "user", "content": "a question"}]',
            "options = dict(add_generation_prompt=True, return_dict=True, return_tensors='pt')",
            "tokens = tokenizer.apply_chat_template(messages, **options)",
            f"answer = model.generate(**tokens, max_new_tokens={longest})",
            'print(tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    elif label_names:
        text = '"a text", "the text it is paired with"' if config.data.text_pair_column else '"a text"'
        cut = f"truncation=True, max_length={config.model.max_length}"  # as the records were in training
        lines += [
            "",
            f"labels = {pprint.pformat(list(label_names), width=108, compact=True)}",
            f'tokens = tokenizer({text}, {cut}, return_tensors="pt")',
            "print(labels[model(**tokens).argmax()])",
        ]
    return "\n".join(["```python", *lines, "```", ""])


def _plain(config: RunConfig, label_names: Sequence[str]) -> bool:
    """Whether transformers and PEFT load and use the adapter without Lacquer."""
    return not label_names and not config.model.name.startswith(NOT_ON_THE_HUB) and config.model.task != "summarisation"
