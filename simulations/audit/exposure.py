"""Exposure of planted secrets: how far up a model ranks them among all secrets that might have been planted.

    exposure(s) = log2 |R| - log2 rank(s)

(Carlini et al., "The Secret Sharer", USENIX Security 2019, arXiv 1802.08232, definition 5). R is the space of secrets,
the rank is by log-probability of the secret behind the canary's prefix: the paper's log-perplexity, which is a sum over
tokens and not their mean. A secret that was never seen has a uniform rank, so 1.44 bits on average; the most probable
secret of all has log2 |R| bits.

Where the secret begins, a tokenizer need not cut: GPT-2's has the blank of ``My ID is `` in the first token of the
number, others join ``=`` with a letter. Scored is therefore everything behind the last cut that the prefix alone and
all candidates have in common. What of that belongs to the prefix is text that all candidates share, so the scores are
those of whole canaries but for one constant. Where tokens do end with the prefix, nothing of the prefix is scored.

Exact: for digits, each one token, all 10^6 log-probabilities come from one walk over the tree of prefixes (111,111
tokens instead of 10^6 passes), and serve all canaries of one prefix. Sampled: the share of random candidates that
the model prefers, with the Clopper-Pearson limits of that share (privacy/audit/bounds.py); a sample of n cannot tell
more than log2(n + 1) bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from client.data.canaries import DIGITS, KINDS
from privacy import checks
from privacy.audit.bounds import binomial_lower, binomial_upper

ROWS = 500
"""Tokens of one pass through the tree; more are slower, because they leave the processor's cache."""

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Exposure:
    """The exposure of a secret in bits, with limits from its sampled rank; exact ranks have equal limits."""

    bits: float
    low: float
    high: float


