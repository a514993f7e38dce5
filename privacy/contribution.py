r"""The half of the mechanism that runs where the data lives: private rows become a bounded sum of integers.

Every encoded row, and every answer divided by its sensitivity, lies in the unit ball. It is rounded TOWARD ZERO to
multiples of 2^-40 and stored as int64. Why integers:

- Addition is exact and associative, so neither worker count nor arrival order can change a sum by a bit. With floats
  the order of summation changes the sensitivity (Casacuberta et al. 2022, arXiv 2207.10635).
- Noise can be added on the same grid, so that no float arithmetic ever mixes data and noise (Mironov 2012).

The norm cannot grow. Rounding toward zero shrinks every coordinate. Before it, each row's norm is measured again in
float64, whoever encoded it; with n terms the computed norm is off by a relative n u / 2 + O(u), u = 2^-53, in any
order of summation, so rows measured above 1 - (n + 16) u are scaled to that. The exact integer norm is therefore at
most 2^40, with no tolerance. A row with one term needs no slack (sqrt(fl(x^2)) = |x|), so bits and one-hots stay exact.

The :class:`Plan` says what is computed on one cohort and how much noise goes on it, before any unit is looked at.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from privacy import checks
from privacy.clipping import clip_from_json
from privacy.clipping.clip_map import ClipMap
from privacy.clipping.units import Units, slabs, squared_norms
from privacy.events import Component, effective_noise_multiplier
from privacy.queries import Query, query_from_json

GRID: Final = 2.0**40
"""Grid points per unit of sensitivity."""

MAX_UNITS: Final = 2**22 - 1
"""Most units one sum may hold: 2^22 * 2^40 = 2^62 leaves room in int64 for the noise."""

_ROUNDOFF = 2.0**-53

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
        """The noise multiplier of all components together, see :func:`privacy.events.effective_noise_multiplier`."""
        return effective_noise_multiplier(*((part.sensitivity, part.noise_std) for part in self.components()))

    def noise_std(self, expected_units: float) -> Float64[Tensor, "*params"]:
        """Std of the noise in each value of ``Release.update``, 0-d where all are alike."""
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
        """The plan of :meth:`to_json`; ``arrays`` are the ``clip.arrays()`` of the plan."""
        return cls(
            clip_from_json(data["clip"], arrays),
            float(data["noise_multiplier"]),
            tuple(query_from_json(query) for query in data["queries"]),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Contribution:
    """Sum over units of what :func:`contribute` made of them. Bounded, but still private: it carries no noise.

    Attributes:
        encoded: sum of encoded rows, in multiples of 1 / GRID.
        answers: per query, sum of answers in multiples of sensitivity / GRID.
    """

    encoded: Int64[Tensor, " k"]
    answers: tuple[Int64[Tensor, " _"], ...] = ()

    def __post_init__(self) -> None:
        for part in (self.encoded, *self.answers):
            if part.dtype != torch.int64 or part.dim() != 1 or part.device.type != "cpu":
                raise ValueError(
                    "parts of a contribution must be int64 vectors on the CPU, "
                    f"got {part.dtype} of shape {tuple(part.shape)} on {part.device}; make them with contribute()"
                )

    @classmethod
    def zero(cls, plan: Plan) -> "Contribution":
        """The contribution of an empty cohort."""
        return cls(
            torch.zeros(plan.clip.dim, dtype=torch.int64),
            tuple(torch.zeros(query.dim, dtype=torch.int64) for query in plan.queries),
        )

    def __add__(self, other: "Contribution") -> "Contribution":
        if self._shape() != other._shape():
            raise ValueError(
                f"contributions must have one shape to be added, got {self._shape()} and {other._shape()}; "
                "all shards of a round follow one plan"
            )
        answers = tuple(mine + theirs for mine, theirs in zip(self.answers, other.answers, strict=True))
        return Contribution(self.encoded + other.encoded, answers)

    def __repr__(self) -> str:
        return f"Contribution(private, shape {self._shape()})"

    def _shape(self) -> tuple[int, ...]:
        return (len(self.encoded), *map(len, self.answers))


def contribute(units: Units, plan: Plan) -> Contribution:
    """Clip every unit's row, ask it the plan's queries, and return the sums on the grid; ``units`` is left unchanged.

    The L2 norm of what one unit adds is at most GRID, exactly, in the encoded update and in every answer, whatever
    its row holds. Raises ValueError if the rows do not fit the plan or hold more than MAX_UNITS units.
    """
    if len(units) > MAX_UNITS:
        raise ValueError(f"units must hold at most {MAX_UNITS} rows, got {len(units)}; split the cohort")
    width = units.rows.shape[1]
    encoded = _GridSum(plan.clip.dim, units.rows.device)
    for part in slabs(len(units), max(width, plan.clip.dim)):
        rows = units.rows[part]
        encoded.add(plan.clip.encode(rows), len(rows), terms=plan.clip.dim)
    answers = []
    for query in plan.queries:
        answer = query.answer(units) / query.sensitivity
        total = _GridSum(query.dim, answer.device)
        total.add(answer, len(units), terms=answer.count_nonzero(dim=1))
        answers.append(total.value.cpu())
    return Contribution(encoded.value.cpu(), tuple(answers))


class _GridSum:
    """A running sum of rows of the unit ball, each rounded to the grid so that its exact norm is at most GRID.

    Buffers are kept between additions: for rows of a million numbers, getting fresh memory costs more than the work.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.value = torch.zeros(width, dtype=torch.int64, device=device)
        self._integers = torch.empty(0, width, dtype=torch.int64, device=device)

    def add(self, rows: Float64[Tensor, "units k"], units: int, terms: int | Tensor) -> None:
        """Add ``rows``, one per unit, and overwrite them.

        ``terms`` is how many entries of a row may differ from zero, for all rows or for each.
        """
        if tuple(rows.shape) != (units, len(self.value)) or rows.dtype != torch.float64:
            raise ValueError(
                f"encoded rows and answers must be float64 of shape ({units}, {len(self.value)}), one row per unit, "
                f"got {rows.dtype} of shape {tuple(rows.shape)}; mend the clip map or query"
            )
        norms = squared_norms(rows).sqrt_()
        lost = ~norms.isfinite()
        if bool(lost.any()):  # clip maps return finite rows; a plug-in that does not must not break the bound
            rows[lost] = 0.0
            norms[lost] = 0.0
        many = torch.as_tensor(terms, dtype=torch.float64, device=rows.device)
        largest = 1.0 - torch.where(many > 1, (many + 16) * _ROUNDOFF, 0.0)
        rows.mul_((GRID * (largest / torch.maximum(norms, largest))).unsqueeze(1))
        if len(self._integers) < units:
            self._integers = torch.empty_like(rows, dtype=torch.int64)
        integers = self._integers[:units].copy_(rows)  # the conversion to integers rounds toward zero
        self.value += integers[0] if units == 1 else integers.sum(dim=0)


