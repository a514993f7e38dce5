"""The commitment of a run before it touches any data: the first line of its ledger.

Choosing noise or thresholds from released values while reporting the privacy loss of the path actually taken is no
valid guarantee (privacy filters for f-DP do not exist in general: arXiv 2602.06756, 2602.15815). Two ways are sound,
and a run commits to one of them:

- ``floor``: a fixed list of steps, each a sampling and a least noise multiplier. Every release must be dominated by the
  next unused step of its label, so the whole run is dominated by the list, whatever the controller does, and the
  list is accounted exactly (Zhu, Dong, Wang 2022, arXiv 2106.08567: adaptive composition of dominating pairs).
  Noise above the floor is not re-spent.
- ``filter``: one integer Rényi order and a budget rho. A release is allowed while the sum of Rényi divergences at that
  order stays within the budget (Feldman, Zrnic 2021, arXiv 2008.11193), so a controller may spend unevenly.

A candidate of a private sweep commits in floor mode to the whole of tuning and training, see :class:`Tuning`.
"""

import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from privacy import checks
from privacy.events import (
    Correlation,
    CyclicPoisson,
    Json,
    NoiseShares,
    Poisson,
    Step,
    check_correlation,
    correlation_from_json,
    seen_by_one_unit,
)

WEAKEST_NOISE_MULTIPLIER = 0.3
"""At this noise one release of everybody has epsilon 19.13 at delta 1e-5: less protects no one."""

ROUNDING = 1e-9
"""Relative slack of a noise multiplier against its committed floor. Accounting reduces every multiplier by as much, so
rounding of the last digits of a standard deviation is paid for and can never make a reported epsilon too small."""

ADJACENCIES = ("add_remove", "replace_one", "zero_out")
"""``zero_out``: one unit's contribution is replaced by zero, while everyone may see that it takes part."""
MODES = ("floor", "filter")


POISSON = math.inf
"""The ``shape`` of :class:`Tries` that stands for the Poisson law."""


MOST_TRIES: Final = 1000.0


