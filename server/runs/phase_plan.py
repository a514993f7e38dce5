"""Training in phases on one adapter, some with noise and some without, and what the whole of it guarantees.

- redaction: training without noise on texts without their sensitive spans (the first phase of JFT);
- JFT, "just fine-tune twice": redaction, then DP-SGD on the original texts;
- ATDP: any of these, and then a short phase of DP-SGD with token weights and rising noise.

References: Shi, Shea, Chen, Zhang, Jia, Yu, "Just Fine-tune Twice" (EMNLP 2022, arXiv 2204.07667); Yu, Singh, Li, Cao,
"ATDP" (2025). Guarantee: that of :class:`server.runs.guarantee.Guarantee`. Deviation: where a phase without noise read
the private texts, the papers print the epsilon of the private phases as the pipeline's; here it is infinite at record
level, because later noise takes nothing back.

All private phases share one ledger, committed before any text is read: floor mode, every step with its own noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from client.data.sensitive import check_detector
from client.record_level.calibration import commit, controller_of
from client.record_level.settings import RecordLevelSettings
from privacy import checks
from privacy.commitment import Commitment, FloorStep, check_delta
from privacy.events import Json
from privacy.ledger.budget import FloorOdometer
from privacy.ledger.statement import rounded_up
from server.runs.commitment import priced
from strategies.calibration import given
from strategies.plugins import Option

TEXTS = {"original": "none", "weighted": "weights", "redacted": "redaction"}
"""What a phase may train on, and what ``data.sensitive`` calls it."""


@dataclass(frozen=True)
class NonPrivatePhase:
    """A phase without noise.

    Attributes:
        name: in reports.
        text: ``"original"``, ``"weighted"`` or ``"redacted"``.
        detector: of this phase; empty takes that of all.
        epochs, batch_size, learning_rate, optimizer, weight_decay: see
            :class:`client.engine.local_training.LocalTraining`.
    """

    name: str
    text: str = "original"
    detector: str = ""
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        checks.not_empty(name=self.name)
        checks.one_of(tuple(TEXTS), text=self.text)
        if self.detector:
            check_detector(self.detector)


@dataclass(frozen=True)
class DpPhase:
    """A phase of DP-SGD.

    Attributes:
        name, text, detector: as in :class:`NonPrivatePhase`.
        steps: private steps.
        batch_size: expected units in a batch.
        noise_multiplier: sigma_0, which the controller's schedule multiplies; 0 takes the least for which all private
            phases together cost the run's epsilon.
        controller, optimizer, schedule, warm_up: see :class:`client.record_level.settings.RecordLevelSettings`.
    """

    name: str
    text: str = "original"
    detector: str = ""
    steps: int = 100
    batch_size: int = 64
    noise_multiplier: float = 0.0
    controller: str = "fixed"
    controller_options: dict[str, Option] = field(default_factory=dict)
    optimizer: str = "fedadam"
    optimizer_options: dict[str, Option] = field(default_factory=dict)
    schedule: str = "constant"
    warm_up: int = 0

    def __post_init__(self) -> None:
        checks.not_empty(name=self.name)
        checks.one_of(tuple(TEXTS), text=self.text)
        if self.detector:
            check_detector(self.detector)
        checks.integer_at_least(1, steps=self.steps, batch_size=self.batch_size)
        checks.non_negative(noise_multiplier=self.noise_multiplier, remedy="0 calibrates it")


Phase = NonPrivatePhase | DpPhase


@dataclass(frozen=True)
class Phases:
    """Phases in order, and the target of the private ones.

    Attributes:
        phases: at least one.
        epsilon, delta: what all private phases together may cost, one unit added or removed.
        unit: see :class:`client.record_level.settings.RecordLevelSettings`.
        detector: of phases that name none.
        seed: of the public randomness.
        records_per_unit, combine: see :class:`client.record_level.settings.RecordLevelSettings`.
    """

    phases: tuple[Phase, ...]
    epsilon: float
    delta: float
    unit: str = "record"
    detector: str = "regex"
    seed: int = 0
    records_per_unit: int = 0
    combine: str = "mean"

    def __post_init__(self) -> None:
        checks.not_empty(phases=self.phases)
        checks.positive(epsilon=self.epsilon, delta=self.delta)
        check_detector(self.detector)
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"phases must have names of their own, got {', '.join(names)}")
        detectors = {self.detector_of(phase) for phase in self.ordinary if phase.text == "redacted"}
        if len(detectors) > 1:
            raise ValueError(
                f"detector must be the same in all phases without noise, got {' and '.join(sorted(detectors))}: what "
                "one of them misses is trained on by its phase, so only what all of them find would be protected"
            )
        free = [phase.name for phase in self.private if not phase.noise_multiplier]
        if len(free) > 1:
            raise ValueError(
                f"noise-multiplier must be given in all private phases but one, it is missing in {' and '.join(free)}; "
                "one phase can be calibrated to what the others leave of epsilon"
            )

    @property
    def private(self) -> tuple[DpPhase, ...]:
        """The phases with noise."""
        return tuple(phase for phase in self.phases if isinstance(phase, DpPhase))

    @property
    def ordinary(self) -> tuple[NonPrivatePhase, ...]:
        """The phases without."""
        return tuple(phase for phase in self.phases if isinstance(phase, NonPrivatePhase))

    def detector_of(self, phase: Phase) -> str:
        """The detector of a phase."""
        return phase.detector or self.detector

    def silo(self, phase: DpPhase, not_private: str | None) -> RecordLevelSettings:
        """A phase with noise as training at record level."""
        return RecordLevelSettings.of(self, phase, not_private=not_private)


@dataclass(frozen=True)
class PlannedNoise:
    """The noise of the private phases, before any text is read.

    Attributes:
        floors: per private phase, its committed steps in order.
        multipliers: per private phase, of each of its steps.
        epsilon: what the floor costs, one unit added or removed, rounded UP to four decimals; 0 without private phases.
    """

    floors: tuple[tuple[FloorStep, ...], ...]
    multipliers: tuple[tuple[float, ...], ...]
    epsilon: float

    @property
    def floor(self) -> tuple[FloorStep, ...]:
        """Every committed step, in order."""
        return tuple(step for floor in self.floors for step in floor)

    def releases(self, phases: int) -> int:
        """How many releases the first so many private phases are committed to."""
        return sum(step.count for floor in self.floors[:phases] for step in floor)

    def to_json(self) -> Json:
        floors = [[step.to_json() for step in floor] for floor in self.floors]
        return {"floors": floors, "multipliers": [list(one) for one in self.multipliers], "epsilon": self.epsilon}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "PlannedNoise":
        """The inverse; KeyError, TypeError or ValueError for anything else."""
        floors = tuple(tuple(map(FloorStep.from_json, floor)) for floor in data["floors"])
        multipliers = tuple(tuple(map(float, one)) for one in data["multipliers"])
        return PlannedNoise(floors, multipliers, float(data["epsilon"]))

    def is_of(self, recipe: Phases, population: int) -> bool:
        """Whether this is for the target of these phases; what it costs is for the ledger to find out."""
        steps = [len(multipliers) for multipliers in self.multipliers]
        units = {(step.sampling.unit, step.sampling.population) for step in self.floor}
        return (
            steps == [phase.steps for phase in recipe.private]
            and len(self.floors) == len(steps)
            and units <= {(recipe.unit, population)}
            and self.epsilon <= rounded_up(recipe.epsilon, 4)
        )

    def commitment(self, recipe: Phases, population: int, not_private: str | None) -> Commitment:
        """What the ledger starts with; `not_private` says why one without noise leaves no guarantee, if one does."""
        return Commitment(
            recipe.unit,
            "add_remove",
            population,
            self.epsilon,
            recipe.delta,
            floor=self.floor,
            not_private=not_private,
        )


def plan_noise(recipe: Phases, population: int) -> PlannedNoise:
    """Calibrate the one phase that asks for it, and account all of them together, as the ledger does.

    Raises:
        ValueError: delta is too large for so many units, no noise keeps the target, the given noise costs more, or
            there are fewer units than a batch.
    """
    if not recipe.private:
        return PlannedNoise((), (), 0.0)
    check_delta(recipe.delta, population)  # before the promise is printed, not when the ledger is made
    silos = {phase.name: recipe.silo(phase, None) for phase in recipe.private}
    noise = {}
    for phase in recipe.private:
        if phase.noise_multiplier:
            silo = silos[phase.name]
            noise[phase.name] = given(
                controller_of(silo), silo.sampling(population), silo.steps, phase.noise_multiplier
            )
    for name in silos.keys() - noise.keys():  # one at most
        others = [step for floor, _ in noise.values() for step in floor]
        with priced(recipe.epsilon, f" in phase {name!r}"):
            commitment, multipliers = commit(silos[name], population, extra=others)
        noise[name] = commitment.floor[len(others) :], multipliers
    floors = tuple(noise[phase.name][0] for phase in recipe.private)
    floor = tuple(step for steps in floors for step in steps)
    cost = rounded_up(FloorOdometer(floor, recipe.delta, "add_remove").total, 4)  # as the ledger will check it
    # rounding up must not make a refusal of what calibration has just found to fit
    if cost > rounded_up(recipe.epsilon, 4):
        raise ValueError(
            f"the given noise multipliers cost epsilon {cost:g} at delta {recipe.delta:g}, more than "
            f"{recipe.epsilon:g}; raise one of them, or the target"
        )
    return PlannedNoise(floors, tuple(noise[phase.name][1] for phase in recipe.private), cost)
