"""The texts that a run's adapter writes at the end: ROUGE of its answers or summaries, a few of them to look at.

The adapter is written as PEFT files and loaded onto the base model by PEFT, which is what its user will do. It answers
the first ``evaluation.rouge-records`` test records, and the first ``evaluation.examples`` are shown beside what the
base model says without it. Test records are public by assumption, so it is no release.
"""

import importlib.util
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from client.data.spec import ANSWERS
from server.config.load import ConfigError
from server.config.schema import RunConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from client.data.records import Records
    from client.models.lora import LoraSpec
    from server.run_folder.telemetry import Telemetry
    from strategies.adapter.layout import AdapterLayout

SCORES = {"test_rouge1": "ROUGE-1", "test_rouge2": "ROUGE-2", "test_rougeL": "ROUGE-L"}
"""Keys of results.json, and what the numbers are called."""


def has_scored_answers(config: RunConfig) -> bool:
    """Whether the run ends with answers that are scored."""
    return config.model.task in ANSWERS and config.evaluation.rouge_records > 0


def refuse_without_rouge(config: RunConfig, model: "nn.Module") -> None:
    """Refuse, before anything is trained, answers that could not be written or scored.

    Raises:
        ConfigError: the package is missing, or the answers may be longer than those trained on.
    """
    if not has_scored_answers(config):
        return
    if importlib.util.find_spec("rouge_score") is None:
        raise ConfigError(
            f"evaluation.rouge-records = {config.evaluation.rouge_records} needs the package rouge-score; install it "
            "(pip install rouge-score), or set evaluation.rouge-records = 0 for a run without ROUGE"
        )
    if config.evaluation.rouge_tokens > (most := _most_tokens(config, model)):
        raise ConfigError(
            f"evaluation.rouge-tokens = {config.evaluation.rouge_tokens} must be at most {most}, half of "
            "model.max-length (and of the model's positions), which 0 takes"
        )


def adapter_answers(
    config: RunConfig,
    test: "Records",
    adapter: "Tensor",
    layout: "AdapterLayout",
    spec: "LoraSpec",
    telemetry: "Telemetry | None" = None,
) -> dict[str, Any]:
    """Score and show the answers or summaries that a run's adapter writes to test records.

    Args:
        adapter: full vector of `layout`, float32 ``[d]``, on the base model alone.
        telemetry: is told that the answers are being written.

    Returns:
        entries of results.json; none for other tasks, and where neither scores nor examples are asked for.
    """
    examples = config.evaluation.examples if config.model.task in ANSWERS else 0
    if not has_scored_answers(config) and not examples:
        return {}
    # imported here: reports read this module too, and need neither torch nor PEFT
    import numpy as np
    from peft import PeftModel

    from client.generation import answer_scores
    from client.models.lora import save_peft

    device = config.engine.base.chosen_device()
    base, tokenizer = config.engine.load_rounded(config.model.name, config.model.task)
    most_tokens = config.evaluation.rouge_tokens or _most_tokens(config, base)
    with tempfile.TemporaryDirectory() as folder:
        save_peft(folder, adapter, layout, spec, base=config.model.name)
        model: Any = PeftModel.from_pretrained(base, folder).eval()
    model = model.to(device)
    results: dict[str, Any] = {}
    if has_scored_answers(config):
        records = min(config.evaluation.rouge_records, len(test))
        if telemetry is not None:
            telemetry.status("running", f"answering {records} test records")
        some = test.select(np.arange(records))
        found = answer_scores(model, tokenizer, some, most_tokens, config.model.task)
        results = {
            **{f"test_{kind}": score for kind, score in found.rouge.items()},
            "rouge_records": found.records,
            "rouge_decoding": "greedy",
            "rouge_new_tokens": found.most_tokens,
            "rouge_references_cut": found.references_cut,
        }
    if examples:
        some = test.select(np.arange(min(examples, len(test))))
        results["examples"] = _examples(model, tokenizer, some, most_tokens, config.model.task)
    return results


def _examples(model: Any, tokenizer: Any, records: "Records", most_tokens: int, task: str) -> list[dict[str, str]]:
    """Answer the same prompts with the base model alone and with the adapter."""
    from client.generation import Decoding, answer_tasks, continuations, text_of, turns_text
    from client.models.base import positions

    wanted = answer_tasks(records, tokenizer, positions(model) - most_tokens, task)
    decoding = Decoding(longest=most_tokens)
    with model.disable_adapter():
        before = continuations(model, tokenizer, wanted.prompts, decoding)
    after = continuations(model, tokenizer, wanted.prompts, decoding)
    return [
        {
            "prompt": turns_text(tokenizer, prompt) if task == "instruction" else text_of(tokenizer, prompt),
            "reference": reference,
            "before": text_of(tokenizer, first),
            "after": text_of(tokenizer, second),
        }
        for prompt, reference, first, second in zip(wanted.prompts, wanted.references, before, after, strict=True)
    ]


def rouge_text(results: Mapping[str, Any]) -> str:
    """The ROUGE F-measures in results.json on one line; "" where there are none."""
    values = {name: results.get(key) for key, name in SCORES.items()}
    if not all(isinstance(value, float) for value in values.values()):
        return ""
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def rouge_terms(results: Mapping[str, Any]) -> str:
    """The records that ROUGE is a mean over and the decoding of the answers, in words."""
    text = (
        f"mean F-measure over {results.get('rouge_records')} test records, {results.get('rouge_decoding')} decoding, "
        f"at most {results.get('rouge_new_tokens')} new tokens"
    )
    cut = results.get("rouge_references_cut")
    return f"{text}; {cut} of the references are cut" if cut else text


def _most_tokens(config: RunConfig, model: "nn.Module") -> int:
    """The most new tokens of an answer: what a cut record has room for, within the model's positions."""
    from client.models.base import positions

    return min(config.model.max_length, positions(model)) // 2
