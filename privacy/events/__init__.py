r"""Releases as data: the vocabulary in which a run is committed, charged and accounted.

A :class:`ReleaseEvent` is ONE look at one sampled cohort. Everything computed on that cohort (the clipped update, a
clip bit, a loss, a histogram) is a component of the same joint Gaussian; it is never a second, separately sampled
event, because accounting two looks at one cohort as two subsampled events under-reports epsilon (measured: RDP 4.263
against the true 4.384).

The joint Gaussian over parts with L2 sensitivities ``S_j`` and noise standard deviations ``s_j`` on the SUM is, after
scaling each part by ``1/s_j``, one unit-variance Gaussian whose L2 sensitivity is ``(sum_j (S_j/s_j)^2)^(1/2)``. So it
costs exactly what a single Gaussian of noise multiplier ``z_eff = (sum_j (S_j/s_j)^2)^(-1/2)`` costs.

The noise is made by the server, or by the clients together as :class:`NoiseShares` says. It is drawn anew in every
release, or, where cohorts come from :class:`CyclicPoisson`, correlated over releases as :class:`Banded` or
:class:`BufferedToeplitz` says.

Where records are sampled instead of units (:class:`ExampleLevelPoisson`), all of this is said of one record's row,
and a unit is a sum of K such rows.

Descriptions only: no noise, no sampling, no accounting happens here. Conversion into dp_accounting's terms lives in
``accountants/``. Every class round-trips through plain JSON values.
"""

from privacy.events.correlation import (
    MOST_BUFFERS,
    Banded,
    BufferedToeplitz,
    Correlation,
    check_correlation,
    correlation_from_json,
    seen_by_one_unit,
)
from privacy.events.noise import LEAST_SHARE, NoiseShares, divergence_of_sum
from privacy.events.release import Component, ReleaseEvent, effective_noise_multiplier
from privacy.events.sampling import (
    MOST_RECORDS_PER_UNIT,
    CyclicPoisson,
    ExampleLevelPoisson,
    Json,
    PartPoisson,
    Poisson,
    Step,
)

__all__ = [
    "LEAST_SHARE",
    "MOST_BUFFERS",
    "MOST_RECORDS_PER_UNIT",
    "Banded",
    "BufferedToeplitz",
    "Component",
    "Correlation",
    "CyclicPoisson",
    "ExampleLevelPoisson",
    "Json",
    "NoiseShares",
    "PartPoisson",
    "Poisson",
    "ReleaseEvent",
    "Step",
    "check_correlation",
    "correlation_from_json",
    "divergence_of_sum",
    "effective_noise_multiplier",
    "seen_by_one_unit",
]
