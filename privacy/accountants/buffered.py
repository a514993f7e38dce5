r"""Buffered linear Toeplitz (BLT) strategies for correlated noise: how good they are, the best for a run, their price.

The figure of merit is that of ``factorisation.py``, the mean variance of the noise in the server's parameters over T
rounds, ||A C^{-1}||_F^2 / T for normals of variance 1; but no length of C is given. What a unit moves is
s = ||sum_j C[:, j b]|| with b groups in turn (:meth:`privacy.events.BufferedToeplitz.sensitivity`), and at noise
multiplier z the whole run costs one Gaussian of multiplier z / s. So at a given epsilon the variance is proportional to

    loss(C) = s^2 ||A C^{-1}||_F^2 / T,

which :func:`optimise` minimises over d scales and d decays. With the symmetric matrix S = diag(theta) - r r^T of roots
r = sqrt(omega), the first column of C^{-1} is 1, then -r^T S^{t-1} r: a BLT of the eigenvalues of S with negative
scales, so the loss and its gradient take O(T d).

No coin of a client is counted on. More groups then always cost less, so there are as many as the cohort allows: at
most 1 / q for a cohort of q N, each then asked whole.

References: as for :class:`privacy.events.BufferedToeplitz`; the inverse of a BLT is one (arXiv 2404.16706). What comes
out decides no guarantee: that leans on scales and decays as the ledger holds them.
"""

import math

import numpy as np
from jaxtyping import Float64
from scipy.optimize import minimize
from scipy.signal import lfilter
from scipy.special import expit, softmax

from privacy import checks
from privacy.accountants.calibration import calibrate
from privacy.accountants.factorisation import Strategy, cyclic, workload
from privacy.events import MOST_BUFFERS, BufferedToeplitz, CyclicPoisson

TRIED = 4
"""Most buffers that are tried: a fifth takes less than a thousandth off the noise of 10,000 rounds."""

ENOUGH = 1.01
"""Fewer buffers are taken while their noise is at most so many times the least."""

_FURTHEST = 14.0  # of a log-odds: decays are at most 1 - 1e-6


def mean_error(strategy: BufferedToeplitz, rounds: int, momentum: float = 0.0) -> float:
    """The mean squared error ||A C^{-1}||_F^2 / T that a strategy leaves over ``rounds`` rounds."""
    checks.integer_at_least(1, rounds=rounds)
    series = _Inverse(np.array(strategy.scales), np.array(strategy.decays)).of(workload(rounds, momentum))
    return float((1.0 - np.arange(rounds) / rounds) * series @ series)


def optimise(buffers: int, rounds: int, groups: int, momentum: float = 0.0) -> BufferedToeplitz:
    """The strategy with the least mean error over so many rounds at a given epsilon.

    Args:
        buffers: d, of 1 to :data:`~privacy.events.MOST_BUFFERS`.
        groups: b, of which each is asked in every b-th round.
        momentum: of the server, in [0, 1).
    """
    checks.within(1, MOST_BUFFERS, buffers=buffers)
    checks.integer_at_least(1, buffers=buffers, rounds=rounds, groups=groups)
    sums = workload(rounds, momentum)
    best: tuple[float, Float64[np.ndarray, " k"]] | None = None
    for start in _starts(buffers, min(rounds, groups)):
        found = minimize(
            _loss,
            start,
            args=(sums, groups),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-30.0, 30.0)] * buffers + [(-_FURTHEST, _FURTHEST)] * buffers,
            options={"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-9},
        )
        if best is None or found.fun < best[0]:
            best = float(found.fun), found.x
    assert best is not None
    scales, decays = _parameters(best[1])
    order = np.argsort(-decays)
    return BufferedToeplitz(tuple(map(float, scales[order])), tuple(map(float, decays[order])))


def price_strategy(
    buffers: int, epsilon: float, delta: float, clients: int, rate: float, rounds: int, momentum: float = 0.0
) -> Strategy[BufferedToeplitz]:
    """The best strategy of so many buffers, with as many groups as the cohort allows, at the noise for the target.

    Raises:
        ValueError: no noise keeps the target.
    """
    sampling = turns(clients, rate, rounds)
    strategy = optimise(buffers, rounds, sampling.groups, momentum)
    z = calibrate(epsilon, delta, sampling, rounds, correlation=strategy)
    error = math.sqrt(mean_error(strategy, rounds, momentum)) * z / sampling.expected_units
    return Strategy(strategy, sampling, z, error)


def turns(clients: int, rate: float, rounds: int) -> CyclicPoisson:
    """Sampling with an expected cohort of ``rate * clients`` from as many groups as that allows, at most ``rounds``."""
    return cyclic(min(rounds, math.floor(1.0 / rate * (1.0 + 1e-12))), clients, rate)


