"""Perplexity of a language model on a running text, per token and per word."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Perplexity:
    """``exp`` of the summed loss over the tokens, and over the words and line ends (WikiText's published count)."""

    per_token: float
    per_word: float
    tokens: int
    words: int


@torch.no_grad()
def perplexity(
    model: Any, tokenizer: PreTrainedTokenizerBase, lines: Sequence[str], *, context: int, batch: int = 8
) -> Perplexity:
    """Of all `lines` as one stream, in windows of `context` tokens that overlap by half.

    Every window begins with ``<s>``; of each but the first only the second half is scored, so a token sees between
    ``context / 2`` and `context` tokens, and is scored once.
    """
    stream: list[int] = []
    for line in lines:
        stream += tokenizer(line, add_special_tokens=False)["input_ids"]
    room, step = context - 1, context // 2
    windows, scored = [], []
    for start in range(0, max(1, len(stream) - room + step), step):
        part = stream[start : start + room]
        windows.append([tokenizer.bos_token_id, *part])
        scored.append(len(part) if start == 0 else max(0, len(part) - (room - step)))
    total, count = 0.0, 0
    for low in range(0, len(windows), batch):
        rows = windows[low : low + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits = model(input_ids=ids).logits[:, :-1].float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
        for row, loss, new in zip(rows, losses, scored[low : low + batch], strict=True):
            total += float(loss[len(row) - 1 - new : len(row) - 1].double().sum())
            count += new
    assert count == len(stream)
    words = sum(len(line.split()) + 1 for line in lines)
    return Perplexity(math.exp(total / count), math.exp(total / words), count, words)
