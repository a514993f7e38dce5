"""Which candidates run: the random bits become the law exactly, and no remainder is favoured."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from privacy.commitment import POISSON, Tries
from privacy.randomness import tries as drawing

LAWS = [Tries(4.0, POISSON), Tries(10.0, 1.0), Tries(6.0, 0.0), Tries(5.0, 0.5)]


class Given:
    """Stands in for the secure generator: these words, or these bytes, and no others."""

    def __init__(self, words: Sequence[int] = (), all_bytes: bytes = b"") -> None:
        self._words, self._bytes = list(words), all_bytes

    def words(self, count: int) -> Any:
        return np.array([self._words.pop(0) for _ in range(count)], dtype=np.uint64)

    def bytes(self, count: int) -> bytes:
        assert count == len(self._bytes)
        return self._bytes


LIMIT = 2**63 + 1
"""2^64 holds it once; the other 2^63 - 1 words must be thrown away."""


@pytest.mark.parametrize(
    ("words", "limit", "number"),
    [
        ([2**63], LIMIT, 2**63),
        ([2**63 + 1, 17], LIMIT, 17),
        ([2**64 - 1, 2**63 + 2, 2**63], LIMIT, 2**63),
        ([2**64 - 1, 2**64 - 2], 3, 2),
        ([2**64 - 1], 4, 3),
    ],
)
def test_a_word_in_the_last_incomplete_range_is_drawn_again(words: list[int], limit: int, number: int) -> None:
    given = Given(words)
    assert drawing._below(limit, given) == number  # type: ignore[arg-type]
    assert not given._words


@pytest.mark.parametrize("tries", LAWS)
@pytest.mark.parametrize(
    ("bits", "uniform"),
    [
        (b"\x80" + bytes(23), Decimal("0.5")),
        (b"\x40" + bytes(23), Decimal("0.25")),
        (b"\xff" * 24, 1 - Decimal(2) ** -80),  # nearly 1: needs more digits than a double, or Decimal's 28, has
    ],
)
def test_random_bits_are_the_binary_digits_of_the_uniform(
    tries: Tries, bits: bytes, uniform: Decimal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "SecureRandom", lambda: Given([0] * 5000, bits))
    found = len(drawing.draw(tries, 7))
    expected = drawing.quantile(tries, uniform)
    if bits[0] == 0xFF:
        assert found > expected  # by the digits beyond 2^-80
    else:
        assert found == expected


@pytest.mark.parametrize("tries", LAWS)
def test_the_least_uniform_gives_the_least_number(tries: Tries) -> None:
    assert drawing.quantile(tries, Decimal(0)) == (0 if tries.shape == POISSON else 1)


def test_without_cells_nothing_is_drawn() -> None:
    with pytest.raises(ValueError, match="cells must be"):
        drawing.draw(LAWS[0], 0)


def test_the_upper_end_of_a_number_s_share_belongs_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uniform lies in [0, 1)."""
    monkeypatch.setattr(drawing, "_cumulative", lambda tries: iter([(1, Decimal("0.25")), (2, Decimal(1))]))
    assert [drawing.quantile(LAWS[0], Decimal(u)) for u in ("0.2499", "0.25", "0.9999")] == [1, 2, 2]
