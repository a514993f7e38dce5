"""Findings from a run's canaries: units with a coin (``audit.canaries``), and secrets in texts (``data.canaries``)."""

from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.stats import kstest

from client.data.canaries import DIGITS, KINDS, Canaries, secrets
from privacy.audit.in_run import audit_canaries
from privacy.audit.membership import attack
from server.evaluation.finished import FinishedRun
from server.run_folder.canaries import canaries_of, read_seen
from simulations.audit import exposure

CANDIDATES = 4095
"""Secrets that were not planted, to rank against where not all can be: 12 bits at most."""


def canary_findings(run: FinishedRun, population: int) -> dict[str, Any] | None:
    """Play the game on the releases of a run whose population holds canaries; None where it holds none.

    Raises:
        CorruptRun: the secret of the coins or what was seen is gone.
        ValueError: all coins fell alike.
    """
    canaries = canaries_of(run.config, run.folder, population)
    if canaries is None:
        return None
    found = audit_canaries(canaries, read_seen(run.folder), delta=float(run.config.privacy.delta))
    scores, coins = np.array(found.scores), np.array(found.included)
    told = attack(scores[coins], scores[~coins])
    plain = {name: value for name, value in asdict(found).items() if name not in ("scores", "included")}
    return {
        **plain,
        "canaries": canaries.count,
        "included": int(coins.sum()),
        "auc": asdict(told.auc),
        "curve": [list(point) for point in told.curve],
        "wrong": found.wrong,
    }


def exposures(run: FinishedRun, model: Any) -> dict[str, Any] | None:
    """Measure the exposure of planted secrets under the run's adapter and its base model; None where there are none.

    Exact ranks among all numbers where every digit is one token, else ranks among secrets that were not planted. The
    p-value is Kolmogorov and Smirnov's, one-sided: of secrets that were never seen ranks are uniform.

    Args:
        model: of ``run.language_model()``.

    Raises:
        ValueError: the tokenizer cannot be ranked by.
    """
    planted, config = Canaries.of(run.config.data, run.config.seed), run.config
    if not planted.count or run.task != "causal-lm":
        return None
    tokenizer, kind = run.tokenizer(), planted.kind
    shape = KINDS[kind]
    others = secrets(kind, CANDIDATES, config.seed, "not planted")
    others = [secret for secret in others if secret not in set(planted.secrets)]
    exact = digit_tokens(tokenizer, kind, planted.secrets)

    def ranked() -> list[exposure.Exposure]:
        if exact is None:
            return exposure.planted_exposures(model, tokenizer, kind, planted.secrets, others)
        prefix, digits = exact
        scores = exposure.all_numbers(model, prefix, digits, shape.length)
        return exposure.exact_exposures(scores, [int(secret) for secret in planted.secrets])

    under = ranked()
    with model.disable_adapter():
        before = ranked()
    most = np.log2(len(shape.alphabet) ** shape.length) if exact is not None else np.log2(len(others) + 1)
    return {
        "kind": kind,
        "secrets": planted.count,
        "copies": planted.copies,
        "ranks": "exact" if exact is not None else f"among {len(others)} secrets that were not planted",
        "most_bits": float(most),
        "adapter": _summary(under),
        "base": _summary(before),
    }


def _summary(found: list[exposure.Exposure]) -> dict[str, Any]:
    bits = np.array([one.bits for one in found])
    ranks = 2.0**-bits  # as a share of all secrets
    mean = asdict(exposure.mean_interval(found)) if len(found) > 1 else None
    p_value = float(kstest(ranks, "uniform", alternative="greater").pvalue)
    return {"mean": mean, "bits": [float(bit) for bit in bits], "p_value": p_value}


def digit_tokens(tokenizer: Any, kind: str, planted: list[str]) -> tuple[list[int], list[int]] | None:
    """The tokens in front of a number and those of 0 to 9; None where a number is not one token a digit."""
    shape = KINDS[kind]
    if shape.alphabet != DIGITS:
        return None
    same = [digit * shape.length for digit in DIGITS]
    prefix, rows = exposure.split_tokens(tokenizer, kind, [*same, *planted])
    digits = [row[0] for row in rows[: len(DIGITS)]]
    spelt = [[digits[int(letter)] for letter in secret] for secret in (*same, *planted)]
    return (prefix, digits) if rows == spelt and len(set(digits)) == len(DIGITS) else None
