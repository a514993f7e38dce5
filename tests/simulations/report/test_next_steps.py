"""Advice is given where it fits, and not beside it; commands fit the run."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from server.run_folder.telemetry import Status
from simulations.report.next_steps import advice, commands
from simulations.report.notation import without_folders
from simulations.report.read_run import read_run
from tests.cases.recorded_runs import finished, record_run_in


def with_losses(*losses: float, **settings: object):
    """The eight rounds of a run, with these losses."""
    run = finished()
    rounds = [replace(record, validation_loss=loss) for record, loss in zip(run.rounds, losses, strict=True)]
    return replace(run, metrics=[run.metrics[0], *rounds], **settings)


FLAT = (1.2, 0.9, 0.7, 0.6, 0.5, 0.5, 0.5, 0.5)  # the start is at 1.5


def test_a_run_that_is_well_gets_no_advice_on_its_course() -> None:
    assert [text for text in advice(with_losses(*FLAT)) if "loss" in text] == []


def test_a_loss_that_still_falls_asks_for_rounds() -> None:
    (text,) = [text for text in advice(with_losses(1.4, 1.3, 1.2, 1.1, 1.0, 0.9, 0.8, 0.7)) if "loss" in text]
    assert text.startswith("Validation loss still fell over the last 2 evaluations, by 0.2 of 0.8 in all: raise rounds")


def test_a_loss_that_rose_again_asks_for_smaller_steps() -> None:
    (text,) = [text for text in advice(with_losses(1.2, 0.9, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9)) if "loss" in text]
    assert text.startswith("Validation loss was lowest after round 3, 0.5, and ended at 0.9: lower the learning rate")


@pytest.mark.parametrize(("spent", "said"), [(1.0, True), (1.95, False)])
def test_epsilon_that_is_left_is_named(spent: float, said: bool) -> None:
    guarantee = {"epsilon": 2.0, "delta": 1e-5, "epsilon_spent": spent}
    run = with_losses(*FLAT, guarantee=guarantee, results={"test_accuracy": 0.5, "dimension": 100})
    run = replace(run, status=Status("completed", "", 0.0))
    assert [text.startswith("The releases cost ε 1.00 of 2.00: raise rounds") for text in advice(run)].count(
        True
    ) == said


def test_a_signal_below_the_noise_names_what_raises_it() -> None:
    run = with_losses(*FLAT)
    assert any(text.startswith("The signal in the released updates has 0.8819 times the norm") for text in advice(run))
    strong = [replace(record, signal_estimate=3.0, update_norm=3.4) for record in run.rounds]
    assert not any("signal" in text for text in advice(replace(run, metrics=[run.metrics[0], *strong])))


def test_a_run_that_failed_is_to_be_resumed_and_has_no_model(record_run) -> None:
    failed = [command.line.split()[1] for command in commands(read_run(record_run(done=2, state="failed")))]
    assert failed == ["resume", "run", "compare", "budget"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("csv:/home/ann/own.csv", "csv:…/own.csv"),
        ('load("/srv/models/base")', 'load("…/base")'),
        ("see https://example.org/a/b and/or runs/one/adapter, 1/2/3 or /reset", None),
    ],
)
def test_folders_of_a_machine_are_cut_and_nothing_else(text: str, shown: str | None) -> None:
    assert without_folders(text) == (shown or text)


def test_a_path_with_a_blank_is_quoted_for_a_shell(tmp_path: Path) -> None:
    (tmp_path / "my runs").mkdir()
    for command in commands(read_run(record_run_in(tmp_path / "my runs"))):
        assert shlex.split(command.line)[2].startswith("my runs"), command.line
