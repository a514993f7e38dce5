"""Text from a language model: the most probable continuation, or samples of it; answers and summaries with their score.

A prepared record of a task with answers (:mod:`client.data.tokenise`) is all that a score needs: its tokens before the
last answer are the prompt, as it was trained on, and those of the answer the reference. The sources are not read again.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from client.data.chat import Rendered
from client.data.records import Records
from client.data.tokenise import BEFORE_SUMMARY
from client.data.tokenise import prompts as summary_prompts
from client.models.base import positions
from privacy import checks


@dataclass(frozen=True)
class Decoding:
    """The rule by which continuations are chosen.

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
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    streamer: Any = None,
) -> list[list[int]]:
    """New tokens behind each prompt, up to a token that ends a text or a turn, in the order of the prompts.

    `model` is a plain causal model, see :func:`client.models.lora.merged`. The same seed gives the same samples for the
    same prompts and token budget. The global random state is left as it was. A `streamer` of transformers is given the
    tokens as they come, of a single prompt.

    Raises:
        ValueError: an empty prompt, or one so long that the model has no positions left.
    """
    most = positions(model)
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= most - decoding.longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; it needs at least 1 and, with {decoding.longest} new ones, "
                f"at most {most - decoding.longest}: the model has {most} positions"
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
            answers = _batch(model, tokenizer, [prompts[i] for i in chosen], decoding, streamer)
            for index, tokens in zip(chosen, answers, strict=True):
                found[index] = tokens
            start += rows
    return found


def summaries(model: Any, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], decoding: Decoding) -> list[str]:
    """A summary of every text, asked for as :mod:`client.data.tokenise` trains it; long texts are cut at their end."""
    room = positions(model) - decoding.longest
    rows, _ = summary_prompts(list(texts), tokenizer, room)
    answers = continuations(model, tokenizer, rows, decoding)
    return [text_of(tokenizer, tokens) for tokens in answers]


