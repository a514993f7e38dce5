"""Events describe releases: what is impossible is refused, noise multipliers are right, JSON brings back the same."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.events import BufferedToeplitz, Component, CyclicPoisson, ExampleLevelPoisson, Poisson, ReleaseEvent
from privacy.events.correlation import seen_by_one_unit

POISSON = Poisson(0.05, 1000)


def event(*components: Component, sampling: Poisson = POISSON) -> ReleaseEvent:
    return ReleaseEvent("round", 3, sampling, components)


def test_the_effective_noise_multiplier_of_one_component_is_its_own() -> None:
    assert event(Component("update", 2.0, 3.0, 10)).effective_noise_multiplier == pytest.approx(1.5, rel=1e-15)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=6))
def test_the_effective_noise_multiplier_is_that_of_the_whitened_gaussian(parts: list[tuple[float, float]]) -> None:
    joint = event(*(Component(str(i), s, noise, 1) for i, (s, noise) in enumerate(parts)))
    whitened_sensitivity = math.sqrt(sum((s / noise) ** 2 for s, noise in parts))
    assert joint.effective_noise_multiplier * whitened_sensitivity == pytest.approx(1.0, rel=1e-12)


def test_a_component_without_noise_makes_the_event_worthless() -> None:
    assert event(Component("update", 1.0, 5.0, 10), Component("count", 1.0, 0.0, 1)).effective_noise_multiplier == 0.0


@pytest.mark.parametrize(
    "sampling",
    [
        POISSON,
        Poisson(1.0, 7, "record"),
        Poisson(0.1, 1000, "group:family"),
        ExampleLevelPoisson(0.1, 1000, "group:x", 4, 2500),
    ],
)
def test_json_brings_back_the_same_event(sampling: Poisson) -> None:
    before = event(Component("update", 1.0, 1.1, 100), Component("bit", 0.5, 5.0, 1), sampling=sampling)
    after = ReleaseEvent.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    assert after.sampling == Poisson.from_json(sampling.to_json())
    assert after.unit == sampling.unit


def test_numpy_numbers_become_plain_json() -> None:
    part = Component("update", np.float32(1.0), np.float64(1.1), np.int64(4))  # type: ignore[arg-type]
    made = ReleaseEvent("round", np.int64(3), Poisson(np.float32(0.5), np.int64(10)), (part,))  # type: ignore[arg-type]
    assert ReleaseEvent.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_the_divisor_is_the_expected_cohort() -> None:
    assert POISSON.expected_units == 50.0


def test_where_records_are_sampled_the_divisor_counts_records() -> None:
    sampling = ExampleLevelPoisson(0.1, 1000, "group:patient", 4, 2500)
    assert sampling.expected_units == 250.0
    assert (sampling.population, sampling.rows, POISSON.rows) == (1000, 2500, 1000)


@pytest.mark.parametrize(
    ("most", "count", "message"),
    [
        (0, 1000, "records_per_unit must be an integer >= 1"),
        (257, 1000, r"records_per_unit must be in \[1, 256\]"),
        (4, 999, r"records must be in \[1000, 4000\]"),  # a unit has a record, or is none
        (4, 4001, r"records must be in \[1000, 4000\]"),
    ],
)
def test_no_unit_has_more_records_than_the_cap(most: int, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExampleLevelPoisson(0.1, 1000, "group:patient", most, count)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poisson(0.0, 10), "rate must be in"),
        (lambda: Poisson(1.5, 10), "rate must be in"),
        (lambda: Poisson(math.nan, 10), "rate must be in"),
        (lambda: Poisson(0.5, 0), "population must be an integer >= 1"),
        (lambda: Poisson(0.5, 10, "patient"), "unit must be 'client', 'record' or 'group:NAME', got 'patient'"),
        (lambda: Poisson(0.5, 10, "group:"), "unit must be"),
        (lambda: Component("update", 0.0, 1.0, 1), "sensitivity must be > 0"),
        (lambda: Component("update", 1.0, -1.0, 1), "noise_std must be >= 0"),
        (lambda: Component("update", 1.0, math.inf, 1), "noise_std must be >= 0 and finite"),
        (lambda: Component("update", 1.0, 1.0, 0), "dim must be an integer >= 1"),
        (lambda: ReleaseEvent("round", -1, POISSON, (Component("u", 1.0, 1.0, 1),)), "round must be an integer >= 0"),
        (lambda: ReleaseEvent("", 0, POISSON, (Component("u", 1.0, 1.0, 1),)), "label must not be empty"),
        (lambda: ReleaseEvent("round", 0, POISSON, ()), "at least one Component"),
        (
            lambda: Poisson.from_json({"kind": "fixed-size", "size": 3}),
            "'example-level-poisson', got 'fixed-size'",
        ),
    ],
)
def test_impossible_descriptions_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_what_one_unit_sees_of_cyclic_sampling_is_of_its_own_kind() -> None:
    cyclic = CyclicPoisson(0.1, 100, "record", groups=4)
    assert seen_by_one_unit(cyclic, 2.0, 9) == (Poisson(0.1, 100, "record"), 2.0, 3)
    strategy = BufferedToeplitz((0.4,), (0.9,))
    assert seen_by_one_unit(cyclic, 2.0, 9, strategy)[0] == Poisson(1.0, 100, "record")


def test_a_turn_is_counted_from_zero() -> None:
    CyclicPoisson(0.1, 100, groups=4, turn=0)
    with pytest.raises(ValueError, match="turn must be an integer >= 0"):
        CyclicPoisson(0.1, 100, groups=4, turn=-1)
