"""Correlation of a release's noise with that of earlier ones, and what one unit sees of such a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from privacy import checks
from privacy.events.sampling import CyclicPoisson, Json, Poisson, Step


@dataclass(frozen=True)
class Banded:
    r"""Noise that is correlated over the releases of a run: a banded lower-triangular Toeplitz strategy C.

    In place of independent normals z_n, release n carries w = C^{-1} z times the noise multiplier,

        w_n = (z_n - c_1 w_{n-1} - ... - c_{b-1} w_{n-b+1}) / c_0,

    so that sums of releases carry less of it. What is released is a function of C x + z (x_n the sum over cohort n), in
    which one unit's contribution to release n lies in rows n..n+b-1 alone and is at most as long as column n of C: 1.
    Under :class:`CyclicPoisson` sampling with at least b groups such rows never meet, so to one unit the run is an
    adaptive composition of ceil(T / groups) Poisson-sampled Gaussians of the noise multiplier as it stands (proof:
    docs/correlated-noise.md). Where a run was interrupted, w before ``since`` is lost and counts as zero, which cuts
    columns of C off: no guarantee changes.

    Reference: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (arXiv 2306.08153), Theorem 4.

    Attributes:
        coefficients: c_0 > 0, ..., c_{b-1}, of length (L2) at most 1.
        since: the turn at which the noise of this release starts.
    """

    coefficients: tuple[float, ...]
    since: int = 0

    def __post_init__(self) -> None:
        checks.integer_at_least(0, since=self.since)
        if not self.coefficients or not all(map(math.isfinite, self.coefficients)) or self.coefficients[0] <= 0.0:
            raise ValueError(f"coefficients must be finite and begin with one > 0, got {self.coefficients}")
        # A relative 1e-9 of every noise multiplier is paid for (commitment.ROUNDING), so rounding of a norm is.
        if self.column_norm > 1.0 + 1e-12:
            raise ValueError(
                f"coefficients must have an L2 norm of at most 1, got {self.column_norm:.6g}; divide them by it: the "
                "noise multiplier is accounted for a column of length 1"
            )

    @property
    def bands(self) -> int:
        """The number b of releases after which a unit may take part again."""
        return len(self.coefficients)

    @property
    def column_norm(self) -> float:
        """The L2 norm of the longest column of C."""
        return math.hypot(*self.coefficients)

    def to_json(self) -> Json:
        return {
            "kind": "banded-toeplitz",
            "bands": self.bands,
            "coefficients": list(map(float, self.coefficients)),
            "column_norm": self.column_norm,
            "since": int(self.since),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Banded":
        return Banded(tuple(map(float, data["coefficients"])), int(data["since"]))


MOST_BUFFERS: Final = 8
"""Four come within a percent of the best Toeplitz strategy for thousands of releases; more are hard to tell apart."""


@dataclass(frozen=True)
class BufferedToeplitz:
    r"""Noise correlated over ALL earlier releases of a run: a buffered linear Toeplitz (BLT) strategy C.

    C is lower-triangular Toeplitz with coefficients of d geometric sequences,

        c_0 = 1,    c_t = sum_{i=1}^{d} omega_i theta_i^(t-1)   for t >= 1,

    so that w = C^{-1} z needs d vectors s_1, ..., s_d of memory however long the run is:

        w_n = z_n - sum_i omega_i s_i,      then   s_i <- theta_i s_i + w_n.

    No two participations of a unit are independent looks at it, so nothing is amplified by sampling: all releases of a
    run are ONE Gaussian mechanism. With groups in turn (:class:`CyclicPoisson`) a unit is in releases g, g + b,
    g + 2b, ... at most. Let P be this set, and let each contribution be at most 1 long in units of the noise. Given the
    releases before, row n of C x + z is a Gaussian around a vector that the unit moves by at most
    sum_{s in P, s <= n} c_{n-s} = (C 1_P)_n, because no coefficient is negative. These bounds are fixed in advance, so
    the run is a composition of Gaussians that costs what one costs of sensitivity ||C 1_P||, largest for g = 0
    (:meth:`sensitivity`). Where a run was interrupted, the buffers are lost and start from zero: entries of C become
    zero, which raises no row's bound, even if somebody chooses the moment by what was released
    (docs/correlated-noise.md).

    References: Dvijotham et al., "Efficient and near-optimal noise generation for streaming differential privacy"
    (arXiv 2404.16706); McMahan, Xu, Zhang, "A hassle-free algorithm for private learning in practice: don't use tree
    aggregation, use BLTs" (arXiv 2408.08868) for several participations; Choquette-Choo et al. (arXiv 2211.06530) for
    vectors and entries >= 0; Denisov et al. (arXiv 2202.08312, Theorem 2.1) for adaptivity.

    Attributes:
        scales: omega > 0, of sum at most 1, so that coefficients do not increase: the bound then also holds for
            participations further apart than b (Kalinin and Lampert, arXiv 2405.13763, Theorem 2).
        decays: theta, each in (0, 1).
        since: the turn at which the noise of this release starts.
    """

    scales: tuple[float, ...]
    decays: tuple[float, ...]
    since: int = 0

    def __post_init__(self) -> None:
        checks.integer_at_least(0, since=self.since)
        if not 1 <= len(self.scales) == len(self.decays) <= MOST_BUFFERS:
            raise ValueError(
                f"scales and decays must hold one number for each of 1 to {MOST_BUFFERS} buffers, got "
                f"{len(self.scales)} and {len(self.decays)}"
            )
        if not all(0.0 < scale <= 1.0 for scale in self.scales) or math.fsum(self.scales) > 1.0 + 1e-12:
            raise ValueError(
                f"scales must be > 0 with a sum of at most 1, got {self.scales}: what a unit moves is accounted for "
                "coefficients that are not negative and do not increase"
            )
        if not all(0.0 < decay < 1.0 for decay in self.decays):
            raise ValueError(f"decays must lie in (0, 1), got {self.decays}; else coefficients change sign or grow")

    @property
    def buffers(self) -> int:
        """The number d of vectors that are kept."""
        return len(self.scales)

    def coefficients(self, releases: int) -> list[float]:
        """The first column of C, c_0, ..., c_{T-1}."""
        checks.integer_at_least(1, releases=releases)
        column, terms = [1.0], list(self.scales)
        for _ in range(releases - 1):
            column.append(math.fsum(terms))
            terms = [term * decay for term, decay in zip(terms, self.decays, strict=True)]
        return column

    def sensitivity(self, releases: int, groups: int) -> float:
        """The distance ||sum_j C[:T, j b]|| that one unit moves C x over T releases, b = ``groups`` apart at least."""
        checks.integer_at_least(1, groups=groups)
        return math.hypot(*sum_columns(self.coefficients(releases), groups))

    def to_json(self) -> Json:
        return {
            "kind": "buffered-linear-toeplitz",
            "scales": list(map(float, self.scales)),
            "decays": list(map(float, self.decays)),
            "since": int(self.since),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "BufferedToeplitz":
        scales, decays = (tuple(map(float, data[name])) for name in ("scales", "decays"))
        return BufferedToeplitz(scales, decays, int(data["since"]))


Correlation: TypeAlias = Banded | BufferedToeplitz


def correlation_from_json(data: Mapping[str, Any]) -> Correlation:
    """Rebuild a correlation of either kind from its ``to_json``. ValueError for any other."""
    kinds: dict[str, Callable[[Mapping[str, Any]], Correlation]] = {
        "banded-toeplitz": Banded.from_json,
        "buffered-linear-toeplitz": BufferedToeplitz.from_json,
    }
    if data["kind"] not in kinds:
        raise ValueError(f"kind of correlated noise must be one of {', '.join(map(repr, kinds))}, got {data['kind']!r}")
    return kinds[data["kind"]](data)


def sum_columns(column: Sequence[float], groups: int) -> list[float]:
    """Columns 0, b, 2b, ... of a lower-triangular Toeplitz matrix, added up; ``column`` is its first."""
    found = list(column)
    for row in range(groups, len(found)):
        found[row] += found[row - groups]
    return found


def check_correlation(sampling: Poisson, correlation: Correlation | None) -> None:
    """Raise ValueError unless units take part in turns, and none twice within the bands of a banded ``correlation``."""
    if correlation is None:
        return
    least = correlation.bands if isinstance(correlation, Banded) else 1
    if not isinstance(sampling, CyclicPoisson) or sampling.groups < least:
        raise ValueError(
            f"sampling must be CyclicPoisson with at least {least} groups for this correlated noise, got {sampling}; "
            "a unit that takes part again earlier has less noise than is accounted"
        )
    if sampling.turn is not None and correlation.since > sampling.turn:
        raise ValueError(f"since must be at most the turn {sampling.turn}, got {correlation.since}")


def seen_by_one_unit(
    sampling: Poisson, noise_multiplier: float, count: int, correlation: Correlation | None = None
) -> Step:
    """Describe ``count`` consecutive releases as one unit sees them: independent looks at it, so often at most.

    With :class:`BufferedToeplitz` noise they are one look, whose count releases are ALL that share its noise.
    """
    check_correlation(sampling, correlation)
    if not isinstance(sampling, CyclicPoisson):
        return sampling, noise_multiplier, count
    if isinstance(correlation, BufferedToeplitz):
        everybody = Poisson(1.0, sampling.population, sampling.unit)  # a coin of the sampler is not counted on
        return everybody, noise_multiplier / correlation.sensitivity(count, sampling.groups), 1
    return Poisson(sampling.rate, sampling.population, sampling.unit), noise_multiplier, -(-count // sampling.groups)
