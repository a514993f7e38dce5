"""A silo by name: from plain settings to its commitment and its private training.

The one module of the clients' room that knows the methods of ``strategies``, so that a client that protects its own
records can plan its own releases, wherever it runs. Nothing here looks at a record: the commitment is calibrated from
the number of units, which is taken as public.

A public schedule of the learning rate: warm-up from 0, then constant, linear to 0, or half a cosine to 0.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from client.engine.engine import Engine
from client.models.base import load_base
from client.models.tasks import make_task
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.units import COMBINE, GradientEngine, UnitGradients, UnitIndex
from client.worker import Job, make_engine
from privacy import checks
from privacy.commitment import Commitment
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise, InsecureZeroNoise, Noise
from privacy.randomness.sampling import CohortSampler
from strategies import AGGREGATIONS, CONTROLLERS, OPTIMIZERS
from strategies.adapter.layout import AdapterLayout
from strategies.aggregations.aggregation import Adapters
from strategies.calibration import calibrate
from strategies.controllers.controller import Controller, RunInfo
from strategies.plugins import Option, build
from strategies.private_training import Planner, ServerUpdate

if TYPE_CHECKING:
    from client.engine.sequential import OpacusEngine


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


def controller_of(silo: RecordLevelSettings) -> Controller[Any]:
    """The controller; ValueError naming what is wrong with its name or options."""
    controller: Controller[Any] = build("strategy.controller", CONTROLLERS, silo.controller, silo.controller_options)
    raw = getattr(controller, "raw", None)  # a published rule that no guarantee covers
    if raw is not None and silo.not_private is None:
        raise ValueError(f"strategy.controller = {silo.controller!r}: {raw}; set privacy.non-private = true")
    return controller


def commit(silo: RecordLevelSettings, population: int) -> tuple[Commitment, tuple[float, ...]]:
    """Calibrate for so many units: the commitment, and the effective noise multiplier of every step.

    Raises:
        ValueError: no noise keeps the target, or there are fewer units than a batch expects.
    """
    controller = controller_of(silo)
    commitment, multipliers = calibrate(
        controller,
        silo.sampling(population),
        silo.steps,
        epsilon=silo.epsilon,
        delta=silo.delta,
        mode=silo.mode,
    )
    share = getattr(controller, "noise_share", 1.0)
    floor = tuple(replace(step, noise_multiplier=step.noise_multiplier * share) for step in commitment.floor)
    if share == 1.0 or silo.not_private is None:
        return replace(commitment, not_private=silo.not_private), multipliers
    return replace(commitment, not_private=silo.not_private, floor=floor), multipliers


def setting_of(
    silo: RecordLevelSettings, population: int, layout: AdapterLayout, multipliers: tuple[float, ...], order: int | None
) -> RunInfo:
    """What the controller is told; public."""
    aggregation, adapters = _aggregation(silo), Adapters(layout.rank, population, silo.seed)
    layouts = tuple(aggregation.part(adapters, t).layout(layout).blocks() for t in range(1, silo.steps + 1))
    layouts = layouts[:1] if len(set(layouts)) == 1 else layouts
    return RunInfo(silo.steps, layouts, silo.sampling(population), multipliers, order)


def private_training(
    silo: RecordLevelSettings,
    engine: GradientEngine,
    index: UnitIndex,
    ledger: Ledger,
    multipliers: tuple[float, ...],
    sampler: CohortSampler,
    public_loss: Callable[[Float[Tensor, " size"]], float] | None = None,
) -> PrivateSgd:
    """The silo's training, which holds everything but its adapter.

    Args:
        silo: its settings.
        engine: on the silo's base model.
        index: the silo's units.
        ledger: created from :func:`commit`, or reopened.
        multipliers: of :func:`commit`.
        sampler: draws the batches.
        public_loss: for an optimizer that reads it.
    """
    controller, aggregation = controller_of(silo), _aggregation(silo)
    layout, population = engine.layout, len(index)
    setting = setting_of(silo, population, layout, multipliers, ledger.commitment.order)
    optimizer = build("strategy.optimizer", OPTIMIZERS, silo.optimizer, silo.optimizer_options)
    noise = noise_of(silo)
    return PrivateSgd(
        gradients=UnitGradients(engine, index, silo.combine),
        planner=Planner(controller, setting, aggregation, Adapters(layout.rank, population, silo.seed), None),
        server=ServerUpdate(optimizer, aggregation, layout, silo.served_average, noise),
        ledger=ledger,
        sampler=sampler,
        noise=noise,
        schedule=StepSchedule(silo.steps, silo.schedule, silo.warm_up),
        public_loss=public_loss,
    )


def record_level_engine(job: Job, gradients: str) -> "Engine | OpacusEngine":
    """The engine of a silo on a freshly loaded base model: ``"stacked"``, or ``"opacus"`` for its hooks.

    An adapter that cannot be stacked is trained one record at a time unless Opacus is asked for.
    """
    checks.one_of(("stacked", "opacus"), gradients=gradients)
    if gradients == "stacked":
        return make_engine(job)
    model, _ = load_base(job.model, job.task, job.num_labels)
    from client.engine.sequential import OpacusEngine  # Opacus and PEFT: not in the image, and slow to import

    return OpacusEngine(
        model,
        job.spec,
        make_task(job.task, job.num_labels),
        token_budget=job.token_budget or 2048,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def noise_of(silo: RecordLevelSettings) -> Noise:
    """The noise the settings name."""
    match silo.noise:
        case "discrete":
            return DiscreteGaussianNoise()
        case "insecure-zero":
            return InsecureZeroNoise()
        case _:
            return GaussianNoise()


def _aggregation(silo: RecordLevelSettings) -> Any:
    aggregation = build("strategy.aggregation", AGGREGATIONS, silo.aggregation, silo.aggregation_options)
    if aggregation.individual:
        raise ValueError(
            f"strategy.aggregation = {silo.aggregation!r}: combines several silos, and this is one; "
            "take plain, ffa, rolora, fedsvd or dp-dylora"
        )
    return aggregation
