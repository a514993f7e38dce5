"""Statistics of the private units of one site, in public bins: priced, charged to a ledger of its own, released.

A unit (a client, or what a site protects) brings one row (:func:`client.data.columns.shares.share_row`) of three or
four parts, each of which sums to at most 1, so that it is no longer than the square root of 4. The rows of all units
are ONE Gaussian release of the mechanism, charged before any noise is drawn; every value of the mean over the n units
has noise of z sqrt(4) / n. Guarantee: the (epsilon, delta) that was asked for, adding or removing one unit.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from client.data.columns.shares import parts_of, share_row
from client.data.prepared import PreparedData
from client.data.records import MOST_AT_ONCE, Records
from privacy import durable
from privacy.accountants import floor_commitment
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At
from privacy.mechanism import charged_release
from privacy.randomness.sampling import CohortSampler

if TYPE_CHECKING:
    from client.data.local import OwnData

ACTION: Final = "ask"
"""Name of the release, and of Flower's message type, ``train.ask``."""


@dataclass(frozen=True)
class Question:
    """The counts that are asked for, and their price.

    Attributes:
        commitment: the one release.
        noise_multiplier: z of the plan.
        labels: names of the labels; empty for a language model.
        louder: standard deviation of the noise that an answer carries, in units of what the plan says.
    """

    commitment: Commitment
    noise_multiplier: float
    labels: tuple[str, ...]
    louder: float = 1.0

    @property
    def parts(self) -> dict[str, int]:
        """The number of bins of every part of a row."""
        return parts_of(len(self.labels))

    @property
    def plan(self) -> Plan:
        """The release: a mean row, clipped at a length that no row exceeds."""
        return Plan(FlatClip(math.sqrt(len(self.parts)), sum(self.parts.values())), self.noise_multiplier)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise of every share."""
        return self.louder * float(self.plan.noise_std(self.commitment.population))


@dataclass(frozen=True)
class Source:
    """The private units of a simulation, or of one site.

    Attributes:
        order, starts, stops: unit `i` has the records ``order[starts[i]:stops[i]]``.
        population: public number of units; more than there are where a node says so.
        model: base model whose tokenizer made the records.
    """

    records: Records
    labels: tuple[str, ...]
    order: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    population: int
    model: str

    @staticmethod
    def of(data: PreparedData, unit: str, model: str) -> "Source":
        """Find the units of a simulation, or of one site, by what is protected: client, record or group."""
        if unit == "client":
            return Source.of_clients(data, data.label_names, model)
        return Source.of_records(data.train, data.label_names, model, grouped=unit == "group")

    @staticmethod
    def of_clients(
        data: "PreparedData | OwnData", labels: tuple[str, ...], model: str, population: int = 0
    ) -> "Source":
        """Units that are clients: of a simulation, or of a node with many."""
        records, stops = (data.train, data.stops) if isinstance(data, PreparedData) else (data.records, data.stops)
        assert stops is not None, "a node that is one client has no units to count"
        stops = np.asarray(stops)
        starts = np.asarray(data.starts) if isinstance(data, PreparedData) else np.append(0, stops[:-1])
        return Source(records, labels, np.arange(len(records)), starts, stops, population or len(stops), model)

    @staticmethod
    def of_records(records: Records, labels: tuple[str, ...], model: str, *, grouped: bool) -> "Source":
        """Units that are records of one site, or groups of them.

        Raises:
            ValueError: there are none.
        """
        from client.record_level.units import UnitIndex  # loads PEFT, which counting clients need not pay for

        index = UnitIndex.of(records, grouped=grouped)
        return Source(records, labels, index.order, index.starts[:-1], index.starts[1:], len(index), model)

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, unit: int, question: Question) -> np.ndarray:
        """The row of shares of one unit, of its own records alone."""
        own = self.records.select(self.order[self.starts[unit] : self.stops[unit]])
        return share_row(own, len(question.labels), self.model)


def price(population: int, unit: str, labels: tuple[str, ...], epsilon: float, delta: float) -> Question:
    """Price the three questions; nothing is spent. ValueError where no noise keeps the target."""
    commitment, z = floor_commitment(epsilon, delta, Poisson(1.0, population, unit), 1, label=ACTION)
    return Question(commitment, z, labels)


def answer(source: Source, question: Question, ledger_file: Path, account: At | None = None) -> Tensor:
    """Charge a new ledger, then release the mean row.

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

    def make() -> Ledger:
        durable.new_folder(ledger_file.parent)
        return Ledger.create(ledger_file, paid)

    with debited_ledger(None, make, account, paid) as ledger:
        cohort = sampler.draw(sampling, 0, label=ACTION)
        return charged_release(total, plan, cohort, ledger=ledger).update
