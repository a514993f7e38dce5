"""What decides the private training of one silo: plain settings that travel as JSON, and the schedule of its steps.

Nothing here needs torch, so that a command which only reads settings starts at once.
"""

import json
import math
from dataclasses import asdict, dataclass, field

from client.record_level.units import COMBINE
from privacy import checks
from privacy.events import Poisson
from strategies.plugins import Option

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


NOISES = ("gaussian", "discrete", "insecure-zero")


@dataclass(frozen=True)
class RecordLevelSettings:
    """Everything that decides the private training of one silo; travels as JSON.

    Attributes:
        unit: ``"record"``, or ``"group:NAME"`` where the records of a patient, author or document are one unit.
        steps: private steps T over the silo's whole life, for which its ledger is committed.
        batch_size: expected units in a batch, q n.
        epsilon, delta: the guarantee, for one unit added or removed.
        mode: ``"floor"`` or ``"filter"``, see :mod:`privacy.commitment`.
        noise: one of :data:`NOISES`.
        seeded: batches are drawn from the seed, which voids the guarantee.
        not_private: why there is no guarantee, or None.
        records_per_unit: most records of a unit in one step; 0 takes all.
        combine: how the records of a unit become one row, ``"mean"`` or ``"sum"``.
        controller, optimizer, aggregation: names, see :mod:`strategies`, with their options.
        served_average: factor of the exponential moving average of the served adapter.
        schedule, warm_up: of the learning rate, see :class:`client.record_level.settings.StepSchedule`.
        seed: of the public randomness.
    """

    unit: str
    steps: int
    batch_size: int
    epsilon: float
    delta: float
    mode: str = "floor"
    noise: str = "gaussian"
    seeded: bool = False
    not_private: str | None = None
    records_per_unit: int = 0
    combine: str = "mean"
    controller: str = "fixed"
    controller_options: dict[str, Option] = field(default_factory=dict)
    optimizer: str = "fedadam"
    optimizer_options: dict[str, Option] = field(default_factory=dict)
    aggregation: str = "plain"
    aggregation_options: dict[str, Option] = field(default_factory=dict)
    served_average: float = 0.0
    schedule: str = "constant"
    warm_up: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer_at_least(1, steps=self.steps, batch_size=self.batch_size)
        checks.one_of(NOISES, noise=self.noise)
        checks.one_of(COMBINE, combine=self.combine)
        StepSchedule(self.steps, self.schedule, self.warm_up)
        if (self.noise == "insecure-zero" or self.seeded) and self.not_private is None:
            raise ValueError(
                "not_private must say why: without noise, or with batches that can be foretold, it is none"
            )

    def sampling(self, population: int) -> Poisson:
        """How a batch is drawn from so many units; ValueError if they are too few."""
        if self.batch_size > population:
            raise ValueError(
                f"batch_size must be <= the number of units ({population}), got {self.batch_size}; "
                "it is the EXPECTED number of units in a batch"
            )
        return Poisson(self.batch_size / population, population, self.unit)

    def to_json(self) -> str:
        """Canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "RecordLevelSettings":
        """The inverse of :meth:`to_json`; ValueError for anything else."""
        try:
            return RecordLevelSettings(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"silo is not one of this version ({error})") from error
