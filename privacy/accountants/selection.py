"""The cost of releasing the best of a random number of private candidate runs: tuning and training as one event.

Every candidate is a run of a mechanism Q (draw settings uniformly, train with them) whose Rényi divergence at order a
is at most rho(a) for every neighbouring pair of data sets. K of them are run, K drawn from a law that knows nothing of
the data, and only the best is released, by a score that is part of what a candidate releases, or post-processing of it.
Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy" (arXiv 2110.03620v2; the idea is of Liu
and Talwar, arXiv 1811.07971) bound the divergence of that release by

    Theorem 2   rho(a) + (1 + eta) min_b [(1 - 1/b) rho(b) + log(1/gamma) / b] + log E[K] / (a - 1)
    Theorem 6   rho(a) + E[K] d + log E[K] / (a - 1),   Q being (log(1 + 1/(a - 1)), d)-private,

the first for the truncated negative binomial law of shape eta and stopping probability gamma, the second for the
Poisson law. They are dp_accounting's, taken from its function for curves rather than through its event
``RepeatAndSelectDpEvent``: no event says that rho is the largest of several curves. It may be: by joint quasi-convexity
a uniform draw of settings, told or not, costs at most as much as the most expensive of them, order by order.

Guarantee: an upper bound. The divergences of the candidates are rounded up as in ``renyi.py``, and E[K] is accounted a
relative 1e-6 larger than it is drawn.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as dp_rdp
from jaxtyping import Float64

from privacy.accountants import composition, renyi
from privacy.commitment import FloorStep, Tries
from privacy.events import ReleaseEvent, Step

_MEAN_ROUNDING = 1e-6
ORDERS = tuple(dp_rdp.DEFAULT_RDP_ORDERS)


def epsilon(
    tries: Tries, candidates: Iterable[Sequence[Step | FloorStep | ReleaseEvent]], delta: float
) -> tuple[float, float]:
    """Epsilon at ``delta`` of tuning and training together under add/remove, and the Rényi order that gives it.

    Args:
        tries: the law of K.
        candidates: all releases of a run with the settings of each cell that may be drawn; at least one cell.

    Raises:
        UnsupportedEvent: no Rényi bound is known for a release.
        ValueError: releases of different units, or no candidate.
    """
    found, order = dp_rdp.compute_epsilon(ORDERS, divergences(tries, candidates), delta)
    return float(found), float(order)


def divergences(
    tries: Tries, candidates: Iterable[Sequence[Step | FloorStep | ReleaseEvent]]
) -> Float64[np.ndarray, " orders"]:
    """Rényi divergences of the same at :data:`ORDERS`."""
    curves = [renyi.divergences(composition.merge_steps(steps), "add_remove") for steps in candidates]
    if not curves:
        raise ValueError("candidates must hold at least one run, got none")
    largest = np.maximum.reduce(curves)
    mean = tries.mean * (1.0 + _MEAN_ROUNDING)
    return np.asarray(dp_rdp._compute_rdp_repeat_and_select(ORDERS, largest, mean, tries.shape))


def stopping_probability(tries: Tries) -> float:
    """Gamma of a truncated negative binomial law whose mean is that of ``tries``, within a relative 1e-8."""
    return float(dp_rdp._gamma_truncated_negative_binomial(tries.shape, tries.mean))
