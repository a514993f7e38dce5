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
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import tomli_w

from client.data.sensitive import check_detector
from client.record_level.calibration import commit, controller_of
from client.record_level.settings import RecordLevelSettings
from client.settings import kebab
from privacy import checks
from privacy.commitment import Commitment, FloorStep, check_delta
from privacy.events import Json
from privacy.ledger.budget import FloorOdometer
from privacy.ledger.statement import rounded_up
from server.config.schema import RunConfig
from server.runs.commitment import name_target
from strategies.calibration import given_noise
from strategies.plugins import Option

TEXTS = {"original": "none", "weighted": "weights", "redacted": "redaction"}
"""Texts that a phase may train on, and what ``data.sensitive`` calls each."""


@dataclass(frozen=True)
class Phase:
    """The settings that phases with and without noise have in common.

    Attributes:
        text: ``"original"``, ``"weighted"`` or ``"redacted"``.
        detector: of this phase; empty takes that of all.
    """

    kind: ClassVar[str]
    name: str
    text: str = "original"
    detector: str = ""

    def __post_init__(self) -> None:
        checks.not_empty(name=self.name)
        checks.one_of(tuple(TEXTS), text=self.text)
        if self.detector:
            check_detector(self.detector)


@dataclass(frozen=True)
class NonPrivatePhase(Phase):
    """A phase without noise.

    Attributes:
        epochs, batch_size, learning_rate, optimizer, weight_decay: see
            :class:`client.engine.local_training.LocalTraining`.
    """

    kind: ClassVar[str] = "ordinary"
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    weight_decay: float = 0.0


@dataclass(frozen=True)
class DpPhase(Phase):
    """A phase of DP-SGD.

    Attributes:
        batch_size: expected units in a batch.
        noise_multiplier: sigma_0, which the controller's schedule multiplies; 0 takes the least for which all private
            phases together cost the run's epsilon.
        controller, optimizer, schedule, warm_up: see :class:`client.record_level.settings.RecordLevelSettings`.
    """

    kind: ClassVar[str] = "private"
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
        super().__post_init__()
        checks.integer_at_least(1, steps=self.steps, batch_size=self.batch_size)
        checks.non_negative(noise_multiplier=self.noise_multiplier, remedy="0 calibrates it")


@dataclass(frozen=True)
class PhasesConfig:
    """The settings of a run in phases.

    Attributes:
        run: what all phases share. Its epsilon and delta are what the private ones together may cost, its detector is
            that of phases that name none.
        phases: in order, at least one.
    """

    run: RunConfig
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        checks.not_empty(phases=self.phases)
        check_detector(self.run.data.detector)
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"phases must have names of their own, got {', '.join(names)}")
        detectors = {self.detector_of(phase) for phase in self.non_private_phases if phase.text == "redacted"}
        if len(detectors) > 1:
            raise ValueError(
                f"detector must be the same in all phases without noise, got {' and '.join(sorted(detectors))}: what "
                "one of them misses is trained on by its phase, so only what all of them find would be protected"
            )
        free = [phase.name for phase in self.private_phases if not phase.noise_multiplier]
        if len(free) > 1:
            raise ValueError(
                f"noise-multiplier must be given in all private phases but one, it is missing in {' and '.join(free)}; "
                "one phase can be calibrated to what the others leave of epsilon"
            )

    @property
    def private_phases(self) -> tuple[DpPhase, ...]:
        """The phases with noise, in order."""
        return tuple(phase for phase in self.phases if isinstance(phase, DpPhase))

    @property
    def non_private_phases(self) -> tuple[NonPrivatePhase, ...]:
        """The phases without noise, in order."""
        return tuple(phase for phase in self.phases if isinstance(phase, NonPrivatePhase))

    def detector_of(self, phase: Phase) -> str:
        """The name of a phase's detector: its own, else that of the run."""
        return phase.detector or self.run.data.detector

    def record_level(self, phase: DpPhase, not_private: str | None) -> RecordLevelSettings:
        """The settings of a phase with noise, as those of a training at record level."""
        run = self.run
        return RecordLevelSettings.of(
            run.privacy, run.site, phase, unit=run.unit, seed=run.seed, not_private=not_private
        )

    def phase_tables(self) -> list[dict[str, Any]]:
        """The phases as tables of a file, with everything that was left at its default."""
        return [
            {"kind": phase.kind, **{kebab(name): value for name, value in vars(phase).items()}} for phase in self.phases
        ]

    def to_toml(self) -> str:
        """The resolved settings and phases as TOML text; parsing it gives an equal configuration."""
        return tomli_w.dumps({**self.run.to_table(), "phases": self.phase_tables()})


