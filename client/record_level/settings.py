"""The settings that decide the private training of one site: they travel as JSON, with the schedule of its steps.

Nothing here needs torch, so that a command which only reads settings starts at once.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from client.settings import Count, CountOrAuto, Fraction, Options, Positive, Table
from privacy import checks
from privacy.events import ExampleLevelPoisson, Poisson

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class StepSchedule:
    """The factor on the learning rate of every step t = 1..T; decided before any data is seen.

    Attributes:
        steps: T.
        shape: one of :data:`SHAPES`.
        warm_up: steps w in which the factor rises as t / w.
    """

    steps: int
    shape: str = "constant"
    warm_up: int = 0

    def __post_init__(self) -> None:
        checks.integer_at_least(1, steps=self.steps)
        checks.integer_at_least(0, warm_up=self.warm_up)
        checks.one_of(SHAPES, schedule=self.shape)
        if self.warm_up >= self.steps:
            raise ValueError(f"warm_up must be < steps ({self.steps}), got {self.warm_up}; the full rate is never used")

    def __call__(self, step: int) -> float:
        """The factor, in (0, 1] within the planned steps."""
        if step <= self.warm_up:
            return step / self.warm_up
        done = min(1.0, (step - self.warm_up - 1) / (self.steps - self.warm_up))
        match self.shape:
            case "linear":
                return 1.0 - done
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * done))
            case _:
                return 1.0


class PrivacyTarget(Table):
    """The guarantee that is asked for, and the kind of noise that gives it; of the ``[privacy]`` table.

    Attributes:
        epsilon: epsilon of the whole run, for one unit added or removed.
        delta: probability with which the guarantee may fail; below one over the number of units.
        noise: distribution of the noise; ``insecure-zero`` adds none and voids the guarantee.
        mode: rule of the ledger: ``floor`` fixes the noise of every round before the run, ``filter`` lets it be spent
            unevenly.
    """

    epsilon: Positive = 4.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    noise: Literal["gaussian", "discrete", "insecure-zero"] = "gaussian"
    mode: Literal["floor", "filter"] = "floor"


class MethodSettings(Table):
    """The ``[strategy]`` table: the methods of whoever plans the releases, a server or a site.

    Attributes:
        controller: method that decides clipping and noise of the next round: a name (docs/methods.md), or
            "package.module:Class".
        aggregation: method that decides which values of the adapter are trained and how they are combined; named alike.
        optimizer: method that takes the step on the released update; named alike.
        controller_options, aggregation_options, optimizer_options: options of that method, by name.
        served_average: decay of the exponential moving average that gives the served adapter.
    """

    controller: str = "dp-lac"
    controller_options: Options = Field(default_factory=dict)
    aggregation: str = "plain"
    aggregation_options: Options = Field(default_factory=dict)
    optimizer: str = "fedavg"
    optimizer_options: Options = Field(default_factory=dict)
    served_average: Fraction = 0.0


class StepSettings(Table):
    """The size and length of private steps: the ``[site]`` table.

    Attributes:
        sampling_level: what a batch draws where groups are protected: ``user`` draws whole units, each of which brings
            one clipped row; ``example`` draws records, each of which brings one.
        batch_size: expected number of units (records, patients) in a batch; of records with ``sampling-level =
            "example"``.
        records_per_unit: most records of a unit in one step, which bounds the work on a large group; 0 takes all. With
            ``sampling-level = "example"`` most records of a unit in the whole run, which its noise covers.
        combine: rule that combines the gradients of a unit's records.
        schedule: schedule of the learning rate over the steps.
        warm_up: steps in which the learning rate rises.
    """

    sampling_level: Literal["user", "example"] = "user"
    batch_size: Count = 64
    records_per_unit: CountOrAuto = 0
    combine: Literal["mean", "sum"] = "mean"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warm_up: CountOrAuto = 0


class RecordLevelSettings(PrivacyTarget, MethodSettings, StepSettings):
    """Everything that decides the private training of one site; travels as JSON.

    Attributes:
        unit: ``"record"``, or ``"group:NAME"`` where the records of a patient, author or document are one unit.
        steps: private steps T over the site's whole life, for which its ledger is committed.
        seeded: batches are drawn from the seed, which voids the guarantee.
        not_private: why there is no guarantee, or None.
        seed: of the public randomness.
    """

    unit: str
    steps: Count
    seeded: bool = False
    not_private: str | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _sensible(self) -> "RecordLevelSettings":
        _ = self.learning_rates
        if (self.noise == "insecure-zero" or self.seeded) and self.not_private is None:
            raise ValueError(
                "not_private must say why: without noise, or with batches that can be foretold, it is none"
            )
        if self.sampling_level == "example" and not (self.unit.startswith("group:") and self.records_per_unit):
            raise ValueError(
                "sampling_level = 'example' needs groups as units and records_per_unit >= 1, got unit = "
                f"{self.unit!r}, records_per_unit = {self.records_per_unit}: the cap is what a unit's noise is for; a "
                "record that is a unit is drawn by itself as it is"
            )
        return self

    @property
    def learning_rates(self) -> StepSchedule:
        """The factor on the learning rate of every step."""
        return StepSchedule(self.steps, self.schedule, self.warm_up)

    def sampling(self, population: int, records: int = 0) -> Poisson:
        """The sampling by which a batch is drawn from so many units; ValueError if they are too few.

        Args:
            records: of all units under the cap, see :attr:`client.record_level.units.UnitIndex.kept`; used with
                ``sampling_level = "example"`` only.
        """
        if self.sampling_level == "example":
            if self.batch_size > records:
                raise ValueError(
                    f"batch_size must be <= the number of records under the cap ({records}), got {self.batch_size}; "
                    "it is the EXPECTED number of records in a batch"
                )
            most = self.records_per_unit
            return ExampleLevelPoisson(self.batch_size / records, population, self.unit, most, records)
        if self.batch_size > population:
            raise ValueError(
                f"batch_size must be <= the number of units ({population}), got {self.batch_size}; "
                "it is the EXPECTED number of units in a batch"
            )
        return Poisson(self.batch_size / population, population, self.unit)