def validate(contribution: Contribution, plan: Plan, max_units: int) -> None:
    """Raise ValueError unless ``contribution`` can be the sum of at most ``max_units`` honest units under ``plan``.

    For replies from elsewhere. Messages name what is wrong but no value, not even ``max_units``: who took part is
    private.
    """
    checks.integer_at_least(0, max_units=max_units)
    if max_units > MAX_UNITS:
        raise ValueError(f"max_units must be <= {MAX_UNITS}, got {max_units}; sums are kept in 64-bit integers")
    expected = (plan.clip.dim, *(query.dim for query in plan.queries))
    if contribution._shape() != expected:
        raise ValueError(
            f"a contribution under this plan must have shape {expected}, got {contribution._shape()}; drop the reply"
        )
    _check_sum("encoded", contribution.encoded, max_units)
    for query, answer in zip(plan.queries, contribution.answers, strict=True):
        _check_sum(query.name, answer, max_units)
        if not query.is_possible(answer.to(torch.float64) * (query.sensitivity / GRID), max_units):
            raise ValueError(
                f"{query.name!r} must be a possible sum over the units that were asked, it is not; drop the reply"
            )


def _check_sum(name: str, total: Int64[Tensor, " k"], max_units: int) -> None:
    """No coordinate and no L2 norm beyond what that many vectors of the unit ball can sum to."""
    limit = max_units * int(GRID)
    inside = len(total) == 0 or bool(-limit <= int(total.min()) and int(total.max()) <= limit)
    numbers = total.to(torch.float64).unsqueeze(0)
    if not inside or float(squared_norms(numbers).sqrt_()) > limit * (1 + 1e-9):
        raise ValueError(
            f"{name} of a contribution must have an L2 norm of at most one sensitivity for every unit that was asked, "
            "it has more; drop the reply"
        )
