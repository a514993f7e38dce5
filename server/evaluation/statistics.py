"""Statistics of private units before a run: three questions with public bins, answered once, with noise and paid for.

A unit (a client, or what a single site protects) brings one row of shares: which bin the number of its records lies in,
and of its records the share in every bin of length and with every label. Each of the three parts sums to at most 1, so
the row is no longer than the square root of 3. The rows of all units are ONE Gaussian release of the mechanism, charged
to a ledger of its own before any noise is drawn; every value of the mean over the n units has noise of z sqrt(3) / n.

Guarantee: the (epsilon, delta) that was asked for, adding or removing one unit; intervals, quantiles and advice are
post-processing. Bins are the same for everybody: bins that follow the data would be an answer that nobody paid for.
Questions in words are not taken: what one unit moves the answer by is unknown.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from client.data.prepared import PreparedData
from privacy.accountants import floor_commitment
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.ledger.account import At, debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.mechanism import charged_release
from privacy.randomness.sampling import CohortSampler
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.evaluation.private import NORMAL_95

RECORDS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the bins of a unit's records; the last bin is open."""
TOKENS: Final = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Upper ends of the bins of a text's tokens; the last bin is open."""
LONGEST: Final = 4096
COHORT: Final = 100
"""Units that are expected in a round, where there are so many: the noise of the mean falls with their number."""
MOST_AT_ONCE: Final = 4096
KEPT_TEXTS, KEPT_UNITS = 0.95, 0.9
"""Advice: cut at most a twentieth of the texts; leave nine units of ten all their records."""


@dataclass(frozen=True)
class Question:
    """The counts that are asked for, and their price.

    Attributes:
        commitment: the one release.
        noise_multiplier: z.
        labels: names of the labels; empty for a language model.
    """

    commitment: Commitment
    noise_multiplier: float
    labels: tuple[str, ...]

    @property
    def parts(self) -> dict[str, int]:
        """The number of bins of every part of a row."""
        found = {"records": len(RECORDS) + 1, "tokens": len(TOKENS) + 1}
        return found | ({"labels": len(self.labels)} if self.labels else {})

    @property
    def plan(self) -> Plan:
        """The release: a mean row, clipped at a length that no row exceeds."""
        return Plan(FlatClip(math.sqrt(len(self.parts)), sum(self.parts.values())), self.noise_multiplier)

    @property
    def within(self) -> float:
        """Half the width of the 95 % interval around every share."""
        return NORMAL_95 * float(self.plan.noise_std(self.commitment.population))

    @property
    def price(self) -> str:
        """The price in words, before anything is spent."""
        one = self.commitment
        return (
            f"This costs epsilon {one.epsilon:g} at delta {one.delta:g} for each of {one.population:,} "
            f"{one.unit.removeprefix('group:')}s, added to whatever else is done with these data. Every share is then "
            f"known to +-{100 * self.within:.2g} points (95 %)."
        )


@dataclass(frozen=True)
class Source:
    """The private units of a run's settings.

    Attributes:
        data: with texts of up to :data:`LONGEST` tokens.
        order, starts, stops: unit `i` has the records ``order[starts[i]:stops[i]]``.
    """

    data: PreparedData
    order: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @staticmethod
    def of(config: RunConfig, data: PreparedData) -> "Source":
        """Find the units of a simulation or of one site in its data, which :func:`uncut` settings have prepared."""
        if config.privacy.unit == "client":
            return Source(data, np.arange(len(data.train)), np.asarray(data.starts), np.asarray(data.stops))
        from client.record_level.units import UnitIndex  # loads PEFT, which counting clients need not pay for

        index = UnitIndex.of(data.train, grouped=config.privacy.unit == "group", most=0, seed=config.seed)
        return Source(data, index.order, index.starts[:-1], index.starts[1:])

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, unit: int, question: Question) -> Float64[np.ndarray, " k"]:
        """The row of shares of one unit, of its own records alone."""
        records = self.order[self.starts[unit] : self.stops[unit]]
        lengths = self.data.train.lengths[records]
        found = [_shares(np.array([len(records)]), RECORDS), _shares(lengths, TOKENS)]
        if question.labels:
            assert self.data.train.labels is not None
            counts = np.bincount(np.asarray(self.data.train.labels)[records], minlength=len(question.labels))
            found.append(counts / max(len(records), 1))
        return np.concatenate(found)


