"""Attempts to refute a claimed guarantee by experiment; a claim that survives them is not thereby proven.

contracts  what every clip map and every query must satisfy, checked on adversarial rows
bounds     lower bounds from the scores of two worlds (Clopper-Pearson, Gaussian DP)
two_world  a whole release path, many runs with and without one unit: the test that runs in CI
one_run    many canaries, one run, a bound (Steinke et al. 2023; Mahloujifar et al. 2025)
in_run     canary units inside a real run, by secret coins: a bound, and what the releases look like
one_shot   canary clients inside a real federated run, an estimate from its last model (Andrew et al. 2024)
roc        AUC and TPR at a small FPR of an attack score, with intervals
membership membership inference on a finished run: statistics, exchangeability, a bound

The test itself, ``two_world.two_world``, has the name of its module and is imported from there.
"""

from privacy.audit.bounds import epsilon_lower_clopper_pearson, epsilon_lower_gdp, gdp_epsilon, gdp_mu, mu_lower
from privacy.audit.contracts import adversarial_rows, check_clip_map, check_query
from privacy.audit.membership import attack, exchangeability, membership_bound
from privacy.audit.one_run import audit_one_run, inclusion
from privacy.audit.one_shot import canary_updates, one_shot_estimate
from privacy.audit.roc import auc, tpr_at_fpr
from privacy.audit.two_world import TwoWorldAudit, matched_filter, two_world_successive

__all__ = [
    "TwoWorldAudit",
    "adversarial_rows",
    "attack",
    "auc",
    "audit_one_run",
    "canary_updates",
    "check_clip_map",
    "check_query",
    "epsilon_lower_clopper_pearson",
    "epsilon_lower_gdp",
    "exchangeability",
    "gdp_epsilon",
    "gdp_mu",
    "inclusion",
    "matched_filter",
    "membership_bound",
    "mu_lower",
    "one_shot_estimate",
    "tpr_at_fpr",
    "two_world_successive",
]
