"""Prices of releases in epsilon, and the least noise that keeps a target.

    epsilon([(Poisson(0.05, 1000), 1.0944, 200)], delta=1e-5)       # 4.00: 200 rounds of a twentieth of 1000 clients
    calibrate(4.0, 1e-5, Poisson(0.05, 1000), rounds=200)           # 1.0944

``composition`` asks two accountants, ``pld`` and ``renyi``; ``calibration`` searches the noise.
"""

from privacy.accountants.calibration import calibrate, filter_commitment, floor_commitment
from privacy.accountants.composition import ACCOUNTANTS, curve, epsilon, tightest_bound

__all__ = [
    "ACCOUNTANTS",
    "calibrate",
    "curve",
    "epsilon",
    "filter_commitment",
    "floor_commitment",
    "tightest_bound",
]
