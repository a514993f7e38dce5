"""Paired statistics against a hand calculation, and tables made from rows."""

import math

import pytest

from simulations.benchmarks.papers.dp_lac import choices, comparisons, difference_text
from simulations.benchmarks.privacy.correlated_training import seeds_needed, seeds_text
from simulations.history.paired import paired_difference


def cell(grid: str, variant: str, seed: int, accuracy: float, **changes: object) -> dict[str, object]:
    return {
        "cell": f"{grid}/{variant}/seed={seed}",
        "grid": grid,
        "variant": variant,
        "kind": "public-only" if variant == "floor" else "run",
        "axes": {},
        "seed": seed,
        "epsilon": 4.0,
        "epsilon_stated": None if variant == "floor" else 3.9999,
        "delta": 1e-5,
        "clients": 1000,
        "expected_cohort": 50.0,
        "rounds": 100,
        "rounds_done": 0 if variant == "floor" else 100,
        "dimension": 6914,
        "test_records": 872,
        "test_accuracy": accuracy,
        "validation_accuracy": 0.75,
        "validation_loss": 0.5,
        "first_clip_bound": None if variant == "floor" else 8.0,
        "last_clip_bound": None if variant == "floor" else 0.125,
        "cpu_seconds": 100.0,
        "first_round_loss": 1.0,
        "highest_round_loss": 2.0,
        "last_round_loss": 0.5,
        "commit": "abc",
        "machine": "2 cores",
        **changes,
    }


ROWS = [
    *(cell("default-sst2", "dp-lac", seed, accuracy) for seed, accuracy in enumerate((0.80, 0.82, 0.84))),
    *(cell("default-sst2", "fixed", seed, accuracy) for seed, accuracy in enumerate((0.70, 0.74, 0.72))),
    cell("default-sst2", "floor", 0, 0.77),
    cell("default-sst2", "dp-lac-histogram", 0, 0.81, first_clip_bound=0.25),
    cell("fixed-grid-sst2", "fixed-grid", 100, 0.5, axes={"a.clip-norm": 0.2}, last_clip_bound=0.2),
]


def test_a_paired_difference_is_students() -> None:
    found = paired_difference({0: 0.70, 1: 0.74, 2: 0.72, 7: 0.1}, {0: 0.80, 1: 0.82, 2: 0.84})
    assert found is not None
    assert len(found.values) == 3
    assert found.mean == pytest.approx(-0.10)
    assert found.half == pytest.approx(4.30265 * 0.02 / math.sqrt(3), rel=1e-5)
    assert difference_text(found) == "−10.0 [−15.0, −5.0]"
    assert difference_text(paired_difference({0: 0.7}, {0: 0.8})) == "−10.0 (one seed)"
    assert paired_difference({0: 0.7}, {1: 0.8}) is None


def test_the_table_ranks_methods_and_puts_the_beside_rows_last() -> None:
    lines = comparisons({"cells": ROWS}).splitlines()
    assert lines[0].startswith("**default-sst2**, ε ≤ 4.00 at δ = 1e-5: 1,000 clients, 50 expected in a round")
    first, *_, last = lines[4:8]
    assert first == "| DP-LAC, no histogram | 82.0 % ± 2.0 |  |  | 75.0 % ± 0.0 | 8 | 0.12 | 100 | 3 |"
    told = "**−10.0 [−15.0, −5.0]** |  |"
    assert lines[6] == f"| fixed (Abadi) | 72.0 % ± 2.0 | {told} 75.0 % ± 0.0 | 8 | 0.12 | 100 | 3 |"
    assert last.startswith("| *public-only baseline* | 77.0 % | −3.0 (one seed)")
    assert "fixed-grid" not in "\n".join(lines), "cells that served to choose are not reported"


def test_choices_show_validation_only() -> None:
    text = choices({"cells": ROWS})
    assert "| fixed-grid-sst2 | fixed-grid | clip-norm 0.2 | **75.0 %** | 0.500 | 0.2 |" in text
    assert "50.0 %" not in text, "no test accuracy"


def test_how_many_seeds_a_difference_takes() -> None:
    assert seeds_needed(1.0, 1.0) == 10  # paired t test, 5 %, power 80 %, as in the tables of Cohen
    assert seeds_needed(1.0, 0.5) == 34
    one, other = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 1.0, 1: 1.1, 2: 1.2}
    assert seeds_text(one, other) == f"{seeds_needed(0.1, math.log(1.03))}"
    assert seeds_text(one, one) == ""
    assert seeds_text({0: 1.0}, other) == ""
