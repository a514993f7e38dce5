"""Paired statistics against a hand calculation, and tables and figure made from rows."""

import math

import pytest

from simulations.benchmarks.papers.dp_adam_ac_figure import curves_figure
from simulations.benchmarks.papers.dp_lac import choices, comparisons, difference_text
from simulations.benchmarks.papers.dp_lac_claims import claims
from simulations.benchmarks.papers.dp_lac_figure import comparison_figure
from simulations.benchmarks.privacy.correlated_training import seeds_needed, seeds_text
from simulations.history.paired import paired_difference
from simulations.report.plots import LIGHT


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


def test_claims_are_answered_only_where_there_are_numbers() -> None:
    def answers(*more: dict[str, object]) -> dict[str, str]:
        lines = claims({"cells": [*ROWS, *more]}).splitlines()[2:]
        return {line.split(" | ")[0].removeprefix("| "): line for line in lines}

    best, clac = "beats the best other method by 6.6 points on average", "DP-CLAC is below DP-LAC"
    histogram = "The histogram's C is within one order of magnitude of the best fixed C"
    found = answers()
    assert "not measured yet" in found[best]
    assert "histogram: 0.25; best of the fixed grid (validation): 0.2 (75.0 %) | yes" in found[histogram]
    fell = "| default | C ends at 1.6 % of its start, the loss at 50 % of round 1 and 25 % of its highest | no |"
    assert found["C falls as the validation loss does (no histogram)"].endswith(fell)
    tuned = [cell("tuned-sst2", name, 0, value) for name, value in (("dp-lac-histogram", 0.8), ("fixed-tuned", 0.7))]
    assert answers(*tuned)[best].endswith("+10.0 (one seed), one seed | one seed (the mean says yes) |")
    values = {"dp-lac-histogram": (0.80, 0.81, 0.82), "fixed-tuned": (0.70, 0.712, 0.72)}
    tuned = [cell("tuned-sst2", name, seed, value) for name in values for seed, value in enumerate(values[name])]
    assert answers(*tuned)[best].endswith("3 seeds | yes |")
    less = [{**row, "test_accuracy": 0.76 if row["variant"] == "fixed-tuned" else 0.80} for row in tuned]
    assert answers(*less)[best].endswith("| no |"), "significant, but 4 points are not 6.6"
    below = [cell("default-sst2", "dp-clac", seed, 0.5 + 0.01 * seed) for seed in range(3)]
    assert answers(*below)[clac].endswith("3 seeds | yes |")
    close = [cell("default-sst2", "dp-clac", seed, 0.80 + 0.1 * (seed % 2)) for seed in range(3)]
    assert "| not significant: " in answers(*close)[clac]
    far = cell("fixed-grid-sst2", "fixed-grid", 100, 0.5, last_clip_bound=0.02, validation_accuracy=0.74)
    assert "0.2 (75.0 %), 0.02 (74.0 %) | undecided |" in answers(far)[histogram]
    rose = cell("default-sst2", "dp-lac-smooth", 0, 0.8, last_round_loss=2.0)
    assert "not tested (the loss did not fall)" in answers(rose)["the same with `smooth`"]


def test_the_figure_has_a_row_per_method_and_lines_for_the_rest() -> None:
    (axes,) = comparison_figure(ROWS, LIGHT).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "fixed (Abadi)",
        "DP-LAC, histogram",
        "DP-LAC, no histogram",
    ]
    assert [text.get_text() for text in axes.texts] == ["public-only baseline"]
    with pytest.raises(ValueError, match="run the sweep first"):
        comparison_figure([], LIGHT)


def test_the_curves_of_every_noise_level_stand_side_by_side() -> None:
    curve = {"curve": [[10, 3.0], [20, 2.0]], "noise_multiplier": 0.7002, "not_private": None}
    rows = [cell("sigma", variant, seed, 0.5, **curve) for variant in ("dp-lora", "adam-ac-20") for seed in (0, 1)]
    rows.append(cell("sigma-0", "dp-lora", 0, 0.5, **{**curve, "not_private": "no noise is added"}))
    without, noisy = curves_figure(rows, LIGHT).axes
    assert (without.get_xlabel(), noisy.get_xlabel()) == ("step, σ = 0", "step, σ = 0.7")
    assert (len(without.lines), len(noisy.lines)) == (1, 4)
    with pytest.raises(ValueError, match="records-diabetes-why"):
        curves_figure(ROWS, LIGHT)


def test_how_many_seeds_a_difference_takes() -> None:
    assert seeds_needed(1.0, 1.0) == 10  # paired t test, 5 %, power 80 %, as in the tables of Cohen
    assert seeds_needed(1.0, 0.5) == 34
    one, other = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 1.0, 1: 1.1, 2: 1.2}
    assert seeds_text(one, other) == f"{seeds_needed(0.1, math.log(1.03))}"
    assert seeds_text(one, one) == ""
    assert seeds_text({0: 1.0}, other) == ""
