"""Reading what private units say of their records before a run: shares, quantiles and advice, with their intervals.

How rows are bounded, charged and released is in :mod:`client.record_level.statistics`; all here is post-processing of a
released mean row. Bins are the same for everybody: bins that follow the data would be an answer that nobody paid for.
Questions in words are not taken: what one unit moves the answer by is unknown.
"""

import math
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from client.data.columns.scripts import SCRIPTS
from client.data.columns.shares import RECORDS, TOKENS
from client.record_level.statistics import Question
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.evaluation.private import NORMAL_95
from server.evaluation.shares import nearest_shares

LONGEST: Final = 4096
COHORT: Final = 100
"""Units that are expected in a round, where there are so many: the noise of the mean falls with their number."""
KEPT_TEXTS, KEPT_UNITS = 0.95, 0.9
"""Advice: cut at most a twentieth of the texts; leave nine units of ten all their records."""


def uncut(config: RunConfig) -> RunConfig:
    """The settings under which texts keep their length.

    Raises:
        ConfigError: under these settings nothing protects the answers.
    """
    if config.privacy.non_private:
        raise ConfigError("privacy.non-private = true: an answer is protected or not given; leave it out")
    return config.model_copy(update={"model": config.model.model_copy(update={"max_length": LONGEST})})


def share_within(question: Question) -> float:
    """Half the width of the 95 % interval around every share."""
    return NORMAL_95 * question.noise_std


def price_words(question: Question) -> str:
    """The price in words, before anything is spent."""
    one, within = question.commitment, 100 * share_within(question)
    return (
        f"This costs epsilon {one.epsilon:g} at delta {one.delta:g} for each of {one.population:,} "
        f"{one.unit.removeprefix('group:')}s, added to whatever else is done with these data. Every share is then "
        f"known to +-{within:.2g} points (95 %)."
    )


def answers(question: Question, mean: Tensor, *, everyone: bool = True) -> dict[str, Any]:
    """Read shares, quantiles and advice, with their intervals, from a released mean row.

    Args:
        everyone: every unit brought a row. Else those that brought none are counted among those without records.
    """
    noisy = dict(zip(question.parts, torch.split(mean.double().clone(), list(question.parts.values())), strict=True))
    within, units = share_within(question), question.commitment.population
    of_units_within = within
    if not everyone:
        noisy["records"][0] = 1.0 - noisy["records"][1:].sum()
        of_units_within *= math.sqrt(len(noisy["records"]) - 1)
    records = nearest_shares(noisy["records"], 1.0)
    filled = 1.0 - float(records[0])
    blocks = {name: records if name == "records" else nearest_shares(part, filled) for name, part in noisy.items()}
    of_units = _quantiles(noisy["records"], records, RECORDS, within)
    of_texts = _quantiles(noisy["tokens"], blocks["tokens"], TOKENS, within)
    below = blocks["tokens"].cumsum(0)
    cut = {edge: float((below[-1] - below[i]).clamp(0, 1)) for i, edge in enumerate(TOKENS)}
    return {
        "epsilon": question.commitment.epsilon,
        "delta": question.commitment.delta,
        "unit": question.commitment.unit,
        "units": units,
        "share_within": within,
        "units_with_records": {"value": round(units * filled), "within": math.ceil(units * of_units_within)},
        "records_per_unit": {"shares": _named(blocks["records"], RECORDS), "quantiles": of_units},
        "tokens_per_text": {"shares": _named(blocks["tokens"], TOKENS), "quantiles": of_texts, "cut_at": cut},
        "scripts": dict(zip(SCRIPTS, blocks["scripts"].tolist(), strict=True)),
        "labels": {
            name: float(share)
            for name, share in zip(question.labels, blocks.get("labels", torch.zeros(0)), strict=True)
        },
        "advice": {
            "clients": max(1, round(units * filled)),
            "sampling-rate": round(min(1.0, COHORT / max(1.0, units * filled)), 4),
            "model.max-length": of_texts[str(KEPT_TEXTS)]["value"] or LONGEST,
            "site.records-per-unit": of_units[str(KEPT_UNITS)]["value"] or 0,
        },
    }


def _quantiles(
    noisy: Tensor, fitted: Tensor, edges: tuple[int, ...], within: float
) -> dict[str, dict[str, int | None]]:
    """The bin in which a quantile lies, by its upper end (None: beyond the last), and the ends of its 95 % interval."""
    widths, below, raw = within * torch.arange(1, len(noisy) + 1).sqrt(), fitted.cumsum(0), noisy.cumsum(0)

    def first(reached: Tensor) -> int | None:
        found = torch.nonzero(reached[: len(edges)])
        return edges[int(found[0])] if len(found) else None

    def at(level: float) -> dict[str, int | None]:
        aim = level * float(below[-1]) - 1e-12
        ends = below >= aim, raw + widths >= aim, raw - widths >= aim
        return dict(zip(("value", "least", "most"), map(first, ends), strict=True))

    return {str(level): at(level) for level in (0.5, KEPT_UNITS, KEPT_TEXTS, 0.99)}


def _named(shares: Tensor, edges: tuple[int, ...]) -> dict[str, float]:
    """The shares by the names of their bins, such as "5-8" and "over 1024"."""
    names = [str(edges[0]) if not edges[0] else f"0-{edges[0]}"]
    names += [str(high) if high == low + 1 else f"{low + 1}-{high}" for low, high in pairwise(edges)]
    return dict(zip([*names, f"over {edges[-1]}"], shares.tolist(), strict=True))
