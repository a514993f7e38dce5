"""The candidates that a private sweep runs: how many, and with which settings, from randomness that nobody can repeat.

How many is secret for good: the theorems behind ``accountants/selection.py`` speak of releasing the best candidate and
nothing else.
"""

from collections.abc import Iterator
from decimal import Decimal, localcontext
from itertools import takewhile

from privacy import checks
from privacy.accountants.selection import stopping_probability
from privacy.commitment import POISSON, Tries
from privacy.randomness.rng import SecureRandom

_DIGITS = 100
_WORDS = 3


def draw(tries: Tries, cells: int) -> list[int]:
    """Draw K numbers below ``cells``, K by the law of ``tries``, each number uniform and independent of all others."""
    checks.integer_at_least(1, cells=cells)
    random = SecureRandom()
    with localcontext(prec=_DIGITS):
        uniform = Decimal(int.from_bytes(random.bytes(8 * _WORDS), "big")) / Decimal(2) ** (64 * _WORDS)
        count = quantile(tries, uniform)
    return [_below(cells, random) for _ in range(count)]


def quantile(tries: Tries, uniform: Decimal) -> int:
    """The least k with P(K <= k) > ``uniform``, in decimals of a hundred digits.

    With a ``uniform`` of 192 random bits the law of K is that of ``tries`` within a total variation of 1e-50, far below
    what a delta can resolve.

    Args:
        uniform: in [0, 1).
    """
    if not 0 <= uniform < 1:
        raise ValueError(f"uniform must be in [0, 1), got {uniform}")
    with localcontext(prec=_DIGITS):
        return next(count for count, reached in _cumulative(tries) if reached > uniform)


def chance_of_at_most(most: int, tries: Tries) -> float:
    """The probability P(K <= most), for a person to weigh a law by."""
    with localcontext(prec=_DIGITS):
        chances = takewhile(lambda pair: pair[0] <= most, _cumulative(tries))
        return float(max((reached for _, reached in chances), default=Decimal(0)))


def _cumulative(tries: Tries) -> Iterator[tuple[int, Decimal]]:
    """k and P(K <= k) from the least k on, without end, in the precision of the caller's context.

    P(k + 1) / P(k) is mean / (k + 1) for the Poisson law, (1 - gamma)(k + eta) / (k + 1) for the others (Definition 1).
    """
    if tries.shape == POISSON:  # a ratio of (slope k + offset) / (k + 1) as well
        count, slope, offset = 0, Decimal(0), Decimal(tries.mean)
        term = (-offset).exp()
    else:
        gamma, eta, count = Decimal(stopping_probability(tries)), Decimal(tries.shape), 1
        slope, offset = 1 - gamma, (1 - gamma) * eta
        if gamma == 1:
            term = Decimal(1)
        else:
            term = slope * (eta / (gamma**-eta - 1) if eta else 1 / (1 / gamma).ln())
    reached = term
    while True:
        yield count, reached
        term *= (slope * count + offset) / (count + 1)
        count += 1
        reached += term


def _below(limit: int, random: SecureRandom) -> int:
    """Uniform below ``limit``, without the bias of a remainder."""
    last = (1 << 64) - (1 << 64) % limit
    while (word := int(random.words(1)[0])) >= last:
        continue
    return word % limit
