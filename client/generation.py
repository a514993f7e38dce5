"""Text from a language model: the most probable continuation, or samples of it; and summaries with their score.

How good a model's summaries of prepared records are, against the summaries that the records hold.

A prepared record of summarisation (:mod:`client.data.tokenise`) is all there is to it: its tokens of weight 0 are the
prompt, as it was trained on, and the others are the summary. The sources are not read again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from client.data.records import Records
from client.data.tokenise import BEFORE_SUMMARY
from client.data.tokenise import prompts as summary_prompts
from privacy import checks


@dataclass(frozen=True)
class Decoding:
    """How continuations are chosen.

    Attributes:
        temperature: 0 takes the most probable token each time; above 0 samples, from the `top_p` most probable mass.
        token_budget: tokens of one batch, new ones included.
    """

    longest: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    token_budget: int = 16384

    def __post_init__(self) -> None:
        checks.integer_at_least(1, longest=self.longest, token_budget=self.token_budget)
        checks.non_negative(temperature=self.temperature)
        checks.probability(top_p=self.top_p)


def continuations(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], decoding: Decoding
) -> list[list[int]]:
    """New tokens behind each prompt, up to the end-of-text token, in the order of the prompts.

    `model` is a plain causal model, see :func:`client.models.lora.merged`. The same seed gives the same samples for the
    same prompts and token budget. The global random state is left as it was.

    Raises:
        ValueError: an empty prompt, or one so long that the model has no positions left.
    """
    positions = int(getattr(model.config, "max_position_embeddings", 2**31))
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= positions - decoding.longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; it needs at least 1 and, with {decoding.longest} new ones, "
                f"at most {positions - decoding.longest}: the model has {positions} positions"
            )
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    found: list[list[int]] = [[] for _ in prompts]
    start = 0
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(decoding.seed)
        while start < len(order):
            rows = max(1, decoding.token_budget // (len(prompts[order[start]]) + decoding.longest))
            chosen = order[start : start + rows]
            answers = _batch(model, tokenizer, [prompts[i] for i in chosen], decoding)
            for index, tokens in zip(chosen, answers, strict=True):
                found[index] = tokens
            start += rows
    return found


def summaries(model: Any, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], decoding: Decoding) -> list[str]:
    """A summary of every text, asked for as :mod:`client.data.tokenise` trains it; long texts are cut at their end."""
    room = int(model.config.max_position_embeddings) - decoding.longest
    rows, _ = summary_prompts(list(texts), tokenizer, room)
    answers = continuations(model, tokenizer, rows, decoding)
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in answers]


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) with stemming, as Google's rouge-score computes it.

    Raises:
        ValueError: the package is not installed, or the lists differ in length or are empty.
    """
    checks.same_length(predictions=predictions, references=references)
    checks.not_empty(predictions=predictions)
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError("ROUGE needs the package rouge-score: pip install 'lacquer[summarisation]'") from error
    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(reference, found) for found, reference in zip(predictions, references, strict=True)]
    return {kind: float(np.mean([score[kind].fmeasure for score in scores])) for kind in kinds}


@torch.no_grad()
def _batch(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], decoding: Decoding
) -> list[list[int]]:
    """Padded on the left, so that all continuations begin at the same place."""
    longest = max(len(prompt) for prompt in prompts)
    pad, end = int(tokenizer.pad_token_id or 0), tokenizer.eos_token_id
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    device = next(model.parameters()).device
    output = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=decoding.longest,
        pad_token_id=pad,
        eos_token_id=end,
        **(sampling if decoding.temperature else {"do_sample": False}),
    )
    rows = output[:, longest:].tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


@dataclass(frozen=True)
class SummaryScores:
    """Mean F-measures over some records.

    Attributes:
        rouge: ``"rouge1"``, ``"rouge2"`` and ``"rougeL"``, see :func:`client.generation.rouge`.
        records: averaged over.
        most_tokens: new tokens that a summary could have.
        references_cut: how many of the references lack their end.
    """

    rouge: dict[str, float]
    records: int
    most_tokens: int
    references_cut: int


def summary_tasks(
    records: Records, tokenizer: PreTrainedTokenizerBase, room: int
) -> tuple[list[list[int]], list[str], int]:
    """The prompts of prepared records, their summaries, and how many of these lack their end.

    A prompt is text, cut at its end to `room` tokens in all, and :data:`client.data.tokenise.BEFORE_SUMMARY`.

    Raises:
        ValueError: the records have no token weights, so they are not of summarisation.
    """
    if records.token_weights is None:
        raise ValueError("records of summarisation have token weights, 0 on the prompt; these have none")
    tail = len(tokenizer(BEFORE_SUMMARY, add_special_tokens=False)["input_ids"])
    prompts, references, cut = [], [], 0
    for start, stop in zip(records.offsets[:-1], records.offsets[1:], strict=True):
        tokens = records.tokens[start:stop].tolist()
        given = int(np.argmax(records.token_weights[start:stop] > 0))
        prompt, summary = tokens[:given], tokens[given:]
        prompts.append(prompt if given <= room else prompt[: room - tail] + prompt[-tail:])
        references.append(_text(tokenizer, summary))
        cut += summary[-1] != tokenizer.eos_token_id
    return prompts, references, cut


def summary_scores(model: Any, tokenizer: PreTrainedTokenizerBase, records: Records, most_tokens: int) -> SummaryScores:
    """ROUGE of the summaries that `model` writes of `records`, the most probable token each time.

    Args:
        model: a plain causal model, or one with a PEFT adapter on it, in evaluation mode.
        most_tokens: a summary ends there if it has not before.
    """
    room = int(model.config.max_position_embeddings) - most_tokens
    prompts, references, cut = summary_tasks(records, tokenizer, room)
    answers = continuations(model, tokenizer, prompts, Decoding(longest=most_tokens))
    found = [_text(tokenizer, answer) for answer in answers]
    return SummaryScores(rouge(found, references), len(records), most_tokens, cut)


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
