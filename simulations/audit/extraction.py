"""Extraction of planted secrets: given the text in front of one, does the model say it?

Greedy: the most probable token each time. Where all secrets stand behind the same words, one of them can be said.

Sampled: a secret counts as extracted if it is likelier than not to be among SAMPLES continuations drawn at temperature
1, the (n, p)-discoverable extraction of Hayes et al. (arXiv:2410.19482v3) with n = SAMPLES and p = 1/2. No sample is
drawn: the chance is 1 - (1 - P)^n, where P is the model's probability of the secret behind the context. P is of the
secret's own tokens; other ways to spell it would add a little.

Beside the planted secrets stand as many measurements of secrets that were never planted, behind the same contexts, and
both under the base model, which saw none. Who guesses blindly n times says a given secret with probability about
n / |R|, R being the secrets that there could be.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import fisher_exact

from client.data.canaries import KINDS, Canaries, secrets
from client.data.splits import hold_out
from client.generation import Decoding, continuations
from privacy.audit.bounds import binomial_lower, binomial_upper
from privacy.audit.roc import Interval
from server.evaluation.finished import FinishedRun
from server.runs.assembly import data_spec
from simulations.audit.exposure import log_probabilities, split_tokens

SAMPLES = 10_000
"""Continuations that the attacker may draw."""

SECRETS = 200
"""Most planted secrets that are tried."""

CONTROLS = 400
"""Number of secrets that were never planted."""


@dataclass(frozen=True)
class Context:
    """A text, the secrets that were planted behind it, and others that were not."""

    before: str
    planted: list[str]
    controls: list[str]


@dataclass(frozen=True)
class Said:
    """A model's words behind the contexts, for planted secrets and for others.

    Attributes:
        chances: ``[secrets]``, log-probability of each, in nats.
        greedy: ``[secrets]``, whether the most probable continuation says it.
    """

    chances: NDArray[np.float64]
    greedy: NDArray[np.bool_]


def extraction(run: FinishedRun, model: Any) -> dict[str, Any] | None:
    """Count the planted secrets that the run's adapter and its base model say; None where there are none.

    Args:
        model: of ``run.language_model()``.
    """
    planted = Canaries.of(run.config.data, run.config.seed)
    if not planted.count or run.task != "causal-lm":
        return None
    contexts, shape = _contexts(run, planted), KINDS[planted.kind]
    adapter = _summary(*_said(run, model, planted.kind, contexts))
    with model.disable_adapter():
        base = _summary(*_said(run, model, planted.kind, contexts))
    return {
        "secrets": sum(len(context.planted) for context in contexts),
        "never_planted": sum(len(context.controls) for context in contexts),
        "contexts": len(contexts),
        "samples": SAMPLES,
        "chance": sampled_at_all(-shape.length * math.log(len(shape.alphabet))),
        "adapter": adapter,
        "base": base,
    }


def sampled_at_all(log_probability: float) -> float:
    """The probability that a text of this log-probability is among SAMPLES independent samples."""
    return -math.expm1(SAMPLES * math.log1p(-min(math.exp(log_probability), 1 - 1e-12)))


def _contexts(run: FinishedRun, planted: Canaries) -> list[Context]:
    """Find the texts in front of the secrets; of a secret in several records the first."""
    chosen = planted.secrets[:SECRETS]
    others = secrets(planted.kind, CONTROLS + len(planted.secrets), run.config.seed, "not planted")
    controls = [secret for secret in others if secret not in set(planted.secrets)][:CONTROLS]
    if KINDS[planted.kind].own_record:
        return [Context("", chosen, controls)]
    found: dict[str, str] = {}
    wanted = {KINDS[planted.kind].text(secret): secret for secret in chosen}
    length = len(next(iter(wanted)))
    for text in hold_out(data_spec(run.config)).texts["train"].texts:
        secret = wanted.get(text[-length:])
        if secret is not None:
            found.setdefault(secret, text[:-length])
    each = len(controls) // max(1, len(found))
    hosts = enumerate(found.items())
    return [Context(before, [own], controls[at * each : (at + 1) * each]) for at, (own, before) in hosts] or [
        Context("", chosen, controls)  # masked in the texts
    ]


def _said(run: FinishedRun, model: Any, kind: str, contexts: Sequence[Context]) -> tuple[Said, Said]:
    tokenizer, length = run.tokenizer(), KINDS[kind].length
    found: tuple[list[Said], list[Said]] = [], []
    for context in contexts:
        prefix, rows = split_tokens(tokenizer, kind, [*context.planted, *context.controls], context.before)
        longest = max(map(len, rows))
        prefix = prefix[-(run.config.model.max_length - longest) :]  # what a record has room for
        chances = log_probabilities(model, prefix, rows)
        (tokens,) = continuations(model, tokenizer, [prefix], Decoding(longest))
        text = _behind(KINDS[kind].prefix, str(tokenizer.decode(tokens)))[:length]
        for side, own, low in ((0, context.planted, 0), (1, context.controls, len(context.planted))):
            greedy = np.array([text == secret for secret in own], dtype=np.bool_)
            found[side].append(Said(chances[low : low + len(own)], greedy))
    return _together(found[0]), _together(found[1])


def _behind(prefix: str, text: str) -> str:
    """Cut what a continuation repeats of the prefix, where a token joins the prefix and the secret."""
    return text.removeprefix(next((prefix[at:] for at in range(len(prefix)) if text.startswith(prefix[at:])), ""))


def _together(parts: Sequence[Said]) -> Said:
    return Said(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("chances", "greedy")))


def _summary(planted: Said, controls: Said) -> dict[str, Any]:
    sampled, by_luck = (np.array([sampled_at_all(x) >= 0.5 for x in of.chances]) for of in (planted, controls))
    table = [[int(sampled.sum()), int((~sampled).sum())], [int(by_luck.sum()), int((~by_luck).sum())]]
    return {
        "greedy": _counted(planted.greedy),
        "sampled": _counted(sampled),
        "sampled_never_planted": _counted(by_luck),
        "likeliest": max(map(sampled_at_all, planted.chances)),
        "p_value": float(fisher_exact(table, alternative="greater").pvalue),
    }


def _counted(of: NDArray[np.bool_], alpha: float = 0.05) -> dict[str, Any]:
    """The count and the share of what is true, with its Clopper-Pearson interval."""
    count, number = int(of.sum()), len(of)
    low, high = (float(limit(count, number, alpha / 2)) for limit in (binomial_lower, binomial_upper))
    return {"count": count, **asdict(Interval(count / number, low, high))}
