"""What is computed on one cohort and how much noise goes on it: decided before any unit is looked at."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxtyping import Float64
from torch import Tensor

from privacy import checks
from privacy.clipping import ClipMap, clip_from_json
from privacy.events import Component
from privacy.queries import Query, query_from_json

# Noise multipliers of a single component. Below 2^-20 the noise would be coarse against the grid of a Contribution;
# above 2^16 the noisy sum might leave the range of int64. Both are far outside anything useful.
_LEAST, _MOST = 2.0**-20, 2.0**16


@dataclass(frozen=True)
class Plan:
    """One joint Gaussian release: the clipped update and the queries, all on the same cohort.

    Attributes:
        clip: the clip map of the update; ``NoUpdate()`` for a release of queries only.
        noise_multiplier: z, noise std of the encoded update over its sensitivity 1; unused with ``NoUpdate()``.
        queries: further statistics of the same units, with distinct names.
    """

    clip: ClipMap
    noise_multiplier: float
    queries: tuple[Query, ...] = ()

    def __post_init__(self) -> None:
        checks.within(_LEAST, _MOST, noise_multiplier=self.noise_multiplier)
        for query in self.queries:
            checks.within(_LEAST, _MOST, noise_std_over_sensitivity=query.noise_std / query.sensitivity)
        names = ["update", *(query.name for query in self.queries)]
        if len(set(names)) < len(names):
            raise ValueError(f"names of queries must differ from each other and from 'update', got {names[1:]!r}")
        if self.clip.dim == 0 and not self.queries:
            raise ValueError("queries must hold at least one query with NoUpdate(), got (); the plan releases nothing")

    def components(self) -> tuple[Component, ...]:
        """The parts of the joint release as the ledger records them; the update in encoded space, sensitivity 1."""
        update = (Component("update", 1.0, self.noise_multiplier, self.clip.dim),) if self.clip.dim else ()
        return update + tuple(Component(q.name, q.sensitivity, q.noise_std, q.dim) for q in self.queries)

    @property
    def effective_noise_multiplier(self) -> float:
        """``(sum_j (S_j/s_j)^2)^(-1/2)`` over all components: the single Gaussian that costs as much."""
        return 1.0 / math.hypot(*(part.sensitivity / part.noise_std for part in self.components()))

    def noise_std(self, expected_units: float) -> Float64[Tensor, "*params"]:
        """Std of the noise in each value of ``Release.update``, 0-d where all are alike. Public: a function of the plan."""
        return self.clip.spread() * self.noise_multiplier / expected_units

    def noise_norm(self, expected_units: float) -> float:
        """Root mean square of the L2 norm of the noise in ``Release.update``."""
        std = self.noise_std(expected_units)
        return float(std) * math.sqrt(self.clip.params) if std.dim() == 0 else float(std.norm())

    def to_json(self) -> dict[str, Any]:
        queries = [query.to_json() for query in self.queries]
        return {"clip": self.clip.to_json(), "noise_multiplier": self.noise_multiplier, "queries": queries}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], arrays: Mapping[str, Tensor] = MappingProxyType({})) -> "Plan":
        """The plan of :meth:`to_json`; ``arrays`` are those of its clip map (``clip_map.clip_arrays``)."""
        return cls(
            clip_from_json(data["clip"], arrays),
            float(data["noise_multiplier"]),
            tuple(query_from_json(query) for query in data["queries"]),
        )
