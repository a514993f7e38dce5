"""How good a model's summaries of prepared records are, against the summaries that the records hold.

A prepared record of summarisation (:mod:`client.tokenising`) is all there is to it: its tokens of weight 0 are the
prompt, as it was trained on, and the others are the summary. The sources are not read again.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from client.generation import Decoding, continuations, rouge
from client.records import Records
from client.tokenising import BEFORE_SUMMARY


@dataclass(frozen=True)
class Asked:
    """What a model is asked for, and what it should say.

    Attributes:
        prompts: tokens of text and :data:`client.tokenising.BEFORE_SUMMARY`, one list per record.
        references: the records' summaries as text.
        cut: how many of the references the records hold without their end.
    """

    prompts: list[list[int]]
    references: list[str]
    cut: int


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


def asked(records: Records, tokenizer: PreTrainedTokenizerBase, room: int) -> Asked:
    """The prompts of prepared records, cut at the end of their texts to `room` tokens, and the references.

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
    return Asked(prompts, references, cut)


def summary_scores(model: Any, tokenizer: PreTrainedTokenizerBase, records: Records, most_tokens: int) -> SummaryScores:
    """ROUGE of the summaries that `model` writes of `records`, the most probable token each time.

    Args:
        model: a plain causal model, or one with a PEFT adapter on it, in evaluation mode.
        tokenizer: that of the records.
        records: of summarisation, at least one.
        most_tokens: a summary ends there if it has not before.
    """
    wanted = asked(records, tokenizer, int(model.config.max_position_embeddings) - most_tokens)
    answers = continuations(model, tokenizer, wanted.prompts, Decoding(longest=most_tokens))
    found = [_text(tokenizer, answer) for answer in answers]
    return SummaryScores(rouge(found, wanted.references), len(records), most_tokens, wanted.cut)


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
