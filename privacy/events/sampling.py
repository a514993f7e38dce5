"""Ways to draw a cohort: unit by unit, from one part of the units, by groups of units in turn, or record by record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from privacy import checks

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Poisson:
    """Every unit of the population joins independently with probability ``rate``; rate 1 is the whole population.

    ``unit`` says what a unit is: ``"client"``, ``"record"`` (inside one client) or ``"group:NAME"``. Costs of different
    units never add up, so a ledger takes events of its own unit only.
    """

    rate: float
    population: int
    unit: str = "client"

    def __post_init__(self) -> None:
        checks.probability(rate=self.rate)
        checks.integer_at_least(1, population=self.population)
        _check_unit(self.unit)

    @property
    def rows(self) -> int:
        """The number of rows that could be drawn: one per unit, unless a subclass says otherwise."""
        return self.population

    @property
    def expected_units(self) -> float:
        """The constant divisor of a mean, the expected number of rows: it does not depend on who was drawn."""
        return self.rate * self.rows

    def to_json(self) -> Json:
        return {
            "kind": "poisson",
            "rate": float(self.rate),
            "population": int(self.population),
            "unit": self.unit,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Poisson":
        kinds = ("poisson", "part-poisson", "cyclic-poisson", "example-level-poisson")
        if data["kind"] not in kinds:
            names = ", ".join(map(repr, kinds))
            raise ValueError(f"kind of sampling must be one of {names}, got {data['kind']!r}; no other is accounted")
        rate, population, unit = float(data["rate"]), int(data["population"]), str(data["unit"])
        if data["kind"] == "poisson":
            return Poisson(rate, population, unit)
        if data["kind"] == "part-poisson":
            of = bool(data["held_out"]), float(data["share"]), int(data["seed"]), int(data["members"])
            return PartPoisson(rate, population, unit, *of)
        if data["kind"] == "example-level-poisson":
            most, records = int(data["records_per_unit"]), int(data["records"])
            return ExampleLevelPoisson(rate, population, unit, most, records)
        turn = None if data["turn"] is None else int(data["turn"])
        return CyclicPoisson(rate, population, unit, int(data["groups"]), turn)


@dataclass(frozen=True)
class PartPoisson(Poisson):
    """Every unit of ONE of two disjoint parts of the population joins with probability ``rate``; the others never do.

    Unit i is held out if its own word, the i-th of a public generator of ``seed``, is below ``share``; else it is
    trained on (:func:`privacy.randomness.sampling.held_out`). So its part is a function of its number and of public
    settings: whether other units are there, and what they hold, moves nobody from one part into the other.

    Parallel composition. Let neighbours differ in unit i, and let i be held out. Given what was released so far, every
    release on the other part has the same law in both worlds, for i is in no cohort of it; every release on i's part
    is dominated by its committed step. By induction over the releases, whichever way later ones depend on earlier
    ones, the run is dominated by the composition of the steps of i's part alone; and the same with the parts
    exchanged. So the run's delta(epsilon) is at most the LARGER of the two parts', not their sum. This holds under
    adding or removing what one numbered place holds (the number of places is public) and needs one split for all
    releases, see :func:`privacy.accountants.composition.parts`.

    Attributes:
        held_out: whether this is the part that is held out.
        share: probability with which a unit is held out, in (0, 1).
        seed: public.
        members: number of places in this part, which follows from the others.
    """

    held_out: bool = False
    share: float = 0.0
    seed: int = 0
    members: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.probability(share=self.share)
        checks.integer_at_least(0, seed=self.seed)
        checks.within(1, self.population - 1, members=self.members)

    @property
    def split(self) -> tuple[float, int]:
        """The share and the seed, which decide the part of every unit."""
        return self.share, self.seed

    @property
    def expected_units(self) -> float:
        return self.rate * self.members

    def to_json(self) -> Json:
        own = {"held_out": bool(self.held_out), "share": float(self.share), "seed": int(self.seed)}
        return super().to_json() | {"kind": "part-poisson"} | own | {"members": int(self.members)}


@dataclass(frozen=True)
class CyclicPoisson(Poisson):
    """Units lie in ``groups`` groups, which take turns: release n = 0, 1, ... samples group n mod ``groups`` alone.

    Every unit's group is drawn once, independently of everything else, data above all; every member joins with
    probability ``rate`` independently of all others. So n releases ask one unit at most ceil(n / groups) times.

    Attributes:
        rate: within the group whose turn it is.
        turn: n, the number of releases charged before; None in a plan of many.
    """

    groups: int = 1
    turn: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer_at_least(1, groups=self.groups)
        if self.turn is not None:
            checks.integer_at_least(0, turn=self.turn)

    @property
    def expected_units(self) -> float:
        """The expected cohort, averaged over who is in the group as well as over who joins."""
        return self.rate * self.population / self.groups

    def to_json(self) -> Json:
        return super().to_json() | {"kind": "cyclic-poisson", "groups": int(self.groups), "turn": self.turn}


MOST_RECORDS_PER_UNIT: Final = 256
"""Accounting adds up a mixture of so many Gaussians at every point of a loss distribution; more takes minutes."""


@dataclass(frozen=True)
class ExampleLevelPoisson(Poisson):
    """Every record joins independently with probability ``rate``, whichever unit it belongs to.

    A unit has at most ``records_per_unit`` = G records, chosen once for the run by its own content alone, so adding or
    removing it moves the sum by K rows, K ~ Binomial(G, rate) at most. What is called sensitivity in a component is
    that of ONE row: the length of K rows of the joint Gaussian is at most K times that of one.

    Reference: example-level sampling of Charles et al., "Fine-tuning large language models with user-level differential
    privacy" (arXiv 2407.07737).

    Attributes:
        population: units, as for every sampling.
        records_per_unit: G.
        records: number of records of all units under that cap. It gives the divisor, and is public as the number of
            units is.
    """

    records_per_unit: int = 1
    records: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer_at_least(1, records_per_unit=self.records_per_unit, records=self.records)
        checks.within(1, MOST_RECORDS_PER_UNIT, records_per_unit=self.records_per_unit)
        checks.within(self.population, self.population * self.records_per_unit, records=self.records)

    @property
    def rows(self) -> int:
        return self.records

    def to_json(self) -> Json:
        own = {"records_per_unit": int(self.records_per_unit), "records": int(self.records)}
        return super().to_json() | {"kind": "example-level-poisson"} | own


Step: TypeAlias = tuple[Poisson, float, int]
"""(sampling, effective noise multiplier, count): so many releases on cohorts drawn alike."""


def _check_unit(unit: str) -> None:
    if unit not in ("client", "record") and not (unit.startswith("group:") and len(unit) > len("group:")):
        raise ValueError(f"unit must be 'client', 'record' or 'group:NAME', got {unit!r}; name what is protected")
