"""Attempts to refute a claimed guarantee by experiment; a claim that survives them is not thereby proven.

contracts  what every clip map and every query must satisfy, checked on adversarial rows
bounds     lower bounds from the scores of two worlds (Clopper-Pearson, Gaussian DP)
two_world  a whole release path, many runs with and without one unit: the test that runs in CI
one_run    many canaries, one run, a bound (Steinke et al. 2023; Mahloujifar et al. 2025)
in_run     canary units inside a real run, by secret coins: a bound, and what the releases look like
one_shot   canary clients inside a real federated run, an estimate from its last model (Andrew et al. 2024)
roc        AUC and TPR at a small FPR of an attack score, with intervals
membership membership inference on a finished run: statistics, exchangeability, a bound
"""
