"""What was released, as data: the vocabulary in which a run is committed, charged and accounted.

A :class:`ReleaseEvent` is ONE look at one sampled cohort. Everything computed on that cohort (the clipped update, a
clip bit, a loss, a histogram) is a component of the same joint Gaussian; it is never a second, separately sampled
event, because accounting two looks at one cohort as two subsampled events under-reports epsilon (measured: RDP 4.263
against the true 4.384).

The joint Gaussian over parts with L2 sensitivities ``S_j`` and noise standard deviations ``s_j`` on the SUM is, after
scaling each part by ``1/s_j``, one unit-variance Gaussian whose L2 sensitivity is ``(sum_j (S_j/s_j)^2)^(1/2)``. So it
costs exactly what a single Gaussian of noise multiplier ``z_eff = (sum_j (S_j/s_j)^2)^(-1/2)`` costs.

Descriptions only: no noise, no sampling, no accounting happens here. Conversion into dp_accounting's terms lives in
``accountants.py``. Every class round-trips through plain JSON values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from privacy import checks
from privacy.distributed_noise import NoiseShares

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Component:
    """One part of a joint Gaussian release.

    Attributes:
        name: what is released, e.g. ``"update"`` or ``"norm-bit"``.
        sensitivity: how far one unit can move the SUM in L2 norm (add or remove one unit), > 0.
        noise_std: standard deviation of the noise added to each coordinate of the SUM, >= 0; 0 is not private.
        dim: number of coordinates, >= 1.
    """

    name: str
    sensitivity: float
    noise_std: float
    dim: int

    def __post_init__(self) -> None:
        checks.positive(sensitivity=self.sensitivity)
        checks.non_negative(noise_std=self.noise_std)
        checks.integer_at_least(1, dim=self.dim)

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation over L2 sensitivity."""
        return self.noise_std / self.sensitivity

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "sensitivity": float(self.sensitivity),
            "noise_std": float(self.noise_std),
            "dim": int(self.dim),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Component":
        return cls(str(data["name"]), float(data["sensitivity"]), float(data["noise_std"]), int(data["dim"]))


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
    def expected_units(self) -> float:
        """The constant divisor of a mean: it does not depend on who was drawn."""
        return self.rate * self.population

    def to_json(self) -> Json:
        return {
            "kind": "poisson",
            "rate": float(self.rate),
            "population": int(self.population),
            "unit": self.unit,
        }


@dataclass(frozen=True)
class FixedSize:
    """A uniformly random subset of exactly ``size`` units, without replacement.

    Accountable under the replace-one adjacency only, and much dearer than Poisson sampling of the same mean: at
    size 100 of 1000, 200 rounds, epsilon 2 it needs a noise multiplier of 12.6 instead of 3.0.
    """

    size: int
    population: int
    unit: str = "client"

    def __post_init__(self) -> None:
        checks.integer_at_least(1, population=self.population)
        checks.integer_at_least(1, size=self.size)
        if self.size > self.population:
            raise ValueError(
                f"size must be <= population ({self.population}), got {self.size}; "
                "a subset without replacement cannot be larger than the population"
            )
        _check_unit(self.unit)

    @property
    def rate(self) -> float:
        """Share of the population in a cohort."""
        return self.size / self.population

    @property
    def expected_units(self) -> float:
        """The constant divisor of a mean."""
        return float(self.size)

    def to_json(self) -> Json:
        return {
            "kind": "fixed-size",
            "size": int(self.size),
            "population": int(self.population),
            "unit": self.unit,
        }


@dataclass(frozen=True)
class CappedPoisson:
    """Poisson sampling whose cohort, if larger than ``cap``, is cut to a uniformly random subset of ``cap`` units.

    The cap makes one unit's presence displace another, so it costs privacy: at rate 0.1 of 1000, noise multiplier
    1.7618 and 200 rounds, epsilon is 4.00 without a cap, 4.09 with cap 130 and 7.85 with cap 110.
    """

    rate: float
    population: int
    cap: int
    unit: str = "client"

    def __post_init__(self) -> None:
        checks.probability(rate=self.rate)
        checks.integer_at_least(1, population=self.population, cap=self.cap)
        _check_unit(self.unit)

    @property
    def expected_units(self) -> float:
        """The constant divisor of a mean; the cap does not enter, so that the scale stays free of the cohort drawn."""
        return self.rate * self.population

    def to_json(self) -> Json:
        return {
            "kind": "capped-poisson",
            "rate": float(self.rate),
            "population": int(self.population),
            "cap": int(self.cap),
            "unit": self.unit,
        }


Sampling: TypeAlias = Poisson | FixedSize | CappedPoisson


@dataclass(frozen=True)
class ReleaseEvent:
    """One joint Gaussian release on one sampled cohort.

    Attributes:
        label: kind of release, matched against the committed steps, e.g. ``"round"`` or ``"histogram"``.
        round: number of the round it belongs to, >= 0.
        sampling: how the cohort was drawn, and from which population of which unit.
        components: the parts of the joint Gaussian, at least one.
        noise_shares: how the clients make the noise together, at least as much of it as the components say; None if
            the server adds it.
    """

    label: str
    round: int
    sampling: Sampling
    components: tuple[Component, ...]
    noise_shares: NoiseShares | None = None

    def __post_init__(self) -> None:
        checks.integer_at_least(0, round=self.round)
        if not self.label:
            raise ValueError("label must not be empty, got ''; name the kind of release, e.g. 'round'")
        if not self.components:
            raise ValueError(
                "components must hold at least one Component, got none; an event without a release costs nothing "
                "and must not be charged"
            )

    @property
    def unit(self) -> str:
        """The unit of privacy of this release."""
        return self.sampling.unit

    @property
    def effective_noise_multiplier(self) -> float:
        """``(sum_j (S_j/s_j)^2)^(-1/2)``: the single Gaussian that costs as much as all components together."""
        if any(component.noise_std == 0.0 for component in self.components):
            return 0.0
        return 1.0 / math.hypot(*(component.sensitivity / component.noise_std for component in self.components))

    def to_json(self) -> Json:
        distributed = {} if self.noise_shares is None else {"noise_shares": self.noise_shares.to_json()}
        return {
            "label": self.label,
            "round": int(self.round),
            "sampling": self.sampling.to_json(),
            "components": [component.to_json() for component in self.components],
            **distributed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReleaseEvent":
        return cls(
            str(data["label"]),
            int(data["round"]),
            sampling_from_json(data["sampling"]),
            tuple(Component.from_json(component) for component in data["components"]),
            NoiseShares.from_json(data["noise_shares"]) if "noise_shares" in data else None,
        )


def sampling_from_json(data: Mapping[str, Any]) -> Sampling:
    """Rebuild a sampling from :meth:`to_json`; ValueError for an unknown kind."""
    population, unit = int(data["population"]), str(data["unit"])
    match data["kind"]:
        case "poisson":
            return Poisson(float(data["rate"]), population, unit)
        case "fixed-size":
            return FixedSize(int(data["size"]), population, unit)
        case "capped-poisson":
            return CappedPoisson(float(data["rate"]), population, int(data["cap"]), unit)
        case other:
            raise ValueError(f"kind of sampling must be poisson, fixed-size or capped-poisson, got {other!r}")


def _check_unit(unit: str) -> None:
    if unit not in ("client", "record") and not (unit.startswith("group:") and len(unit) > len("group:")):
        raise ValueError(f"unit must be 'client', 'record' or 'group:NAME', got {unit!r}; name what is protected")