_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Extended_Pictographic}"
_WORD = rf"[{_UNSPACED}]\p{{M}}*|[\p{{L}}\p{{M}}\p{{N}}--[{_UNSPACED}]]+"


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) with stemming, as Google's rouge-score computes it.

    Its own words are of a-z and 0-9. Ours, which are the same in such texts, are of the letters and digits of all
    scripts; scripts that leave no blanks between words (Chinese, Thai, ...) and pictures count by the character.

    Raises:
        ValueError: the package is not installed, or the lists differ in length or are empty.
    """
    checks.same_length(predictions=predictions, references=references)
    checks.not_empty(predictions=predictions)
    try:
        import regex
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
    except ImportError as error:
        raise ValueError("ROUGE needs the packages rouge-score and regex: pip install rouge-score regex") from error
    word, stemmed = regex.compile(_WORD, regex.VERSION1), DefaultTokenizer(use_stemmer=True).tokenize

    class Words:
        def tokenize(self, text: str) -> list[str]:
            found = word.findall(unicodedata.normalize("NFC", text).lower())
            return [stem for each in found for stem in (stemmed(each) if each.isascii() else [each])]

    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, tokenizer=Words())
    scores = [scorer.score(reference, found) for found, reference in zip(predictions, references, strict=True)]
    return {kind: float(np.mean([score[kind].fmeasure for score in scores])) for kind in kinds}


@torch.no_grad()
def _batch(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    streamer: Any,
) -> list[list[int]]:
    """Padded on the left, so that all continuations begin at the same place."""
    longest = max(len(prompt) for prompt in prompts)
    pad, ends = int(tokenizer.pad_token_id or 0), _ends(model, tokenizer)
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
        eos_token_id=ends or None,
        streamer=streamer,
        **(sampling if decoding.temperature else {"do_sample": False}),
    )
    return [
        row[: next((place for place, token in enumerate(row) if token in ends), len(row))]
        for row in output[:, longest:].tolist()
    ]


def _ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a text: the tokenizer's, and those that the model's own settings add, such as an end of turn."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    return sorted(int(token) for token in found if token is not None)


@dataclass(frozen=True)
class AnswerTasks:
    """Prompts that a model is asked to answer, and what it should say.

    Attributes:
        prompts: tokens before the last answer, one list per record.
        references: the records' last answers, or summaries, as text.
        cut: how many of the references the records hold without their end.
    """

    prompts: list[list[int]]
    references: list[str]
    cut: int


@dataclass(frozen=True)
class AnswerScores:
    """Mean F-measures over some records, and what was said.

    Attributes:
        rouge: ``"rouge1"``, ``"rouge2"`` and ``"rougeL"``, see :func:`client.generation.rouge`.
        records: averaged over.
        most_tokens: new tokens that an answer could have.
        references_cut: how many of the references lack their end.
    """

    rouge: dict[str, float]
    records: int
    most_tokens: int
    references_cut: int


def answer_tasks(records: Records, tokenizer: PreTrainedTokenizerBase, room: int, task: str) -> AnswerTasks:
    """The prompts of prepared records and the references.

    A prompt with more than `room` tokens is cut: of a text to be summarised the end, of a conversation the beginning.

    Raises:
        ValueError: the records have no token weights, so they have no answers.
    """
    if records.token_weights is None:
        raise ValueError("records with answers have token weights, 0 on the prompt; these have none")
    tail = len(tokenizer(BEFORE_SUMMARY, add_special_tokens=False)["input_ids"]) if task == "summarisation" else room
    prompts, references, cut = [], [], 0
    for start, stop in zip(records.offsets[:-1], records.offsets[1:], strict=True):
        tokens, weights = records.tokens[start:stop].tolist(), records.token_weights[start:stop].tolist()
        begin, end = Rendered(tokens, weights).last_answer
        prompt, answer = tokens[:begin], tokens[begin:end]
        prompts.append(prompt if begin <= room else prompt[: room - tail] + prompt[-tail:])
        references.append(text_of(tokenizer, answer))
        cut += answer[-1] not in tokenizer.all_special_ids
    return AnswerTasks(prompts, references, cut)


def answer_scores(
    model: Any, tokenizer: PreTrainedTokenizerBase, records: Records, most_tokens: int, task: str
) -> AnswerScores:
    """ROUGE of the answers (or summaries) that `model` writes to `records`, the most probable token each time.

    Args:
        model: a plain causal model, or one with a PEFT adapter on it, in evaluation mode.
        tokenizer: that of the records.
        records: of a task with answers, at least one.
        most_tokens: an answer ends there if it has not before.
        task: of the records.
    """
    wanted = answer_tasks(records, tokenizer, positions(model) - most_tokens, task)
    answers = continuations(model, tokenizer, wanted.prompts, Decoding(longest=most_tokens))
    found = [text_of(tokenizer, answer) for answer in answers]
    return AnswerScores(rouge(found, wanted.references), len(records), most_tokens, wanted.cut)


ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "model": "Assistant", "tool": "Tool"}
"""Words that chat templates write before a turn, and what people read there."""


def turns_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """A rendered conversation as a person reads it: "User: ..." and so on, without the template's marks.

    A role is a word of :data:`ROLES` that stands alone between special tokens, or in the first line behind one. What
    has no such marks is shown as it is.
    """
    special, pieces = set(tokenizer.all_special_ids), [list[int]()]
    for token in tokens:
        if token in special:
            pieces.append([])
        else:
            pieces[-1].append(token)
    turns: list[list[str]] = [["", ""]]
    for piece in pieces:
        text = str(tokenizer.decode(piece)).strip()
        first, _, rest = text.partition("\n")
        if first.strip() in ROLES:
            turns.append([ROLES[first.strip()], rest.strip()])
        else:
            turns[-1][1] = f"{turns[-1][1]} {text}".strip()
    said = [f"{role}: {text}" if role else text for role, text in turns if text]
    return "\n\n".join(said) or text_of(tokenizer, tokens)


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Tokens as a person reads them."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
