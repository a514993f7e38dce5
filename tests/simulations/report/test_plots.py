"""Plots show the numbers they were given, all of them, and nothing else."""

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from server.run_folder.round_record import RoundRecord
from simulations.report import plots
from simulations.report.plots import DARK, LIGHT
from tests.cases.recorded_runs import recorded_metrics


@pytest.fixture
def metrics() -> list[RoundRecord]:
    return recorded_metrics(20, 20)


def lines(figure: Figure, panel: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    """Colour of each line and its points."""
    return {
        str(line.get_color()): (list(np.asarray(line.get_xdata())), list(np.asarray(line.get_ydata())))
        for line in figure.axes[panel].get_lines()
    }


def test_the_test_result_is_named_beside_its_point(metrics: list[RoundRecord]) -> None:
    (axes,) = plots.over_rounds(plots.accuracy, metrics, test_accuracy=0.7, majority_accuracy=0.2).axes
    assert axes.get_legend() is None  # a marker in a legend looks like one more point
    (name,) = [text for text in axes.texts if text.get_text().startswith("test")]
    assert name.get_text() == "test\n70.0\u00a0%"
    assert name.xy == (1.0, 0.7)


def test_accuracy_over_rounds_with_test_point_and_baseline(metrics: list[RoundRecord]) -> None:
    drawn = lines(plots.over_rounds(plots.accuracy, metrics, test_accuracy=0.7, majority_accuracy=0.4))
    assert drawn[LIGHT.first] == (list(range(1, 21)), [pytest.approx(0.5 + 0.01 * n) for n in range(1, 21)])
    assert drawn[LIGHT.second] == ([20], [0.7])
    assert drawn[LIGHT.muted][1] == [0.4, 0.4]


def test_a_most_frequent_class_far_below_leaves_the_curve_its_height(metrics: list[RoundRecord]) -> None:
    (axes,) = plots.over_rounds(plots.accuracy, metrics, majority_accuracy=0.05).axes
    assert axes.get_ylim()[0] > 0.4
    assert [text.get_text() for text in axes.texts] == ["always the most frequent class: 5.0\u00a0%"]


def test_loss_leaves_out_rounds_without_a_finite_value(metrics: list[RoundRecord]) -> None:
    metrics[3] = replace(metrics[3], validation_loss=None)
    metrics[4] = replace(metrics[4], validation_loss=math.inf)
    rounds, _ = lines(plots.over_rounds(plots.loss, metrics))[LIGHT.first]
    assert rounds == [1, 2, *range(5, 21)]


def test_clip_threshold_is_a_step_line_on_a_log_axis_when_it_spans_much(metrics: list[RoundRecord]) -> None:
    figure = plots.over_rounds(plots.clip_threshold, metrics)
    rounds, values = lines(figure)[LIGHT.first]
    assert rounds[:20] == list(range(1, 21))
    assert values[:20] == [0.5 / n for n in range(1, 21)]
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_ylabel() == "clip threshold C (L2 norm)"


def test_epsilon_starts_with_the_histogram_and_shows_the_budget(metrics: list[RoundRecord]) -> None:
    drawn = lines(plots.over_rounds(plots.epsilon_spent, metrics))
    rounds, values = drawn[LIGHT.first]
    assert (rounds[0], values[0]) == (0, 0.125)
    assert values[-1] == metrics[-1].epsilon_spent
    assert drawn[LIGHT.second][1] == [2.0, 2.0]


def test_norms_are_told_apart_by_dash_as_well_as_by_colour(metrics: list[RoundRecord]) -> None:
    figure = plots.over_rounds(plots.update_norm, metrics)
    assert {values[0] for _, values in lines(figure).values()} == {2.0, 1.5, math.sqrt(1.75)}
    handles = figure.axes[0].get_legend().get_lines()
    assert len({str(line._dash_pattern) for line in handles}) == 3
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["released", "noise (expected)", "signal (estimated)"]


def test_privacy_curve_marks_the_committed_delta() -> None:
    drawn = plots.privacy_curve([(1e-3, 1.0), (1e-5, 2.0), (1e-8, 3.0)], 1e-5)
    curve, mark = drawn.axes[0].get_lines()
    assert list(np.asarray(curve.get_xdata())) == [1e-8, 1e-5, 1e-3]
    assert (list(np.asarray(mark.get_xdata())), list(np.asarray(mark.get_ydata()))) == ([1e-5], [2.0])
    assert drawn.axes[0].texts[0].get_text() == "δ = 1e-5, ε ≤ 2.00"


def test_overview_has_three_panels_in_the_palette_asked_for(metrics: list[RoundRecord]) -> None:
    figure = plots.overview(metrics, DARK, test_accuracy=0.7)
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "accuracy, public validation",
        "clip threshold C (L2 norm)",
        "ε spent",
    ]
    assert all(DARK.first in lines(figure, panel) for panel in range(3))


def test_one_round_is_enough_to_draw_everything() -> None:
    metrics = recorded_metrics(1, 5)
    for draw in (plots.accuracy, plots.loss, plots.clip_threshold, plots.epsilon_spent, plots.update_norm):
        figure = plots.over_rounds(draw, metrics)
        figure.canvas.draw()
        assert figure.axes[0].get_xlabel() == "round"
