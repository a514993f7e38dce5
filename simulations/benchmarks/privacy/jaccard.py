r"""The share of a record that a model writes: Jaccard similarity of n-grams, less that of records it never saw.

    J_n(a, b) = |A_n & B_n| / |A_n | B_n|          A_n, B_n: the sets of n-grams of a and b, n = 1 to 4

RLDP (arXiv 2507.22565) reports J_n as it is. Texts of one kind share n-grams whoever wrote them, so that number says
nothing alone; stated here is its mean over members less its mean over held-out records, 0 in the mean for a model that
has seen neither. The model is given the first half of a record, or the prompt of one that has an answer, and goes on
greedily; n-grams are of tokens, so that it works in any language.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from client.data.chat import Rendered
from client.data.records import Records
from client.data.spec import ANSWERS
from client.generation import Decoding, continuations
from client.models.base import positions
from privacy.audit.bounds import binomial_upper
from privacy.audit.roc import Interval
from privacy.randomness.rng import simulation_generator
from server.evaluation.finished import FinishedRun

GRAMS = (1, 2, 3, 4)

RECORDS = 100
"""Most records of either side."""

NEW_TOKENS = 32
"""Most tokens that are compared; half of ``model.max-length`` where that is less."""


def jaccard(first: Sequence[Any], second: Sequence[Any], n: int) -> float:
    """The similarity of the sets of n-grams of two sequences; 0 where neither is `n` long."""
    one, two = ({tuple(of[at : at + n]) for at in range(len(of) - n + 1)} for of in (first, second))
    return len(one & two) / max(1, len(one | two))


def excess(members: ArrayLike, others: ArrayLike, alpha: float = 0.05) -> Interval:
    """The mean of the members' similarities less that of the others', with a 1 - alpha interval.

    All similarities lie within [0, 1].

    Welch's t. Where all values of a side are equal, or it has one, there is no variance to go by: then the limits are
    those that n times the value 0 leaves to the mean of a variable within [0, 1] (Clopper-Pearson), which are wide.
    """
    inside, outside = np.asarray(members, dtype=np.float64), np.asarray(others, dtype=np.float64)
    estimate = float(inside.mean() - outside.mean())
    n, m = len(inside), len(outside)
    if min(n, m) > 1 and (np.ptp(inside) or np.ptp(outside)):
        one, two = inside.var(ddof=1) / n, outside.var(ddof=1) / m
        freedom = (one + two) ** 2 / (one**2 / (n - 1) + two**2 / (m - 1))
        half = float(student.ppf(1 - alpha / 2, freedom) * np.sqrt(one + two))
        return Interval(estimate, max(-1.0, estimate - half), min(1.0, estimate + half))
    most = float(binomial_upper(0, min(n, m), alpha / 2))
    return Interval(estimate, max(-1.0, estimate - most), min(1.0, estimate + most))


def record_jaccard(run: FinishedRun, model: Any, sets: tuple[Records, Records]) -> dict[str, Any] | None:
    """Measure the excess of the run's adapter and of its base model.

    None where the records are too short to be continued.

    Args:
        model: of ``run.language_model()``.
        sets: members, and held-out records.
    """
    longest = min(NEW_TOKENS, run.config.model.max_length // 2)
    room = positions(model) - longest
    tasks = [[task for task in _tasks(records, run.task, longest) if len(task[0]) <= room] for records in sets]
    draws = simulation_generator(run.config.seed, "audited texts")
    chosen = [[own[at] for at in draws.permutation(len(own))[:RECORDS]] for own in tasks]
    if min(map(len, chosen)) < 2:
        return None
    tokenizer, decoding = run.tokenizer(), Decoding(longest)

    def found() -> list[dict[str, Any]]:
        said = continuations(model, tokenizer, [prompt for own in chosen for prompt, _ in own], decoding)
        wanted = [reference for own in chosen for _, reference in own]
        count = len(chosen[0])
        rows = []
        for n in GRAMS:
            values = np.array([jaccard(a[: len(b)], b, n) for a, b in zip(said, wanted, strict=True)])
            own = {"n": n, "members": float(values[:count].mean())}
            rows.append({**own, **asdict(excess(values[:count], values[count:]))})
        return rows

    under = found()
    with model.disable_adapter():
        before = found()
    return {
        "members": len(chosen[0]),
        "held_out": len(chosen[1]),
        "new_tokens": longest,
        "adapter": under,
        "base": before,
    }


def _tasks(records: Records, task: str, longest: int) -> list[tuple[list[int], list[int]]]:
    """Split records into a prompt and what follows it, where at least the longest n-gram follows."""
    found = []
    for start, stop in zip(records.offsets[:-1], records.offsets[1:], strict=True):
        tokens = records.tokens[start:stop].tolist()
        cut, end = len(tokens) // 2, len(tokens) - 1  # what ends the text is no part of it
        if task in ANSWERS:
            assert records.token_weights is not None
            cut, end = Rendered(tokens, records.token_weights[start:stop].tolist()).last_answer
        if cut and end - cut >= max(GRAMS):
            found.append((tokens[:cut], tokens[cut : min(end, cut + longest)]))
    return found
