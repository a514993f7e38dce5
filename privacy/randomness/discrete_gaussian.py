r"""Exact samples of the discrete Gaussian: integers n with probability proportional to exp(-n^2 / (2 s^2)), integer s.

Definition, privacy and exact coins: Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy"
(arXiv 2004.00010v5). The way from coins to samples is Karney's (arXiv 1303.6257v2, algorithm D at mean 0): for an
integer s it needs uniform integers below s and comparisons only, which numpy does many at a time. (Rejection from a
discrete Laplace, as in the first paper, needs 80-bit numerators at the scale used here, s near 2^40; OpenDP's sampler,
written in Rust over big rationals, is not a dependency for one function.)

Write |n| = k s + j with 0 <= j < s and x = j/s. Then n^2/(2 s^2) = k^2/2 + k x + x^2/2, so:

1. k with probability proportional to exp(-k^2/2): geometric with exp(-1/2), kept with probability exp(-1)^(k(k-1)/2);
2. j uniform below s;
3. keep (k, j) with probability exp(-x)^k exp(-x^2/2), else start again;
4. a fair sign; start again on minus zero, which would count 0 twice.

A coin of probability exp(-g), 0 <= g <= 1, is a run of coins of probabilities g/1, g/2, g/3, ... up to the first
failure, true if that is an odd one (von Neumann; algorithm 1 of the first paper). A coin of probability x^2/2 is two
coins x and one of 1/2, all true. A coin of probability a/b is a word that is less than a q, where q is the whole part
of (2^64 - 1)/b and words from b q on are drawn again.

Exact means exact: no float, no rounded table of probabilities, no cut tail; the one assumption is uniform bits. The
time of one draw depends on its value, as with every rejection sampler (Jin et al. 2022, arXiv 2112.05307v2); here only
the time of a whole vector shows.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from privacy import checks
from privacy.randomness.rng import SecureRandom

# Candidates handled at a time: many enough to spread Python's cost per pass, few enough to stay in the cache.
_BATCH: Final = 1 << 16

_Indices: TypeAlias = NDArray[np.int64]
_Coin: TypeAlias = Callable[[_Indices, int], NDArray[np.bool_]]
"""coin(members, i): for each member, one flip of probability g/i (g may differ between members)."""


def discrete_gaussian(s: int, count: int, random: SecureRandom) -> Int64[np.ndarray, " count"]:
    """``count`` independent samples with parameter ``s`` (nearly their standard deviation), 1 <= s <= 2^56."""
    checks.integer_at_least(1, s=s)
    checks.integer_at_least(0, count=count)
    if s > 1 << 56:
        raise ValueError(f"s must be <= 2**56 for samples to fit into 64 bits, got {s}; use a coarser grid")
    coins = _Coins(random)
    out = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        batch = _samples(s, min(_BATCH, 3 * (count - done) + 64), coins)[: count - done]
        out[done : done + batch.size] = batch
        done += batch.size
    return out


class _Coins:
    """Exact coins from random words, which are bought by the MiB because most calls need few."""

    def __init__(self, random: SecureRandom) -> None:
        self._random = random
        self._pool = random.words(0)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Uniform 64-bit words."""
        if count > self._pool.size:
            self._pool = self._random.words(max(1 << 17, count))
        taken, self._pool = self._pool[:count], self._pool[count:]
        return taken

    def words_below(self, limit: int, count: int) -> NDArray[np.uint64]:
        """Uniform 64-bit words in [0, limit), 2^63 < limit <= 2^64, so that at most half are drawn again."""
        words, last = self.words(count), np.uint64(limit - 1)
        while (again := np.flatnonzero(words > last)).size:
            words[again] = self.words(again.size)
        return words

    def one_in(self, n: int, count: int) -> NDArray[np.bool_]:
        """Coins of probability 1/n, n <= 2^16, from 16 bits each."""
        share = (1 << 16) // n
        lanes, last = self._lanes(count), np.uint16(n * share - 1)
        while (again := np.flatnonzero(lanes > last)).size:
            lanes[again] = self._lanes(again.size)
        return lanes <= np.uint16(share - 1)

    def _lanes(self, count: int) -> NDArray[np.uint16]:
        return self.words(count // 4 + 1).view(np.uint16)[:count]


def _samples(s: int, candidates: int, coins: _Coins) -> NDArray[np.int64]:
    """Those of the candidates that were kept, in the order in which they were drawn."""
    k = _half_normal_integers(candidates, coins)
    share = ((1 << 64) - 1) // s
    j = coins.words_below(s * share, k.size) // np.uint64(share)
    below_x = j * np.uint64(share)  # a word in [0, s share) is less than this with probability j/s

    def coin_x(members: _Indices) -> NDArray[np.bool_]:
        return coins.words_below(s * share, members.size) < below_x[members]

    def linear(members: _Indices, i: int) -> NDArray[np.bool_]:
        return _all_true(members, lambda rest: coins.one_in(i, rest.size), coin_x)

    def half_square(members: _Indices, i: int) -> NDArray[np.bool_]:
        return _all_true(members, lambda rest: coins.one_in(2 * i, rest.size), coin_x, coin_x)

    kept = _exp_minus(np.arange(k.size), half_square)
    kept = _repeat(kept, k, linear)
    size = k[kept] * s + j[kept].view(np.int64)
    plus = coins.one_in(2, size.size)
    return np.where(plus, size, -size)[plus | (size > 0)]


def _half_normal_integers(candidates: int, coins: _Coins) -> NDArray[np.int64]:
    """Integers k >= 0 with probability proportional to exp(-k^2/2): those of the candidates that were kept."""
    k = np.zeros(candidates, dtype=np.int64)
    rising = np.arange(candidates)
    while rising.size:
        rising = rising[_exp_minus(rising, lambda members, i: coins.one_in(2 * i, members.size))]
        k[rising] += 1
    kept = np.ones(candidates, dtype=np.bool_)
    return k[_repeat(kept, k * (k - 1) // 2, lambda members, i: coins.one_in(i, members.size))]


def _repeat(kept: NDArray[np.bool_], times: NDArray[np.int64], coin: _Coin) -> NDArray[np.bool_]:
    """Which members are kept after ``times`` more flips of exp(-g) each, all of which must come up true."""
    kept, repeat = kept.copy(), 1
    while (members := np.flatnonzero(kept & (times >= repeat))).size:
        kept[members] = _exp_minus(members, coin)
        repeat += 1
    return kept


def _exp_minus(members: _Indices, coin: _Coin) -> Bool[np.ndarray, " members"]:
    """For each member a flip of probability exp(-g), where ``coin(members, i)`` flips with probability g/i."""
    verdict = np.zeros(members.size, dtype=np.bool_)
    running, i = np.arange(members.size), 1
    while running.size:
        success = coin(members[running], i)
        verdict[running[~success]] = i % 2 == 1
        running, i = running[success], i + 1
    return verdict


def _all_true(members: _Indices, *coins: Callable[[_Indices], NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Whether all coins came up true; each is flipped only for the members whose earlier ones did."""
    verdict = np.zeros(members.size, dtype=np.bool_)
    standing = np.arange(members.size)
    for coin in coins:
        standing = standing[coin(members[standing])]
    verdict[standing] = True
    return verdict
