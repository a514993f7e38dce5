"""Ways to draw a cohort: unit by unit, by groups of units in turn, or record by record."""

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
        kinds = ("poisson", "cyclic-poisson", "example-level-poisson")
        if data["kind"] not in kinds:
            names = ", ".join(map(repr, kinds))
            raise ValueError(f"kind of sampling must be one of {names}, got {data['kind']!r}; no other is accounted")
        rate, population, unit = float(data["rate"]), int(data["population"]), str(data["unit"])
        if data["kind"] == "poisson":
            return Poisson(rate, population, unit)
        if data["kind"] == "example-level-poisson":
            most, records = int(data["records_per_unit"]), int(data["records"])
            return ExampleLevelPoisson(rate, population, unit, most, records)
        turn = None if data["turn"] is None else int(data["turn"])
        return CyclicPoisson(rate, population, unit, int(data["groups"]), turn)


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