def split_tokens(
    tokenizer: PreTrainedTokenizerBase, kind: str, secrets: Sequence[str], before: str = ""
) -> tuple[list[int], list[list[int]]]:
    """Split the tokens of canaries into those in front of every secret and those of each secret.

    Only scores of one call may be ranked against one another: its secrets decide where the tokens are cut.

    Args:
        before: text in front of the canary.

    Raises:
        ValueError: the tokenizer gives the texts no token in common, so the first of each has no probability.
    """
    checks.not_empty(secrets=secrets)
    front = before + KINDS[kind].prefix
    prefix, rows = _tokens(tokenizer, front), [_tokens(tokenizer, front + secret) for secret in secrets]
    cut = min(_common(prefix, row) for row in rows)
    if not cut:
        raise ValueError(f"the tokenizer has no token in common for all canaries of kind {kind!r}; set before")
    return prefix[:cut], [row[cut:] for row in rows]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text without the end of text, where the tokenizer puts one."""
    ids: list[int] = tokenizer(text, split_special_tokens=True)["input_ids"]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that two texts have in common at their beginning."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


def planted_exposures(
    model: Any, tokenizer: PreTrainedTokenizerBase, kind: str, planted: Sequence[str], others: Sequence[str]
) -> list[Exposure]:
    """Measure the exposure of `planted` secrets, ranked among `others`, which were not planted."""
    prefix, rows = split_tokens(tokenizer, kind, [*planted, *others])
    scores = [log_probabilities(model, prefix, part) for part in (rows[: len(planted)], rows[len(planted) :])]
    return sampled_exposures(scores[0], scores[1], len(KINDS[kind].alphabet) ** KINDS[kind].length)


@torch.no_grad()
def log_probabilities(model: Any, prefix: Sequence[int], secrets: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """The log-probability of every secret behind a prefix, in nats; `model` is a plain causal model.

    Args:
        prefix, secrets: of :func:`split_tokens`; secrets may differ in length.
    """
    result, device = np.zeros(len(secrets)), next(model.parameters()).device
    for start in range(0, len(secrets), ROWS):
        part = secrets[start : start + ROWS]
        longest = max(map(len, part))
        ids = torch.tensor([[*prefix, *secret, *[0] * (longest - len(secret))] for secret in part], device=device)
        logits = model(input_ids=ids).logits[:, len(prefix) - 1 : -1].double()
        taken = logits.log_softmax(-1).gather(2, ids[:, len(prefix) :, None])[..., 0]
        lengths = torch.tensor([len(secret) for secret in part], device=device)
        real = torch.arange(longest, device=device) < lengths[:, None]
        result[start : start + len(part)] = (taken * real).sum(dim=1).cpu().numpy()
    return result


@torch.no_grad()
def all_numbers(model: Any, prefix: Sequence[int], digits: Sequence[int], length: int) -> NDArray[np.float64]:
    """The log-probability behind a prefix of all ``10**length`` numbers of `length` digits, in order, in nats.

    Args:
        digits: the tokens of 0 to 9, the same in every place; a tokenizer that puts several digits into one token, or
            the blank in front into the first, has no such tree.
    """
    if len(digits) != len(DIGITS):
        raise ValueError(f"digits must be the tokens of 0 to 9, got {len(digits)} of them")
    checks.integer_at_least(1, length=length)
    found, device = np.empty(10**length), next(model.parameters()).device
    tokens = torch.tensor(list(digits), device=device)
    output = model(input_ids=torch.tensor([list(prefix)], device=device), use_cache=True)
    _walk(model, tokens, _tensors(output.past_key_values), _chances(output.logits[:, -1], tokens), length - 1, found)
    return found


def _walk(model: Any, digits: Tensor, cache: Cache, ends: Tensor, left: int, found: NDArray[Any]) -> None:
    """Fill `found` in order.

    The ten digits behind a row go through the model in one pass, beside one another: each sees the row and itself.

    Args:
        ends: ``[rows, 10]``, log-probability of each row's number with each digit behind it.
        left: digits behind those.
    """
    if not left:
        found[:] = ends.flatten().cpu().numpy()
        return
    past, rows, numbers = cache[0][0].shape[2], max(1, ROWS // 10), 10 ** (left + 1)
    alone = torch.zeros(10, 10).masked_fill(~torch.eye(10, dtype=torch.bool), -torch.inf)
    mask = torch.cat([torch.zeros(10, past), alone], dim=1).to(digits.device)
    for low in range(0, len(ends), rows):
        part = ends[low : low + rows]
        output = model(
            input_ids=digits.expand(len(part), 10),
            past_key_values=DynamicCache([tuple(x[low : low + rows] for x in layer) for layer in cache]),
            attention_mask=mask.expand(len(part), 1, 10, past + 10),
            position_ids=torch.full((1, 10), past, device=digits.device),
            use_cache=True,
        )
        deeper = (part[:, :, None] + _chances(output.logits, digits)).flatten(0, 1)
        own = _tensors(output.past_key_values) if left > 1 else []
        below = [(_apart(keys, past), _apart(values, past)) for keys, values in own]
        _walk(model, digits, below, deeper, left - 1, found[low * numbers : (low + len(part)) * numbers])


def _apart(states: Tensor, past: int) -> Tensor:
    """Split keys or values of ten digits behind each row, ``[rows, heads, past + 10, size]``, into ten rows each."""
    own = states[:, :, past:].transpose(1, 2).flatten(0, 1)[:, :, None]
    return torch.cat([states[:, :, :past].repeat_interleave(10, dim=0), own], dim=2)


def _chances(logits: Tensor, digits: Tensor) -> Tensor:
    """The log-probability of each digit; in float64 where it is added up."""
    return (logits[..., digits] - logits.logsumexp(-1, keepdim=True)).double()


def _tensors(cache: Any) -> Cache:
    return [(layer.keys, layer.values) for layer in cache.layers]


def exact_exposures(scores: NDArray[np.float64], planted: Sequence[int]) -> list[Exposure]:
    """The exposure of the secrets numbered `planted`, given the scores of all; equal scores share the better rank."""
    ordered = np.sort(scores)
    ranks = len(scores) - np.searchsorted(ordered, scores[list(planted)], side="right") + 1
    bits = np.log2(len(scores)) - np.log2(ranks)
    return [Exposure(float(value), float(value), float(value)) for value in bits]


def sampled_exposures(
    planted: NDArray[np.float64], candidates: NDArray[np.float64], space: int, alpha: float = 0.05
) -> list[Exposure]:
    """Estimate exposure from scores of the planted secrets and of random candidates that were not planted.

    ``-log2`` of the share of candidates above the secret, counting the secret itself; limits at level 1 - `alpha`.
    """
    checks.not_empty(candidates=candidates)
    above = (candidates[None] > planted[:, None]).sum(axis=1)
    most = math.log2(space)
    shares = (above + 1) / (len(candidates) + 1)
    low, high = (limit(above, len(candidates), alpha / 2) for limit in (binomial_upper, binomial_lower))
    with np.errstate(divide="ignore"):
        bits, fewest, largest = (np.minimum(most, -np.log2(share)) for share in (shares, low, high))
    return [Exposure(float(a), float(b), float(c)) for a, b, c in zip(bits, fewest, largest, strict=True)]


def mean_interval(exposures: Sequence[Exposure], alpha: float = 0.05) -> Exposure:
    """The mean exposure over canaries, with its Student-t interval at level 1 - `alpha`; needs two canaries."""
    checks.integer_at_least(2, canaries=len(exposures))
    bits = np.array([exposure.bits for exposure in exposures])
    half = float(student.ppf(1 - alpha / 2, len(bits) - 1) * bits.std(ddof=1) / math.sqrt(len(bits)))
    return Exposure(float(bits.mean()), float(bits.mean()) - half, float(bits.mean()) + half)
