"""Validators: what they let through, what they refuse, and that the message says what, value, limit, remedy."""

import math

import numpy as np
import pytest

from privacy import checks

REFUSED = [math.nan, "1", None, True, 1j]


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (checks.finite, [0, -1.5, np.float32(2), 1e300], [math.inf, -math.inf]),
        (checks.positive, [1e-300, 3, np.float64(2)], [0, -1.0, math.inf]),
        (checks.non_negative, [0, 0.0, 5], [-1e-300, math.inf]),
        (checks.probability, [1e-12, 1, 0.5], [0.0, 1.0000001, -0.1]),
        (checks.fraction, [0, 1, 0.5], [-1e-9, 1.1]),
    ],
)
def test_numbers(check, good, bad):
    for value in good:
        check(x=value)
    for value in [*bad, *REFUSED]:
        with pytest.raises(ValueError, match=r"x must be .*, got"):
            check(x=value)


def test_message_names_argument_limit_value_and_remedy():
    with pytest.raises(ValueError) as error:
        checks.positive(noise_multiplier=-1.0, remedy="lacquer plan names one")
    assert str(error.value) == ("noise_multiplier must be > 0 and finite, got -1.0; lacquer plan names one")


def test_the_offending_one_of_several_is_named():
    with pytest.raises(ValueError, match=r"^beta must be"):
        checks.positive(alpha=1.0, beta=0.0)


def test_within():
    checks.within(0.5, 2.0, x=0.5, y=2)
    for value in (0.49, 2.01, *REFUSED):
        with pytest.raises(ValueError, match=r"x must be in \[0.5, 2.0\]"):
            checks.within(0.5, 2.0, x=value)


def test_integers_are_integers():
    checks.integer_at_least(1, rounds=1, size=np.int64(5))
    for value in (0, 1.0, True, "2", None, np.float64(3)):
        with pytest.raises(ValueError, match=r"rounds .*>= 1"):
            checks.integer_at_least(1, rounds=value)


def test_one_of():
    checks.one_of(("pld", "rdp"), accountant="pld")
    with pytest.raises(ValueError, match=r"accountant .*'pld', 'rdp', got 'gdp'"):
        checks.one_of(("pld", "rdp"), accountant="gdp")


def test_sequences():
    checks.strictly_increasing(edges=(0.1, 1, 10))
    checks.same_length(bounds=(1, 2), sizes=(3, 4))
    checks.not_empty(bounds=(1,))
    for bad in ((), (1, 1), (2, 1), (1, math.nan), (1, math.inf), (1, "2")):
        with pytest.raises(ValueError, match="edges must be"):
            checks.strictly_increasing(edges=bad)
    with pytest.raises(ValueError, match=r"bounds and sizes .* got \(2, 1\)"):
        checks.same_length(bounds=(1, 2), sizes=(3,))
    with pytest.raises(ValueError, match="bounds must be non-empty"):
        checks.not_empty(bounds=())