def uncut(config: RunConfig) -> RunConfig:
    """The settings under which texts keep their length.

    Raises:
        ConfigError: the records are not here.
    """
    if config.is_deployed or config.several_sites:
        raise ConfigError(
            "statistics are asked of records that are here: of a simulation's clients, or of one site (clients = 1); "
            f"got data.held-by = {config.data.held_by!r}, clients = {config.clients}"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"max_length": LONGEST})})


def price(source: Source, config: RunConfig, epsilon: float, delta: float) -> Question:
    """Price the three questions; nothing is spent. ValueError where no noise keeps the target."""
    everyone = Poisson(1.0, len(source), config.unit)
    commitment, z = floor_commitment(epsilon, delta, everyone, 1, label="ask")
    return Question(commitment, z, source.data.label_names)


def answer(source: Source, question: Question, ledger_file: Path, account: At | None = None) -> dict[str, Any]:
    """Charge a new ledger, then release the answers.

    Args:
        account: of the data, debited first, as a run's is.

    Raises:
        FileExistsError: there is a ledger; nothing is spent twice.
        AccountRefused: the account does not pay.
    """
    plan, sampling = question.plan, question.commitment.floor[0].sampling
    total = Contribution.zero(plan)
    for start in range(0, len(source), MOST_AT_ONCE):
        rows = [source.row(unit, question) for unit in range(start, min(start + MOST_AT_ONCE, len(source)))]
        total = total + contribute(Units(torch.from_numpy(np.array(rows))), plan)
    paid, sampler = question.commitment, CohortSampler.create()
    with debited_ledger(None, lambda: Ledger.create(ledger_file, paid), account, paid) as ledger:
        cohort = sampler.draw(sampling, 0, label="ask")
        release = charged_release(total, plan, cohort, ledger=ledger)
    return answers(question, release.update)


def answers(question: Question, mean: Tensor) -> dict[str, Any]:
    """Read shares, quantiles and advice, with their intervals, from a released mean row."""
    noisy = dict(zip(question.parts, torch.split(mean.double(), list(question.parts.values())), strict=True))
    within, units = question.within, question.commitment.population
    records = _fitted(noisy["records"], 1.0)
    filled = 1.0 - float(records[0])
    blocks = {name: records if name == "records" else _fitted(part, filled) for name, part in noisy.items()}
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
        "units_with_records": {"value": round(units * filled), "within": math.ceil(units * within)},
        "records_per_unit": {"shares": _named(blocks["records"], RECORDS), "quantiles": of_units},
        "tokens_per_text": {"shares": _named(blocks["tokens"], TOKENS), "quantiles": of_texts, "cut_at": cut},
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


def _shares(values: np.ndarray, edges: tuple[int, ...]) -> np.ndarray:
    """The share of values in every bin; zeros of none."""
    counts = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1)
    return counts / max(len(values), 1)


def _fitted(noisy: Tensor, total: float) -> Tensor:
    """The shares nearest to noisy ones, none below 0, that sum to ``total``: most of the noise of empty bins goes.

    Projection onto the simplex; Duchi et al. 2008 (ICML), Figure 1.
    """
    ordered = noisy.sort(descending=True).values
    excess = (ordered.cumsum(0) - total) / torch.arange(1, len(noisy) + 1)
    last = int(torch.nonzero(ordered > excess)[-1]) if bool((ordered > excess).any()) else 0
    return (noisy - excess[last]).clamp(0.0)


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