def choose(
    epsilon: float, delta: float, clients: int, rate: float, rounds: int, momentum: float = 0.0
) -> tuple[Strategy[BufferedToeplitz], ...]:
    """One strategy for each number of buffers up to :data:`TRIED`, the one to take first.

    That is the one of fewest buffers whose noise is within a percent of the least.
    """
    tried = [
        price_strategy(buffers, epsilon, delta, clients, rate, rounds, momentum) for buffers in range(1, TRIED + 1)
    ]
    least = min(one.error for one in tried)
    taken = next(one for one in tried if one.error <= ENOUGH * least)
    return taken, *(one for one in tried if one is not taken)


class _Inverse:
    """C^{-1} as a filter of series."""

    def __init__(self, scales: Float64[np.ndarray, " d"], decays: Float64[np.ndarray, " d"]) -> None:
        roots = np.sqrt(scales)
        self._decays, vectors = np.linalg.eigh(np.diag(decays) - np.outer(roots, roots))
        self._scales = np.square(vectors.T @ roots)

    def of(self, series: Float64[np.ndarray, " T"]) -> Float64[np.ndarray, " T"]:
        result = series.copy()
        for scale, decay in zip(self._scales, self._decays, strict=True):
            result -= scale * _delayed(series, decay)
        return result


def _delayed(series: Float64[np.ndarray, " T"], decay: float) -> Float64[np.ndarray, " T"]:
    """x / (1 - decay x) times a power series."""
    return np.asarray(lfilter([0.0, 1.0], [1.0, -decay], series))


def _parameters(free: Float64[np.ndarray, " k"]) -> tuple[Float64[np.ndarray, " d"], Float64[np.ndarray, " d"]]:
    """Scales > 0 of sum below 1, and decays in (0, 1), from any numbers."""
    logits, odds = np.split(free, 2)
    return softmax(np.append(logits, 0.0))[:-1], expit(odds)


def _loss(
    free: Float64[np.ndarray, " k"], sums: Float64[np.ndarray, " T"], groups: int
) -> tuple[float, Float64[np.ndarray, " k"]]:
    """log(s^2 error) and its gradient: d(1/C) = -dC/C^2, dC/d omega = x/(1 - theta x), dC/d theta = omega (that)^2."""
    scales, decays = _parameters(free)
    rounds = len(sums)
    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    geometric = [_delayed(impulse, decay) for decay in decays]
    column = impulse + sum(scale * one for scale, one in zip(scales, geometric, strict=True))
    moved = _moved(column, groups)
    inverse = _Inverse(scales, decays)
    series = inverse.of(sums)
    weighted = (1.0 - np.arange(rounds) / rounds) * series
    slope = inverse.of(series)
    error, squares = float(weighted @ series), float(moved @ moved)
    by_scale, by_decay = np.empty_like(scales), np.empty_like(decays)
    for i, (scale, decay) in enumerate(zip(scales, decays, strict=True)):
        of_error, of_column = _delayed(slope, decay), geometric[i]
        by_scale[i] = -weighted @ of_error / error + moved @ _moved(of_column, groups) / squares
        of_error, of_column = _delayed(of_error, decay), _delayed(of_column, decay)
        by_decay[i] = scale * (-weighted @ of_error / error + moved @ _moved(of_column, groups) / squares)
    by_logit = scales * (by_scale - scales @ by_scale)
    by_odds = by_decay * decays * (1.0 - decays)
    return math.log(error * squares), 2.0 * np.concatenate([by_logit, by_odds])


def _moved(column: Float64[np.ndarray, " T"], groups: int) -> Float64[np.ndarray, " T"]:
    """Columns 0, b, 2b, ... of a lower-triangular Toeplitz matrix, added up; ``column`` is its first."""
    turns = -(-len(column) // groups)
    padded = np.concatenate([column, np.zeros(turns * groups - len(column))])
    return np.cumsum(padded.reshape(turns, groups), axis=0).ravel()[: len(column)]


def _starts(buffers: int, horizon: int) -> list[Float64[np.ndarray, " k"]]:
    """Memories spread evenly, on a log scale, from one round to three horizons; equal scales that add up to a half."""
    starts = []
    for longest in (0.3 * horizon, 3.0 * horizon):
        for shortest in (1.2, 3.0):
            memory = np.geomspace(max(longest, 2.0), shortest, buffers)
            odds = np.log(memory[memory > 0.0])  # a decay of 1 - 1 / (1 + m) has odds m
            starts.append(np.concatenate([np.full(buffers, -math.log(buffers)), odds]))
    return starts
