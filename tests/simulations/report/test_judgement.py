"""Warnings that judge: each is made where it should be, and not beside it."""

from dataclasses import replace

import pytest

from server.config.load import parse
from server.run_folder.data_facts import SIMULATED, DataFacts
from simulations.report.figures import report_figures
from simulations.report.judgement import foresee_problems, judgements
from simulations.report.read_run import Run
from tests.cases.recorded_runs import finished, recorded_metrics, recorded_start, settled

FACTS = DataFacts(SIMULATED, {"source": 30}, {}, {}, {}, {"train": 20}, {"train": 2})


def test_a_run_that_learnt_is_not_warned_of() -> None:
    assert judgements(finished()) == []


def test_a_model_below_the_constant_answer_is_named() -> None:
    (found,) = judgements(finished({"test_accuracy": 0.29}))
    assert "worse than a constant" in found
    assert "29.0\u00a0%, is below 30.0\u00a0%" in found


@pytest.mark.parametrize("after", [0.5, 0.4])
def test_a_model_no_better_than_its_start_is_named(after: float) -> None:
    (found,) = judgements(finished({"validation_accuracy": after}))
    assert found.startswith("The run has learnt nothing beyond its start: validation accuracy is")
    assert "was 50.0\u00a0% before the first" in found


@pytest.mark.parametrize(("loss", "warned"), [(0.5, False), (0.96, True), (1.1, True)])
def test_a_run_that_does_not_clearly_beat_public_records_alone_is_named_first(loss: float, warned: bool) -> None:
    """1,000 records and a loss of 1 before: 2 standard errors are 0.063."""
    public = {"public_test_loss": 1.0, "public_test_accuracy": 0.75, "test_loss": loss, "test_records": 1000}
    found = judgements(finished({**public, "test_accuracy": 0.8}))
    assert len(found) == warned
    for text in found:
        assert text.startswith(
            "The run did not clearly beat public records alone, which cost no privacy: test accuracy"
        )
        assert "75.0\u00a0% with them, 80.0\u00a0% after private training" in text


@pytest.mark.parametrize(
    ("unit", "remedy"), [("client", "number of clients"), ("record", "number of records at each site")]
)
def test_the_remedy_is_more_of_what_is_protected(unit: str, remedy: str) -> None:
    config = parse({"sampling-rate": 1.0, "privacy": {"unit": unit}})
    found = judgements(replace(finished({"validation_accuracy": 0.5}), config=config))
    assert [remedy in text for text in found if text.startswith("The run has learnt nothing")] == [True]


def test_a_language_model_is_judged_by_its_perplexity() -> None:
    start = replace(recorded_start(8), validation_perplexity=20.0)
    metrics = [start, *(replace(settled(r), validation_perplexity=19.0) for r in recorded_metrics(8, 8)[1:])]
    results = {"validation_perplexity": 19.0, "validation_accuracy": 0.1}
    assert judgements(finished(results, metrics=metrics)) == []
    (found,) = judgements(finished({**results, "validation_perplexity": 21.0}, metrics=metrics))
    assert "validation perplexity is 21 after 8 rounds and was 20" in found


@pytest.mark.parametrize(("norm", "warned"), [(1.5, True), (1.52, True), (1.9, False)])
def test_updates_that_are_all_noise_are_named(norm: float, warned: bool) -> None:
    """Noise 1.5 in 100 dimensions: the sum of 8 squared norms strays by 0.9 standard deviation at 1.52."""
    metrics = [recorded_start(8), *(replace(settled(r), update_norm=norm) for r in recorded_metrics(8, 8)[1:])]
    found = judgements(finished(metrics=metrics))
    assert [text.startswith("Over 8 rounds the released updates cannot be told") for text in found] == [True] * warned


def all_noise(**results: float) -> Run:
    metrics = [recorded_start(8), *(replace(settled(r), update_norm=1.5) for r in recorded_metrics(8, 8)[1:])]
    return finished(results, metrics=metrics)


@pytest.mark.parametrize(
    ("accuracy", "loss", "records", "clear"),
    [
        (0.532, 1.8, 500, True),
        (0.532, 1.8, 350, False),  # twice the standard error is 0.179 nats of 500 records and 0.214 of 350
        (0.49, 1.8, 5000, False),  # no better than the start
        (0.532, 2.1, 5000, False),
    ],
)
def test_updates_that_are_all_noise_are_no_failure_where_their_sum_is_not(
    accuracy: float, loss: float, records: int, clear: bool
) -> None:
    run = all_noise(validation_accuracy=accuracy, validation_loss=loss, validation_records=records)
    run.metrics[0] = replace(run.metrics[0], validation_loss=2.0)
    assert any("cannot be told from their noise" in text for text in judgements(run)) is not clear
    (figure,) = (figure for figure in report_figures(run) if figure.name == "norms")
    said = (
        "No single release can be told from its noise here. Their sum over 8 rounds can: validation loss fell from 2 "
        "to 1.8; accuracy was 50.0\u00a0% before round 1 and is 53.2\u00a0% now."
    )
    assert (said in figure.meaning) is clear
    assert ("Learning is possible with a signal far below" in figure.meaning) is not clear


def test_where_the_validation_records_were_not_counted_the_warning_stays() -> None:
    run = all_noise(validation_accuracy=0.9, validation_loss=0.1)
    assert any("cannot be told from their noise" in text for text in judgements(run))


@pytest.mark.parametrize(("last", "warned"), [(0.5, False), (0.6, False), (0.7, True), (0.3, True)])
def test_a_threshold_that_still_moves_is_named(last: float, warned: bool) -> None:
    run = finished()
    run.metrics[-1] = replace(run.metrics[-1], clip_bound=last)
    assert [text.startswith("The clip threshold C is still moving: 0.5 in") for text in judgements(run)] == (
        [True] * warned
    )


@pytest.mark.parametrize(("majority", "warned"), [(0.34, False), (0.49, False), (0.6, True)])
def test_a_label_prior_on_skewed_labels_is_named(majority: float, warned: bool) -> None:
    config = parse({"local": {"balance": "prior"}})
    found = judgements(finished({"majority_accuracy": majority}, config=config))
    assert ["local.balance = 'prior'" in text for text in found] == [True] * warned
    assert judgements(finished({"majority_accuracy": majority})) == []


def test_few_clients_in_a_round_are_named_before_the_run() -> None:
    (found,) = foresee_problems(parse({"clients": 100, "sampling-rate": 0.1}), None)
    assert "Only 10 clients are expected in a round" in found
    assert foresee_problems(parse({"clients": 200, "sampling-rate": 0.1}), None) == []
    assert foresee_problems(parse({"clients": 100, "sampling-rate": 0.1, "privacy": {"non-private": True}}), None) == []


def test_records_that_are_cut_are_named_before_the_run() -> None:
    assert foresee_problems(parse({}), FACTS) == []
    (found,) = foresee_problems(parse({}), replace(FACTS, truncated={"train": 5}))
    assert "25.0\u00a0% of the training records are cut at 128 tokens" in found
