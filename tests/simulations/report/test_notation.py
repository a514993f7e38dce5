"""How numbers are written: epsilon never shrinks in print."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.report.notation import delta_text, duration_text, epsilon_text, number_text, percent_text


@given(st.floats(0.0, 1e6))
@settings(derandomize=True, max_examples=200)
def test_epsilon_in_print_is_never_below_epsilon(epsilon: float) -> None:
    printed = float(epsilon_text(epsilon))
    assert epsilon <= printed <= epsilon + 0.01 + 1e-9 * epsilon


@pytest.mark.parametrize(
    ("epsilon", "text"), [(4.0, "4.00"), (0.1, "0.10"), (2.91, "2.91"), (2.9101, "2.92"), (math.inf, "infinite")]
)
def test_epsilon_text(epsilon: float, text: str) -> None:
    assert epsilon_text(epsilon) == text


@pytest.mark.parametrize(("delta", "text"), [(1e-5, "1e-5"), (2.5e-6, "2.5e-6"), (0.001, "1e-3")])
def test_delta_text(delta: float, text: str) -> None:
    assert delta_text(delta) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.35355339, "0.3536"), (12.0, "12"), (9218.0, "9,218"), (1234.5678, "1,235"), (1e-9, "1e-09"), (0.0, "0")],
)
def test_number_text(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1:00"), (125.0, "2:05"), (3723.0, "1:02:03")])
def test_duration_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_percent_text() -> None:
    assert percent_text(0.8125) == "81.2\u00a0%"