@dataclass(frozen=True)
class Tries:
    """The law of the number K of candidate runs of which the best is released; K itself never is.

    Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy" (arXiv 2110.03620v2): the truncated
    negative binomial of Definition 1, or the Poisson law of Theorem 6. Their shapes below 0 are not offered.

    Attributes:
        mean: E[K], from 1 to :data:`MOST_TRIES`.
        shape: eta of the truncated negative binomial, >= 0: 1 is the geometric law, 0 the logarithmic one;
            :data:`POISSON` is the Poisson law, under which K may be 0 and then nothing is released.
    """

    mean: float
    shape: float

    def __post_init__(self) -> None:
        checks.within(1.0, MOST_TRIES, mean_tries=self.mean)
        if not self.shape >= 0.0:
            raise ValueError(
                f"shape must be >= 0, got {self.shape:g}: 0 is the logarithmic law, 1 the geometric one, infinity the "
                "Poisson law"
            )

    @property
    def name(self) -> str:
        """The law in words."""
        names = {POISSON: "Poisson", 1.0: "geometric", 0.0: "logarithmic"}
        return names.get(self.shape, f"truncated negative binomial of shape {self.shape:g}")

    def to_json(self) -> Json:
        return {"mean": float(self.mean), "shape": "poisson" if self.shape == POISSON else float(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Tries":
        return cls(float(data["mean"]), POISSON if data["shape"] == "poisson" else float(data["shape"]))


@dataclass(frozen=True)
class FloorStep:
    """``count`` consecutive releases labelled ``label``, each with at least ``noise_multiplier`` (effective).

    ``correlation`` is how their noise hangs together; None if it is independent.
    """

    label: str
    sampling: Poisson
    noise_multiplier: float
    count: int = 1
    correlation: Correlation | None = None

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.integer_at_least(1, count=self.count)
        if not self.label:
            raise ValueError("label must not be empty, got ''; name the kind of release, e.g. 'round'")
        check_correlation(self.sampling, self.correlation)

    @property
    def seen_by_one_unit(self) -> Step:
        """The releases of this step as one unit sees them, see :func:`privacy.events.seen_by_one_unit`."""
        return seen_by_one_unit(self.sampling, self.noise_multiplier, self.count, self.correlation)

    def to_json(self) -> Json:
        correlated = {} if self.correlation is None else {"correlation": self.correlation.to_json()}
        return {
            "label": self.label,
            "sampling": self.sampling.to_json(),
            "noise_multiplier": float(self.noise_multiplier),
            "count": int(self.count),
            **correlated,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "FloorStep":
        return cls(
            str(data["label"]),
            Poisson.from_json(data["sampling"]),
            float(data["noise_multiplier"]),
            int(data["count"]),
            correlation_from_json(data["correlation"]) if "correlation" in data else None,
        )


@dataclass(frozen=True)
class Tuning:
    """Tuning and training as ONE event: K candidate runs, each of settings drawn uniformly; only the best is released.

    Attributes:
        id: of the event, shared by the ledgers of all its candidates.
        tries: the law of K.
        candidates: the committed steps of every setting that may be drawn; what differs in nothing that costs privacy
            stands here once. The event is accounted by the largest divergence among them, order by order.
    """

    id: str
    tries: Tries
    candidates: tuple[tuple[FloorStep, ...], ...]

    def to_json(self) -> Json:
        steps = [[step.to_json() for step in candidate] for candidate in self.candidates]
        return {"id": self.id, "tries": self.tries.to_json(), "candidates": steps}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Tuning":
        candidates = tuple(tuple(map(FloorStep.from_json, steps)) for steps in data["candidates"])
        return cls(str(data["id"]), Tries.from_json(data["tries"]), candidates)


@dataclass(frozen=True)
class Commitment:
    """The commitment of a run.

    Attributes:
        unit: what is protected: ``"client"``, ``"record"`` or ``"group:NAME"``.
        adjacency: ``"add_remove"`` one unit (default everywhere), ``"replace_one"``, or ``"zero_out"``.
        population: number of units that could be sampled, known to everyone.
        epsilon: the guarantee to keep; may be infinite only if ``not_private`` is set.
        delta: failure probability of the guarantee, below 1/population.
        mode: ``"floor"`` or ``"filter"``.
        floor: the committed steps (floor mode).
        order: the Rényi order, an integer >= 2 (filter mode).
        rho: the Rényi budget at that order (filter mode).
        not_private: why this run gives no guarantee at all (a baseline without noise, a debug run), or None.
        noise_shares: how the clients make the noise of every release together; None if the server adds it. The server
            sees who takes part then, and noise goes with whoever hands in a share of it: so there is no amplification
            by sampling and the adjacency is ``zero_out``; accounted by the filter, in whose terms it is exact.
        tuning: of a candidate of a private sweep: ``epsilon`` and ``delta`` are then those of the whole tuning, of
            which the floor of this run is one of the candidates; None for every other run.
    """

    unit: str
    adjacency: str
    population: int
    epsilon: float
    delta: float
    mode: str = "floor"
    floor: tuple[FloorStep, ...] = ()
    order: int | None = None
    rho: float | None = None
    not_private: str | None = None
    noise_shares: NoiseShares | None = None
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        checks.one_of(ADJACENCIES, adjacency=self.adjacency)
        checks.one_of(MODES, mode=self.mode)
        if (self.adjacency, self.mode) != ("zero_out", "filter") and self.noise_shares is not None:
            raise ValueError(
                f"adjacency and mode must be 'zero_out' and 'filter' with noise_shares, got {self.adjacency!r} and "
                f"{self.mode!r}; sums of discrete Gaussians are accounted in Rényi terms, without amplification"
            )
        if self.noise_shares is not None and self.noise_shares.parties != self.population:
            raise ValueError(
                f"population must be that of the parties that share the noise ({self.noise_shares.parties}), got "
                f"{self.population}"
            )
        if self.adjacency == "zero_out" and self.noise_shares is None:
            raise ValueError(
                "adjacency 'zero_out' needs noise_shares, got None; with a trusted server use 'add_remove'"
            )
        checks.integer_at_least(1, population=self.population)
        if self.not_private is None:
            checks.positive(epsilon=self.epsilon)
            check_delta(self.delta, self.population)
        elif not self.not_private:
            raise ValueError("not_private must be None or a reason, got ''; say why the run gives no guarantee")
        if self.mode == "floor":
            self._check_floor()
        else:
            self._check_filter()

    def _check_floor(self) -> None:
        if not self.floor or self.order is not None or self.rho is not None:
            raise ValueError("a floor commitment needs at least one FloorStep and neither order nor rho")
        if self.tuning is not None:
            self._check_tuning(self.tuning)
        floors = (self.floor, *(self.tuning.candidates if self.tuning else ()))
        for floor in floors:
            if any(isinstance(step.sampling, CyclicPoisson) for step in floor) and (
                len(floor) > 1 or self.adjacency != "add_remove"
            ):
                raise ValueError(
                    f"a floor with cyclic sampling must be one step under add_remove, got {len(floor)} steps under "
                    f"{self.adjacency!r}; the groups take turns over all releases of a run"
                )
        for step in itertools.chain(*floors):
            if step.sampling.unit != self.unit or step.sampling.population != self.population:
                raise ValueError(
                    f"floor step {step.label!r} samples {step.sampling.population} units of {step.sampling.unit!r}, "
                    f"but the commitment protects {self.population} of {self.unit!r}; keep one ledger per unit"
                )
            _, multiplier, _ = step.seen_by_one_unit
            if multiplier < WEAKEST_NOISE_MULTIPLIER and self.not_private is None:
                raise ValueError(
                    f"noise_multiplier of floor step {step.label!r} must be >= {WEAKEST_NOISE_MULTIPLIER}, got "
                    f"{multiplier:g}; less protects no one: ask for a smaller epsilon, or set not_private"
                )

    def _check_tuning(self, tuning: Tuning) -> None:
        if self.floor not in tuning.candidates:
            raise ValueError("floor must be that of one of the candidates of the tuning, got another")
        if self.adjacency != "add_remove" or self.not_private is not None:
            raise ValueError(
                f"tuning needs adjacency 'add_remove' and a private run, got {self.adjacency!r}, not_private = "
                f"{self.not_private!r}"
            )

    def _check_filter(self) -> None:
        if self.tuning is not None:
            raise ValueError("tuning needs mode 'floor', got 'filter', which bounds the divergence at one order only")
        if self.floor or self.order is None or self.rho is None:
            raise ValueError("a filter commitment needs order and rho and no floor steps")
        checks.integer_at_least(2, order=self.order)
        checks.positive(rho=self.rho)

    def to_json(self) -> Json:
        distributed = {} if self.noise_shares is None else {"noise_shares": self.noise_shares.to_json()}
        tuned = {} if self.tuning is None else {"tuning": self.tuning.to_json()}
        return {
            "unit": self.unit,
            "adjacency": self.adjacency,
            "population": self.population,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else "infinite",
            "delta": self.delta,
            "mode": self.mode,
            "floor": [step.to_json() for step in self.floor],
            "order": self.order,
            "rho": self.rho,
            "not_private": self.not_private,
            **distributed,
            **tuned,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Commitment":
        return cls(
            unit=str(data["unit"]),
            adjacency=str(data["adjacency"]),
            population=int(data["population"]),
            epsilon=math.inf if data["epsilon"] == "infinite" else float(data["epsilon"]),
            delta=float(data["delta"]),
            mode=str(data["mode"]),
            floor=tuple(FloorStep.from_json(step) for step in data["floor"]),
            order=None if data["order"] is None else int(data["order"]),
            rho=None if data["rho"] is None else float(data["rho"]),
            not_private=None if data["not_private"] is None else str(data["not_private"]),
            noise_shares=NoiseShares.from_json(data["noise_shares"]) if "noise_shares" in data else None,
            tuning=Tuning.from_json(data["tuning"]) if "tuning" in data else None,
        )


def check_delta(delta: float, population: int) -> None:
    """Refuse a delta that protects no one, warn about a generous one.

    With delta = 1/N a mechanism that publishes one random unit's data in full is (0, delta)-private, so delta must be
    far below 1/N; N^-1.1 is the field's usual limit.

    Raises:
        ValueError: delta not in (0, 1) or delta >= 1/population.
    """
    checks.positive(delta=delta)
    checks.integer_at_least(1, population=population)
    if delta >= 1.0 / population:
        raise ValueError(
            f"delta must be < 1/population = {1.0 / population:.3g}, got {delta:g}; at that value publishing one unit "
            f"whole would count as private: use at most {population**-1.1:.1e}"
        )
    if delta > population**-1.1:
        warnings.warn(
            f"delta = {delta:g} is above population^-1.1 = {population**-1.1:.3g}; smaller is the custom",
            stacklevel=2,
        )
