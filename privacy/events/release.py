"""One joint Gaussian release on one sampled cohort, and its parts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from privacy import checks
from privacy.events.correlation import Correlation, check_correlation, correlation_from_json
from privacy.events.noise import NoiseShares
from privacy.events.sampling import Json, Poisson


def effective_noise_multiplier(*parts: tuple[float, float]) -> float:
    """``z_eff = (sum_j (S_j/s_j)^2)^(-1/2)``: the single Gaussian that costs as much as all parts of one event.

    Args:
        parts: (sensitivity S_j, noise_std s_j) of each.
    """
    if any(noise_std == 0.0 for _, noise_std in parts):
        return 0.0
    return 1.0 / math.hypot(*(sensitivity / noise_std for sensitivity, noise_std in parts))


@dataclass(frozen=True)
class Component:
    """One part of a joint Gaussian release.

    Attributes:
        name: what is released, e.g. ``"update"`` or ``"norm-bit"``.
        sensitivity: how far one row can move the SUM in L2 norm, > 0: a unit, which brings one (add or remove one
            unit), unless records are sampled (:class:`~privacy.events.ExampleLevelPoisson`).
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
class ReleaseEvent:
    """One joint Gaussian release on one sampled cohort.

    Attributes:
        label: kind of release, matched against the committed steps, e.g. ``"round"`` or ``"histogram"``.
        round: number of the round it belongs to, >= 0.
        sampling: how the cohort was drawn, and from which population of which unit.
        components: the parts of the joint Gaussian, at least one.
        noise_shares: how the clients make the noise together, at least as much of it as the components say; None if
            the server adds it.
        correlation: how the noise hangs together with that of earlier releases, ``noise_std`` being of the normals that
            it is made of; None if it is independent.
    """

    label: str
    round: int
    sampling: Poisson
    components: tuple[Component, ...]
    noise_shares: NoiseShares | None = None
    correlation: Correlation | None = None

    def __post_init__(self) -> None:
        checks.integer_at_least(0, round=self.round)
        check_correlation(self.sampling, self.correlation)
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
        """The noise multiplier of all components together, see :func:`effective_noise_multiplier`."""
        return effective_noise_multiplier(*((part.sensitivity, part.noise_std) for part in self.components))

    def to_json(self) -> Json:
        distributed = {} if self.noise_shares is None else {"noise_shares": self.noise_shares.to_json()}
        correlated = {} if self.correlation is None else {"correlation": self.correlation.to_json()}
        return {
            "label": self.label,
            "round": int(self.round),
            "sampling": self.sampling.to_json(),
            "components": [component.to_json() for component in self.components],
            **distributed,
            **correlated,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReleaseEvent":
        return cls(
            str(data["label"]),
            int(data["round"]),
            Poisson.from_json(data["sampling"]),
            tuple(Component.from_json(component) for component in data["components"]),
            NoiseShares.from_json(data["noise_shares"]) if "noise_shares" in data else None,
            correlation_from_json(data["correlation"]) if "correlation" in data else None,
        )
