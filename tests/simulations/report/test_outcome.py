"""The times of a report: of its rounds, and of the whole run."""

from dataclasses import replace

from simulations.report.outcome import run_time, training_time
from tests.cases.recorded_runs import finished


def test_time_in_training_is_that_of_the_rounds_and_a_runs_time_has_its_start_up() -> None:
    run = finished({"seconds": 125.0})
    run = replace(run, metrics=[replace(record, seconds=5.0) for record in run.metrics])
    assert training_time(run) == f"{5 * len(run.metrics)} s"
    assert run_time(run) == "2:05"
    published = replace(run, metrics=[replace(record, seconds=0.0) for record in run.metrics])
    assert training_time(published) == run_time(published) == "2:05"
    assert run_time(replace(run, results=None)) == training_time(run)