@dataclass(frozen=True)
class PlannedNoise:
    """The noise of all private phases of a run, planned before any text is read.

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
        """All committed steps of the private phases, in order."""
        return tuple(step for floor in self.floors for step in floor)

    def releases(self, phases: int) -> int:
        """The number of releases that the first so many private phases are committed to."""
        return sum(step.count for floor in self.floors[:phases] for step in floor)

    def to_json(self) -> Json:
        floors = [[step.to_json() for step in floor] for floor in self.floors]
        return {"floors": floors, "multipliers": [list(one) for one in self.multipliers], "epsilon": self.epsilon}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "PlannedNoise":
        """Make the planned noise from its JSON form. Anything else raises KeyError, TypeError or ValueError."""
        floors = tuple(tuple(map(FloorStep.from_json, floor)) for floor in data["floors"])
        multipliers = tuple(tuple(map(float, one)) for one in data["multipliers"])
        return PlannedNoise(floors, multipliers, float(data["epsilon"]))

    def is_of(self, config: PhasesConfig, population: int) -> bool:
        """Whether the noise is for the target of these phases; what it costs is for the ledger to find out."""
        steps = [len(multipliers) for multipliers in self.multipliers]
        units = {(step.sampling.unit, step.sampling.population) for step in self.floor}
        return (
            steps == [phase.steps for phase in config.private_phases]
            and len(self.floors) == len(steps)
            and units <= {(config.run.unit, population)}
            and self.epsilon <= rounded_up(config.run.privacy.epsilon, 4)
        )

    def commitment(self, config: PhasesConfig, population: int, not_private: str | None) -> Commitment:
        """The commitment that the ledger starts with.

        Args:
            population: number of protected units.
            not_private: why a phase without noise leaves no guarantee; None if none does.
        """
        return Commitment(
            config.run.unit,
            "add_remove",
            population,
            self.epsilon,
            config.run.privacy.delta,
            floor=self.floor,
            not_private=not_private,
        )


def plan_noise(config: PhasesConfig, population: int) -> PlannedNoise:
    """Calibrate the one private phase that asks for it, and account all of them together, as the ledger does.

    Raises:
        ValueError: delta is too large for so many units, no noise keeps the target, the given noise costs more, or
            there are fewer units than a batch.
    """
    if not config.private_phases:
        return PlannedNoise((), (), 0.0)
    epsilon, delta = config.run.privacy.epsilon, config.run.privacy.delta
    check_delta(delta, population)  # before the guarantee is printed, not when the ledger is made
    sites = {phase.name: config.record_level(phase, None) for phase in config.private_phases}
    noise = {}
    for phase in config.private_phases:
        if phase.noise_multiplier:
            site = sites[phase.name]
            sampling = site.sampling(population)
            noise[phase.name] = given_noise(controller_of(site), sampling, site.steps, phase.noise_multiplier)
    for name in sites.keys() - noise.keys():  # one at most
        others = [step for floor, _ in noise.values() for step in floor]
        with name_target(epsilon, f" in phase {name!r}"):
            commitment, multipliers = commit(sites[name], population, extra=others)
        noise[name] = commitment.floor[len(others) :], multipliers
    floors, multipliers_of = zip(*(noise[phase.name] for phase in config.private_phases), strict=True)
    planned = PlannedNoise(floors, multipliers_of, 0.0)
    cost = rounded_up(FloorOdometer(planned.floor, delta, "add_remove").total, 4)  # as the ledger will check it
    # rounding up must not make a refusal of what calibration has just found to fit
    if cost > rounded_up(epsilon, 4):
        raise ValueError(
            f"the given noise multipliers cost epsilon {cost:g} at delta {delta:g}, more than {epsilon:g}; raise one "
            "of them, or the target"
        )
    return replace(planned, epsilon=cost)
