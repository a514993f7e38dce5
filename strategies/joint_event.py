"""Sharing the noise of a round between the update and the queries asked of the same cohort.

Everything released on one cohort is ONE Gaussian of multiplier z_eff = (z_D^-2 + sum_j (S_j/s_j)^2)^(-1/2). A run is
calibrated for z_eff; a controller that asks queries therefore plans its update with what they leave,

    z_D = (z_eff^-2 - sum_j (S_j/s_j)^2)^(-1/2),

so the round costs exactly what the run committed to. Andrew et al. 2021 (arXiv 1905.03871v5), section 3.3, for one
bit; privacy.md section 2 and algorithms.md R4 for any number of queries.
"""

import math
from collections.abc import Sequence

from privacy.queries import Query
from strategies.controller import Setting


def update_multiplier(effective: float, queries: Sequence[Query]) -> float:
    """Noise multiplier of the update beside ``queries`` in a round of effective multiplier ``effective``.

    Raises:
        ValueError: the queries alone need as much budget as the round has; the message names the least noise.
    """
    spent = math.hypot(*(query.sensitivity / query.noise_std for query in queries))
    if effective * spent >= 1.0:
        names = " and ".join(repr(query.name) for query in queries)
        raise ValueError(
            f"noise multiplier of a round must be < {1.0 / spent:g}, which {names} alone has, got {effective:g}: no "
            f"budget is left for the update; raise the noise of {names} by more than {effective * spent:.3g} times, "
            "expect a larger cohort, or allow a larger epsilon"
        )
    return effective / math.sqrt(1.0 - (effective * spent) ** 2)


def check_queries(setting: Setting, queries: Sequence[Query]) -> None:
    """ValueError unless every round of ``setting`` leaves its update some budget beside ``queries``."""
    update_multiplier(max(setting.noise_multipliers), queries)
